import pytest

from octavo.core.plan import SAMPLE
from octavo.types import FinishReason, InvalidRequest
from tests.core.harness import EOS, Harness


def test_one_budget_is_shared_by_running_first_then_waiting():
    h = Harness(max_num_batched_tokens=10)
    h.add(range(10, 14))
    h.step()
    h.add(range(20, 40))
    plan = h.schedule()
    assert plan.num_tokens.tolist() == [1, 9]
    assert (plan.flags & SAMPLE).tolist() == [1, 0]


def test_a_long_prompt_is_computed_in_chunks_and_drawn_from_once():
    h = Harness(max_num_batched_tokens=8)
    request = h.add(range(10, 30), max_tokens=1)
    sizes = []
    for _ in range(3):
        plan, update = h.step()
        sizes.append((int(plan.starts[0]), int(plan.num_tokens[0]), len(update.tokens)))
    assert sizes == [(0, 8, 0), (8, 8, 0), (16, 4, 1)]
    assert request.finish_reason is FinishReason.LENGTH


def test_the_long_prefill_threshold_caps_one_request_not_the_step():
    h = Harness(long_prefill_threshold=4)
    h.add(range(10, 30))
    h.add(range(40, 60))
    assert h.schedule().num_tokens.tolist() == [4, 4]


def test_beside_decoding_rows_a_chunk_is_what_the_cost_table_allows_but_128_at_least():
    class Costs:
        limit, asked = 200, None

        def chunk_limit(self, num_decode_rows, num_prompts):
            self.asked = num_decode_rows, num_prompts
            return self.limit

    costs = Costs()
    limits = {"max_num_batched_tokens": 2048, "max_model_len": 2048, "max_num_seqs": 4}
    h = Harness(num_blocks=1024, cost=costs, **limits)
    h.add([5, 6, 7])
    h.step()
    h.add(range(1000))
    assert h.schedule().num_tokens.tolist() == [1, 200]
    assert costs.asked == (1, 1)
    costs.limit = 5
    for start in (1000, 2000, 3000):
        h.add(range(start, start + 900))
    assert h.schedule().num_tokens.tolist() == [1, 128]
    assert costs.asked == (1, 3)  # one that runs, and two for which there are places


def test_without_chunking_a_prompt_waits_until_it_fits_the_step():
    h = Harness(max_num_batched_tokens=20, chunked_prefill=False)
    h.add(range(10, 26), max_tokens=2)
    h.add(range(30, 46), max_tokens=2)
    plan, _ = h.step()
    assert plan.num_tokens.tolist() == [16]
    plan, _ = h.step()
    assert plan.num_tokens.tolist() == [1, 16]


def test_what_can_never_fit_is_refused_with_the_numbers():
    h = Harness(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(InvalidRequest, match=r"6 KV blocks .* has 4"):
        h.add(range(16), max_tokens=8)
    with pytest.raises(InvalidRequest, match="maximum length of 64"):
        h.add(range(60), max_tokens=5)


def test_the_first_that_cannot_be_allocated_stops_admission():
    h = Harness(num_blocks=4, block_size=4)
    h.add(range(10, 18), max_tokens=4)
    h.schedule()
    big = h.add(range(20, 32), max_tokens=4)
    small = h.add([50, 51], max_tokens=2)
    assert h.schedule().num_rows == 1
    assert [r.handle for r in h.scheduler.waiting] == [big.handle, small.handle]


def test_priority_serves_lower_values_first_then_arrival():
    h = Harness(policy="priority", max_num_seqs=1)
    late, first, second = (h.add([p, p + 1], 1, priority=q) for p, q in ((5, 9), (15, 1), (25, 1)))
    order = []
    while h.scheduler.has_work:
        _, update = h.step()
        order += [request.handle for request in update.finished]
    assert order == [first.handle, second.handle, late.handle]


def test_the_youngest_is_preempted_and_resumes_with_its_output():
    h = Harness(num_blocks=6, block_size=4)
    old = h.add(range(10, 18), max_tokens=12)
    young = h.add(range(30, 38), max_tokens=12)
    h.run()
    assert old.num_preemptions == 0 and young.num_preemptions > 0
    assert len(h.outputs[old.handle]) == len(h.outputs[young.handle]) == 12
    assert h.pool.num_held == 0


def test_the_worst_priority_is_preempted_even_if_it_came_first():
    h = Harness(num_blocks=6, block_size=4, policy="priority")
    worst = h.add(range(10, 18), max_tokens=12, priority=5)
    best = h.add(range(30, 38), max_tokens=12, priority=0)
    h.run()
    assert worst.num_preemptions > 0 and best.num_preemptions == 0


def test_nothing_waiting_is_admitted_in_a_step_that_preempted():
    h = Harness(num_blocks=6, block_size=4)
    h.add(range(10, 18), max_tokens=12)
    young = h.add(range(30, 38), max_tokens=12)
    while h.pool.num_free:
        h.step()
    waiting = h.add([60, 61], max_tokens=1)
    while not young.num_preemptions:
        plan, _ = h.step()
    assert not plan.new_requests and h.pool.num_free
    assert waiting in list(h.scheduler.waiting)


def test_eos_counts_only_after_min_tokens():
    h = Harness()
    request = h.add([5, 6], max_tokens=9, min_tokens=3)
    plan = h.schedule()
    assert plan.new_requests[0].min_stop_ids == [EOS]
    h.finish(plan, EOS)
    for _ in range(3):
        h.step(token=EOS)
    assert len(h.outputs[request.handle]) == 4
    assert request.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on_but_stop_ids_still_stop():
    h = Harness()
    request = h.add([5, 6], max_tokens=9, ignore_eos=True, stop_token_ids=[77])
    h.step(token=EOS)
    h.step(token=EOS)
    h.step(token=77)
    assert request.finish_reason is FinishReason.STOP and request.stop_reason == 77


def test_max_tokens_zero_ends_without_a_step_unless_prompt_logprobs_are_wanted():
    h = Harness()
    echo = h.add([5, 6, 7], max_tokens=0)
    assert echo.finish_reason is FinishReason.LENGTH and h.scheduler.finished_early == [echo]
    scored = h.add([5, 6, 7], max_tokens=0, prompt_logprobs=1)
    plan, update = h.step()
    assert plan.num_tokens.tolist() == [2] and not (plan.flags & SAMPLE).any()
    assert update.finished == [scored] and h.pool.num_held == 0


def test_abort_frees_blocks_and_slot_at_once_wherever_the_request_is():
    h = Harness(max_num_seqs=1)
    running = h.add(range(10, 20))
    waiting = h.add(range(30, 40))
    plan = h.schedule()
    assert h.scheduler.abort(waiting) and h.scheduler.abort(running)
    assert h.pool.num_held == 0 and not len(h.scheduler.running)
    update = h.finish(plan)
    assert not len(update.tokens) and not h.scheduler.abort(running)


def test_a_failed_step_ends_its_requests_and_forgets_what_it_should_have_written():
    h = Harness()
    hit = h.add(range(10, 20), max_tokens=8)
    h.schedule()
    waiting = h.request(range(50, 60))
    ended = h.scheduler.fail()
    assert ended == [hit] and hit.finish_reason is FinishReason.ERROR
    h.scheduler.check()
    h.scheduler.add(waiting)
    again = h.add(range(10, 20), max_tokens=2)
    h.run()
    assert again.num_cached_tokens == 0 and waiting.finish_reason is FinishReason.LENGTH


def test_events_tell_the_story_in_order():
    h = Harness()
    h.add(range(10, 20), max_tokens=1)
    h.add(range(10, 20), max_tokens=1)
    h.run()
    kinds = [(event.kind.value, event.handle, event.detail) for event in h.events]
    assert kinds == [
        ("admitted", 1, 0),
        ("copied", 2, 1),
        ("admitted", 2, 9),
        ("finished", 1, 11),
        ("finished", 2, 11),
    ]
