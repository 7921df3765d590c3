from octavo.types import FinishReason
from tests.engine.toy import add_request, continuation, toy_engine, toy_info


def run(engine, limit=500):
    """Everything an idle engine tells until it is idle again."""
    told = []
    for _ in range(limit):
        if not engine.has_work:
            return told
        outputs = engine.step()
        if outputs is not None:
            told.append(outputs)
    raise AssertionError("never idle")


def tokens_of(told, handle):
    return [token for outputs in told for h, token in outputs.pairs() if h == handle]


def finishes(told):
    return {event.handle: event for outputs in told for event in outputs.finished}


def test_many_requests_get_what_each_would_get_alone():
    engine, _ = toy_engine(toy_info(num_blocks=12))
    prompts = [list(range(20 + i, 25 + 2 * i)) for i in range(8)]
    for handle, prompt in enumerate(prompts):
        engine.add(add_request(handle, prompt, 10))
    told = run(engine)
    for handle, prompt in enumerate(prompts):
        assert tokens_of(told, handle) == continuation(prompt, 10)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().blocks_used == 0


def test_without_overlap_the_answers_are_the_same():
    engine, _ = toy_engine(async_scheduling=False)
    engine.add(add_request(0, [5, 6, 7], 9))
    assert tokens_of(run(engine), 0) == continuation([5, 6, 7], 9)


def test_n_choices_have_handles_of_their_own_and_seeds_in_a_row():
    engine, executor = toy_engine()
    seeds = []
    submit = executor.submit

    def spy(plan):
        seeds.extend(new.seed for new in plan.new_requests)
        submit(plan)

    executor.submit = spy
    engine.add(add_request(10, [5, 6, 7], 4, n=3, seed=40))
    told = run(engine)
    assert sorted(finishes(told)) == [10, 11, 12] and sorted(seeds) == [40, 41, 42]
    assert engine.stats().num_copies == 2


def test_unseeded_requests_draw_with_a_seed_from_the_servers_seed_and_their_id():
    def seeds_of(server_seed):
        engine, executor = toy_engine(seed=server_seed)
        seen = []
        submit = executor.submit
        executor.submit = lambda plan: (
            seen.extend(n.seed for n in plan.new_requests),
            submit(plan),
        )
        for handle in (1, 2):
            engine.add(add_request(handle, [5, handle], 1))
        run(engine)
        return seen

    assert seeds_of(0) == seeds_of(0) != seeds_of(1)
    assert len(set(seeds_of(0))) == 2


def test_what_cannot_fit_is_rejected_and_costs_nobody_else_anything():
    engine, _ = toy_engine(toy_info(num_blocks=4))
    engine.add(add_request(1, [5, 6], 4))
    engine.add(add_request(2, list(range(3, 23)), 8, n=2))
    told = run(engine)
    rejected = [entry for outputs in told for entry in outputs.rejected]
    assert [entry.handle for entry in rejected] == [2, 3] and rejected[0].param == "max_tokens"
    assert tokens_of(told, 1) == continuation([5, 6], 4)


def test_a_request_that_cannot_be_taken_in_ends_alone_and_the_loop_goes_on():
    engine, _ = toy_engine()
    damaged = add_request(1, [5, 6], 4, n=2)
    damaged.prompt_ids = b"abc"
    engine.add(damaged)
    engine.add(add_request(3, [5, 6], 4))
    told = run(engine)
    ends = finishes(told)
    assert [ends[handle].reason for handle in (1, 2)] == [FinishReason.ERROR] * 2
    assert "buffer size" in ends[1].message
    assert tokens_of(told, 3) == continuation([5, 6], 4)


def test_an_abort_ends_the_request_and_drops_its_results_in_flight():
    engine, _ = toy_engine()
    engine.add(add_request(1, [5, 6], 40))
    engine.step()
    engine.abort([1, 999])
    told = run(engine)
    assert finishes(told)[1].reason is FinishReason.ABORT
    assert not tokens_of(told, 1)
    engine.abort([1])
    assert not engine.has_work and engine.stats().blocks_used == 0


def test_a_failed_step_ends_its_requests_and_the_loop_goes_on():
    engine, executor = toy_engine()
    engine.add(add_request(1, [5, 6], 40))
    engine.step()
    executor.fail_next = True
    told = run(engine)
    assert finishes(told)[1].reason is FinishReason.ERROR
    assert finishes(told)[1].message == "the toy broke"
    engine.add(add_request(2, [5, 6], 5))
    assert tokens_of(run(engine), 2) == continuation([5, 6], 5)


def test_started_is_told_once_even_if_the_request_is_preempted():
    engine, _ = toy_engine(toy_info(num_blocks=6))
    for handle, first in ((1, 10), (2, 30)):
        engine.add(add_request(handle, list(range(first, first + 8)), 12))
    told = run(engine)
    started = [event.handle for outputs in told for event in outputs.started]
    assert sorted(started) == [1, 2] and finishes(told)[2].num_preemptions > 0


def test_choices_share_a_prompt_whose_logprobs_are_wanted():
    engine, executor = toy_engine()
    computed = []
    submit = executor.submit
    executor.submit = lambda plan: (computed.append(plan.total_tokens), submit(plan))
    engine.add(add_request(1, list(range(5, 25)), 1, n=4, prompt_logprobs=1))
    assert len(finishes(run(engine))) == 4
    assert sum(computed) == 20 + 3


def test_logprob_rows_follow_the_tokens():
    engine, _ = toy_engine()
    engine.add(add_request(1, [5, 6], 3, logprobs=0))
    told = run(engine)
    rows = [row for outputs in told for row in outputs.logprobs]
    assert [row.ids for row in rows] == [[token] for token in continuation([5, 6], 3)]
    assert all(row.rank == 1 and row.values == [-0.5] for row in rows)


def test_timings_are_in_order_and_counters_add_up():
    engine, _ = toy_engine()
    for handle in range(3):
        engine.add(add_request(handle, [5, 6, handle], 4))
    told = run(engine)
    for event in finishes(told).values():
        t = event.timings
        assert 0 <= t.first_scheduled <= t.first_token <= t.last_token
    stats = engine.stats()
    assert stats.generation_tokens == 12 and stats.prompt_tokens == 9
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_the_prefix_cache_is_reset_only_when_idle():
    engine, _ = toy_engine()
    engine.add(add_request(1, list(range(3, 13)), 4))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.stats().blocks_cached > 0
    assert engine.reset_prefix_cache() and engine.stats().blocks_cached == 0


def test_prefixes_of_two_cache_dtypes_have_other_keys():
    kinds = ("auto", "fp8", "fp8_e5m2", "int8")
    roots = {toy_engine(kv_cache_dtype=kind)[0]._root(b"salt") for kind in kinds}
    assert len(roots) == len(kinds)
