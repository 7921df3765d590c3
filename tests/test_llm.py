"""LLM and AsyncLLM around the engine: interrupts, closed event loops, closed engines.

What they answer is tested in tests/exactness.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from octavo.outputs import RequestOutput
from octavo.types import ConfigError, EngineDead, InvalidRequest
from tests.fixtures.waiting import until

SETTINGS = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "cpu_threads": 1}
PROMPT = [5, 6, 7]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_r: Path) -> Iterator[LLM]:
    made = LLM(str(model_r), **SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def async_llm(model_r: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(model_r), **SETTINGS)
    yield made
    made.close()


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0].token_ids


async def last(outputs: AsyncIterator[RequestOutput]) -> list[int]:
    async for output in outputs:
        found = output.outputs[0].token_ids
    return found


def test_replicas_are_for_the_server(model_r):
    with pytest.raises(ConfigError, match="only `octavo serve` runs several engines"):
        LLM(str(model_r), **SETTINGS, data_parallel_size=2)


def test_ctrl_c_inside_a_step_leaves_the_engine_as_good_as_new(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llm)
    scheduler, calls = llm.engine.scheduler, 0
    update = scheduler.update

    def interrupted(result):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(result)

    monkeypatch.setattr(scheduler, "update", interrupted)
    # A test run in the background of a script ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, LONG, use_tqdm=False)
        assert calls < 10
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.stats.blocks_used == 0 and answer(llm) == expected


def test_steps_smaller_than_the_warm_up_give_the_same_answer(llm: LLM, model_r: Path) -> None:
    tiny = LLM(str(model_r), max_num_batched_tokens=2, max_num_seqs=2, **SETTINGS)
    try:
        assert answer(tiny) == answer(llm)
    finally:
        tiny.close()


def test_an_answer_that_a_stop_string_ended_has_all_its_times(llm: LLM) -> None:
    free = llm.generate(PROMPT, SHORT, use_tqdm=False)[0].outputs[0].text
    params = SHORT.clone(max_tokens=1000, stop=[free.strip()[-1]])
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop"
    times = output.timings
    assert 0 <= times.arrival <= times.first_scheduled <= times.first_token <= times.last_token


def test_what_choices_share_with_each_other_is_no_hit_of_their_prompt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = list(range(10, 60))
    for expected in (0, len(prompt) - 1):
        output = llm.generate(prompt, SHORT.clone(n=3), use_tqdm=False)[0]
        assert output.num_cached_tokens == expected


def test_a_refused_prompt_leaves_nothing_of_the_others_in_the_engine(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([PROMPT, [10**6]], SHORT, use_tqdm=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "prompt", [None, 5, [None], [5.5], {"prompt": None}, {"prompt_token_ids": 5}], ids=str
)
def test_what_is_no_prompt_is_named(llm: LLM, prompt: Any) -> None:
    for call in (llm.generate, llm.embed):
        with pytest.raises(InvalidRequest, match="a list of token ids"):
            call(prompt, use_tqdm=False)


def test_a_closed_llm_says_so(model_r: Path) -> None:
    llm = LLM(str(model_r), **SETTINGS)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        answer(llm)


def test_a_cancelled_consumer_frees_its_request(async_llm: AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(last(async_llm.generate(PROMPT, LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: not async_llm.engine.has_work)
    assert async_llm.stats.blocks_used == 0


def test_a_consumer_whose_event_loop_was_closed_costs_nobody_else_anything(
    async_llm: AsyncLLM,
) -> None:
    abandoned = async_llm.generate(PROMPT, LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(abandoned))
    loop.close()
    until(lambda: not async_llm.engine.has_work)
    assert len(asyncio.run(last(async_llm.generate(PROMPT, SHORT)))) == 8


def test_closing_ends_open_requests_and_refuses_later_ones(model_r: Path) -> None:
    llm = AsyncLLM(str(model_r), **SETTINGS)

    async def main() -> None:
        open_request = llm.generate(PROMPT, LONG)
        await anext(open_request)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead, match="closed"):
            await last(open_request)
        with pytest.raises(EngineDead, match="closed"):
            await last(llm.generate(PROMPT, SHORT))

    asyncio.run(main())


def test_closing_ends_the_thread_that_compiles_grammars(model_r: Path) -> None:
    before = threading.active_count()
    llm = AsyncLLM(str(model_r), **SETTINGS)
    constrained = SamplingParams(
        max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z]+")
    )
    asyncio.run(last(llm.generate(PROMPT, constrained)))
    llm.close()
    assert threading.active_count() == before
