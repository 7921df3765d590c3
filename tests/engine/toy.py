"""An executor without a device: the next token is a function of the whole sequence before it."""

from __future__ import annotations

from collections import deque

import numpy as np

from octavo.config import EngineConfig
from octavo.core.plan import SAMPLE, Logprobs, StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.messages import AddRequest, EngineInfo, pack_ids
from octavo.flags import from_flags
from octavo.types import SamplingParams, StepFailed

VOCABULARY = 1000
EOS = 2


def next_token(sequence: list[int]) -> int:
    """The toy model: any function of the sequence that is never EOS."""
    return 10 + (sum(sequence) * 31 + len(sequence) * 7) % (VOCABULARY - 10)


def continuation(prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class ToyExecutor:
    """Follows plans to the letter, keeping only each slot's token history."""

    problem = ""

    def __init__(self, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self.histories: dict[int, list[int]] = {}
        self.fail_next = False
        self.num_pending = 0  # idle moments that can be used
        self.ended = False
        self._results: deque[StepResult | StepFailed] = deque()

    def submit(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            del self.histories[slot]
        for index, new in enumerate(plan.new_requests):
            begin, end = plan.new_indptr[index : index + 2]
            self.histories[new.slot] = plan.new_token_ids[begin:end].tolist()
        tokens = np.zeros((plan.num_rows, 1), dtype=np.int32)
        draws = (plan.flags & SAMPLE).astype(np.int32)
        for row in np.nonzero(draws)[0]:
            history = self.histories[int(plan.slots[row])]
            assert plan.starts[row] + plan.num_tokens[row] == len(history)
            history.append(next_token(history))
            tokens[row] = history[-1]
        if self.fail_next:
            self.fail_next = False
            self._results.append(StepFailed(plan.step, "the toy broke"))
            return
        drawn = np.nonzero(draws)[0].astype(np.int32)
        ids = np.concatenate([tokens[drawn], np.full((len(drawn), 1), -1)], axis=1)
        ids = ids.astype(np.int32)
        logprobs = Logprobs(ids, np.full(ids.shape, -0.5, np.float32), np.ones(len(drawn), int))
        self._results.append(StepResult(plan.step, tokens, draws, drawn, logprobs))

    def collect(self) -> StepResult:
        result = self._results.popleft()
        if isinstance(result, StepFailed):
            raise result
        return result

    def idle(self) -> bool:
        if not self.num_pending:
            return False
        self.num_pending -= 1
        return True

    def abandon(self) -> None:
        pass

    def shutdown(self) -> None:
        self.ended = True


def toy_info(**changes) -> EngineInfo:
    facts = {
        "model": "toy",
        "architecture": "toy",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "vocab_size": VOCABULARY,
        "max_model_len": 64,
        "eos_ids": [EOS],
        "block_size": 4,
        "num_blocks": 64,
        "kv_cache_bytes": 64,
        "weight_bytes": 0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "implementations": {},
        "startup_seconds": {},
        "reasons": {},
    }
    return EngineInfo(**{**facts, **changes})


def toy_engine(info: EngineInfo | None = None, **settings) -> tuple[Engine, ToyExecutor]:
    executor = ToyExecutor()
    config = from_flags(EngineConfig, settings)
    return Engine(config, info or toy_info(), executor), executor


def add_request(handle: int, prompt: list[int], max_tokens: int, **params) -> AddRequest:
    return AddRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_ids=pack_ids(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        arrival=0.0,
    )
