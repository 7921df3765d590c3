"""Outputs that their grammar ends: complete, or unable to go on (rule 9 of overlap)."""

from __future__ import annotations

import pytest

from octavo.types import FinishReason
from tests.core.harness import EOS, Harness


def test_a_complete_output_ends_with_its_token_and_what_follows_is_dropped():
    h = Harness()
    request, other = h.add([5, 6], 9), h.add([7, 8], 3)
    first, second = h.schedule(), h.schedule()
    update = h.finish(first, {0: 40, 1: 41}, {0: ""})
    assert [r.handle for r in update.finished] == [request.handle]
    h.finish(second, 50)  # of the ended one this is overrun
    h.run()
    assert h.outputs == {request.handle: [40], other.handle: [41, 50, 100]}
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
    assert request.timings.last_token >= 0


@pytest.mark.parametrize("options", [{"min_tokens": 5}, {"ignore_eos": True}, {"max_tokens": 1}])
def test_completeness_goes_before_min_tokens_ignored_eos_and_length(options):
    h = Harness()
    request = h.add([5, 6], **options)
    h.finish(h.schedule(), EOS if "ignore_eos" in options else 40, {0: ""})
    assert request.finish_reason is FinishReason.STOP
    h.run()


def test_a_stop_id_that_completes_an_output_is_told():
    h = Harness()
    request = h.add([5, 6], stop_token_ids=[40])
    h.finish(h.schedule(), 40, {0: ""})
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 40)
    h.run()


@pytest.mark.parametrize("message", ["", "nothing may follow"])
def test_one_that_ends_in_place_of_a_token_tells_none(message):
    h = Harness()
    request, other = h.add([5, 6], 9), h.add([7, 8], 3)
    first, second = h.schedule(), h.schedule()
    update = h.finish(first, 40, {0: message}, undrawn=(0,))
    assert [r.handle for r in update.finished] == [request.handle]
    h.finish(second, 50)
    h.run()
    assert h.outputs == {other.handle: [40, 50, 100]}
    assert request.message == message
    assert request.finish_reason is (FinishReason.ERROR if message else FinishReason.STOP)


@pytest.mark.parametrize("message", [None, "", "nothing may follow"])
def test_a_preempted_request_may_be_ended_by_a_result_in_flight(message):
    """None: by a token that completes it."""
    h = Harness(num_blocks=6, block_size=4)
    _, young, plans = h.preempted()
    told = len(h.outputs[young.handle])
    for index, plan in enumerate(plans):
        if index == 0 and message is None:
            h.finish(plan, 60, {1: ""})
        elif index == 0:
            h.finish(plan, 60, {1: message}, undrawn=(1,))
        else:
            h.finish(plan, 60)
    assert young.message == (message or "") and not len(h.scheduler.waiting)
    assert young.finish_reason is (FinishReason.ERROR if message else FinishReason.STOP)
    assert len(h.outputs[young.handle]) == told + (message is None)
    h.run()
    h.scheduler.check()
