"""The engine on the GPU's runner (tests/worker/interpreted.py): answers are those of a CPU's runner
that serves each request alone, whatever is in flight, padded, preempted, shared or aborted."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.engine.engine import Engine, Executor
from octavo.engine.messages import AddRequest, EngineInfo, pack_ids
from octavo.flags import from_flags
from octavo.types import FinishReason, Pooling, SamplingParams
from octavo.worker.executor import CudaExecutor
from octavo.worker.runner import Runner
from tests.worker.interpreted import BLOCK, Interpreted, config, ways_to_run
from tests.worker.plans import SumModel

EOS = 1
FEW_BLOCKS = 22  # of four tokens: less than four of the longest requests need
STEM = [(11 * i + 3) % 97 for i in range(30)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1, "presence_penalty": 0.7},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0, "n": 3},
]
# Steps with one of these are enqueued kernel by kernel.
SPECIAL: list[dict[str, Any]] = [
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0, "logit_bias": {5: 4.0, EOS: 9.0}, "min_tokens": 2},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 1.0, "allowed_token_ids": list(range(20)), "n": 2},
]


class AtOnce:
    """An executor for a runner that waits for its steps."""

    num_pending = 0
    num_stages = 1
    problem = ""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._results.append(self._runner.execute(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def idle(self) -> bool:
        return False

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        self._results.clear()


def make_engine(
    executor: Executor, num_blocks: int, device_kind: str = "cpu", **settings: Any
) -> Engine:
    info = EngineInfo(
        model="sum", architecture="sum", dtype="float32", device="cpu", threads=1,
        vocab_size=SumModel.vocab, max_model_len=64, eos_ids=[EOS], block_size=BLOCK,
        num_blocks=num_blocks, kv_cache_bytes=num_blocks, weight_bytes=0, max_num_seqs=8,
        max_num_batched_tokens=64, implementations={}, startup_seconds={}, reasons={},
        device_kind=device_kind,
    )  # fmt: skip
    return Engine(from_flags(EngineConfig, settings), info, executor)


def make_requests(count: int, seed: int) -> list[AddRequest]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        special = 3 <= index < 8
        kind = (SPECIAL if special else KINDS)[index % (4 if special else 7)]
        tail = [rng.randrange(2, 97) for _ in range(rng.randint(1, 12))]
        prompt = STEM[: rng.randint(0, len(STEM))] * (rng.random() < 0.6) + tail
        max_tokens = rng.randint(2, 9)
        params = SamplingParams(max_tokens=max_tokens, seed=1000 * index, **kind)
        words = [[rng.randrange(97) for _ in range(rng.randint(1, 2))] for _ in range(20)]
        bad = words if special and index % 2 else []
        requests.append(
            AddRequest(100 * index, str(index), pack_ids(prompt), params, max_tokens, 0.0,
                       bad_words=bad)
        )  # fmt: skip
    return requests


class Heard:
    """All that an engine has said about its requests, by handle."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[tuple[list[int], int]]] = {}
        self.prompt_logprobs: dict[int, dict[int, list[int]]] = {}  # position -> ids
        self.reasons: dict[int, FinishReason] = {}
        self.vectors: dict[int, bytes] = {}

    def step(self, engine: Engine) -> None:
        outputs = engine.step()
        if outputs is None:
            return
        for handle, token in outputs.pairs():
            self.tokens.setdefault(handle, []).append(token)
        for row in outputs.logprobs:
            self.logprobs.setdefault(row.handle, []).append((row.ids, row.rank))
        for rows in outputs.prompt_logprobs:
            told = self.prompt_logprobs.setdefault(rows.handle, {})
            for position, ids in enumerate(rows.ids, start=rows.start):
                assert told.setdefault(position, ids) == ids  # again after a preemption
        for pooled in outputs.pooled:
            assert pooled.handle not in self.vectors
            self.vectors[pooled.handle] = pooled.values
        for finished in outputs.finished:
            assert finished.handle not in self.reasons
            self.reasons[finished.handle] = finished.reason
        assert not outputs.rejected


def served_alone(requests: list[AddRequest]) -> Heard:
    runner = Runner(config(), Path("none"), lambda path, config, progress: SumModel())
    runner.start(lambda *news: None)
    settings = {"async_scheduling": False, "enable_prefix_caching": False}
    engine, heard = make_engine(AtOnce(runner), 64, **settings), Heard()
    for request in requests:
        engine.add(request)
        while engine.has_work:
            heard.step(engine)
    return heard


def served_together(
    engine: Engine, requests: list[AddRequest], aborted: set[int], seed: int
) -> Heard:
    """Arrivals in bursts; the requests ``aborted`` leave after some steps."""
    rng, heard, waiting = random.Random(seed), Heard(), deque(requests)
    leaving: dict[int, list[int]] = {}  # step -> handles
    step = 0
    while waiting or engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 2, 6))):
            if waiting:
                request = waiting.popleft()
                engine.add(request)
                if request.handle in aborted:
                    handles = list(range(request.handle, request.handle + request.params.n))
                    leaving.setdefault(step + rng.randint(1, 4), []).extend(handles)
        heard.step(engine)
        engine.abort(leaving.pop(step, []))
        step += 1
    engine.abort([h for handles in leaving.values() for h in handles])
    return heard


@pytest.mark.slow
@ways_to_run(FEW_BLOCKS)
def test_answers_are_those_of_requests_served_alone_on_a_cpu(
    num_blocks: int, graphs: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(18, seed=num_blocks)
    aborted = {requests[4].handle, requests[10].handle, requests[12].handle}
    runner = Interpreted(monkeypatch if graphs else None)
    executor = CudaExecutor(runner.gpu)
    engine = make_engine(executor, num_blocks, **settings)
    while executor.idle():
        pass
    expected = served_alone(requests)
    found = served_together(engine, requests, aborted, seed=5)

    assert found.reasons.keys() == expected.reasons.keys()
    for handle, tokens in expected.tokens.items():
        mine = found.tokens.get(handle, [])
        if handle // 100 * 100 in aborted:
            assert mine == tokens[: len(mine)]
            continue
        assert mine == tokens
        assert found.reasons[handle] == expected.reasons[handle]
        assert found.logprobs.get(handle) == expected.logprobs.get(handle)
        assert found.prompt_logprobs.get(handle) == expected.prompt_logprobs.get(handle)
    engine.scheduler.check()
    stats = engine.stats()
    assert stats.blocks_used == stats.num_running == stats.num_waiting == 0
    assert stats.prefix_hits > 0 and stats.num_copies > 0
    if num_blocks == FEW_BLOCKS:
        assert stats.num_preemptions > 0
    if graphs:
        replayed = {s for graph in runner.cuda.graphs if graph.num_replays for s in graph.shapes}
        assert {bool(shape.prompt_rows) for shape in replayed} == {True, False}


def test_vectors_are_those_of_a_cpu_beside_answers_and_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of one chunk and of several; steps without any go on as graphs."""
    rng = random.Random(8)
    requests = [
        AddRequest(
            index,
            str(index),
            pack_ids([*STEM, *(rng.randrange(2, 97) for _ in range(rng.randint(1, 30)))][-size:]),
            SamplingParams(max_tokens=0, temperature=0),
            0,
            0.0,
            pooling=list(Pooling)[index % 2],
        )
        for index, size in enumerate((1, 2, 60, 60, 7, 33, 60, 21))
    ]
    for index in range(100, 106):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        prompt = [rng.randrange(2, 97) for _ in range(10)]
        message = AddRequest(index, str(index), pack_ids(prompt), params, 12, 0.0)
        requests.insert(rng.randrange(8), message)
    runner = Interpreted(monkeypatch)
    executor = CudaExecutor(runner.gpu)
    engine = make_engine(executor, FEW_BLOCKS, long_prefill_token_threshold=16)
    while executor.idle():
        pass
    expected, found = served_alone(requests), served_together(engine, requests, set(), seed=2)
    assert found.tokens == expected.tokens
    assert found.vectors.keys() == expected.vectors.keys() == set(range(8))
    for handle, values in expected.vectors.items():
        mine, theirs = (np.frombuffer(v, "<f4") for v in (found.vectors[handle], values))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    assert any(graph.num_replays for graph in runner.cuda.graphs)
    assert engine.stats().num_preemptions > 0
    engine.scheduler.check()
