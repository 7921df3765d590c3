"""The rules of overlap (design: plans in flight), one test or more for each."""

from octavo.core.plan import SAMPLE
from octavo.types import FinishReason
from tests.core.harness import EOS, Harness


def test_two_plans_are_in_flight_and_no_third():
    h = Harness()
    h.add([5, 6])
    first, second = h.schedule(), h.schedule()
    assert (first.starts.tolist(), second.starts.tolist()) == ([0], [2])
    assert h.schedule() is None


def test_rule_1_slots_and_blocks_freed_by_one_plan_serve_the_next():
    h = Harness(max_num_seqs=1, num_blocks=3)
    h.add([5, 6], max_tokens=1)
    other = h.add([7, 8, 9, 10, 11], max_tokens=1)
    h.step()
    plan = h.schedule()
    assert plan.freed_slots.tolist() == [0] and plan.slots.tolist() == [0]
    h.finish(plan)
    assert other.finish_reason is FinishReason.LENGTH


def test_rule_2_a_result_is_never_taken_for_the_slots_next_owner():
    h = Harness(max_num_seqs=1)
    first = h.add([5, 6], max_tokens=8)
    h.step()
    stale = h.schedule()
    h.scheduler.abort(first)
    second = h.add([15, 16], max_tokens=8)
    fresh = h.schedule()
    assert stale.slots.tolist() == fresh.slots.tolist()
    assert not len(h.finish(stale, 55).tokens)
    h.finish(fresh, 66)
    assert h.outputs[second.handle] == [66]


def test_rule_3_a_preempted_requests_results_in_flight_append_and_nothing_else():
    h = Harness(num_blocks=6, block_size=4)
    old, young, plans = h.preempted()
    known = len(young.tokens)
    for plan in plans:
        h.finish(plan, {1: 200})
    assert young.tokens[known:].tolist() == [200] * (len(young.tokens) - known)
    assert young.in_flight == 0 and not young.blocks
    h.run()
    assert len(h.outputs[young.handle]) == 12 and len(h.outputs[old.handle]) == 12


def test_rule_3_a_preempted_request_may_end_by_its_result_in_flight():
    h = Harness(num_blocks=6, block_size=4)
    _, young, plans = h.preempted()
    for plan in plans:
        h.finish(plan, {1: EOS})
    assert young.finish_reason is FinishReason.STOP and not len(h.scheduler.waiting)
    h.run()
    h.scheduler.check()


def test_rule_4_eos_costs_one_overrun_row_whose_token_is_dropped():
    h = Harness()
    request = h.add([5, 6], max_tokens=8)
    first, overrun = h.schedule(), h.schedule()
    h.finish(first, EOS)
    assert request.finish_reason is FinishReason.STOP
    assert not len(h.finish(overrun, 99).tokens)
    assert h.outputs[request.handle] == [EOS] and h.scheduler.counters.generation_tokens == 1


def test_rule_5_no_plan_reaches_beyond_the_maximum_length():
    h = Harness(num_blocks=1, block_size=4)
    h.add([5, 6, 7], max_tokens=1)
    assert h.schedule().num_tokens.tolist() == [3]
    assert h.schedule() is None


def test_rule_6_a_reader_comes_in_a_later_plan_than_the_writer():
    h = Harness()
    h.add(range(10, 19), max_tokens=4)
    h.add(range(10, 19), max_tokens=4)
    writer = h.schedule()
    assert writer.num_rows == 1
    reader = h.schedule()
    assert reader.starts.tolist() == [9, 8]
    assert reader.num_tokens.tolist() == [1, 1]


def test_rule_6_a_request_waits_for_the_prefix_being_computed_and_others_pass():
    h = Harness(long_prefill_threshold=8, num_blocks=64)
    h.add(range(10, 34), max_tokens=2)
    twin = h.add(range(10, 34), max_tokens=2)
    h.step()
    assert twin.slot == -1
    other = h.add([70, 71], max_tokens=2)
    h.step()
    h.step()
    assert other.timings.first_scheduled >= 0
    h.run()
    assert twin.num_cached_tokens == 23


def test_rule_6_an_abort_of_the_writer_wakes_who_waits():
    h = Harness(max_num_batched_tokens=8)
    writer = h.add(range(10, 34), max_tokens=2)
    twin = h.add(range(10, 34), max_tokens=2)
    h.step()
    h.scheduler.abort(writer)
    h.run()
    assert len(h.outputs[twin.handle]) == 2 and twin.num_cached_tokens == 8


def test_rule_6_output_blocks_are_hashed_when_their_ids_are_known():
    h = Harness(block_size=4)
    h.add([5, 6], max_tokens=8)
    first, second = h.schedule(), h.schedule()
    h.finish(first, 50)
    third = h.schedule()
    h.finish(second, 51)
    continuation = h.add([5, 6, 50, 51, 90], max_tokens=1)
    plan = h.schedule()
    assert plan.starts.tolist()[-1] == 4 and continuation.num_cached_tokens == 4
    h.finish(third)
    h.finish(plan)


def test_rule_7_copies_name_a_pinned_source_and_a_fresh_destination():
    h = Harness(block_size=4)
    writer = h.add([5, 6, 7, 8, 9, 10], max_tokens=4)
    readers = [h.add([5, 6, 7, 8, 9, 10], max_tokens=4) for _ in range(3)]
    h.schedule()
    plan = h.schedule()
    assert plan.num_rows == 4 and len(plan.copies) == 3
    assert set(plan.copies[:, 0].tolist()) == {writer.blocks[1]}
    destinations = plan.copies[:, 1].tolist()
    assert destinations == [reader.blocks[1] for reader in readers]
    assert len({*destinations, *writer.blocks}) == 5


def test_rows_bring_no_ids_but_new_requests_do():
    h = Harness()
    h.add([5, 6, 7], max_tokens=4)
    first, second = h.schedule(), h.schedule()
    assert first.new_token_ids.tolist() == [5, 6, 7]
    assert second.num_rows == 1 and not len(second.new_token_ids)
    assert second.flags[0] & SAMPLE
