"""Random load on an engine in this process: arrivals, all kinds of sampling, aborts."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo import LLM, SamplingParams
from octavo.engine.admission import prepare
from octavo.engine.messages import Outputs
from octavo.outputs import RequestOutput
from octavo.types import FinishReason, InvalidRequest

NEAR_TIE = 0.5  # of log-probabilities: what 16 bits may turn round
ABORT_SHARE = 0.25
STEPS_PER_CHECK = 50


@dataclass(frozen=True)
class Golden:
    """A prompt, what a quiet engine answered greedily, and of each token of that what it would have
    said otherwise, with the lead over it."""

    prompt: list[int]
    tokens: list[int]
    seconds: list[int]
    leads: list[float]

    @classmethod
    def of(cls, output: RequestOutput) -> Golden:
        choice = output.outputs[0]
        assert choice.logprobs is not None
        pairs = [list(candidates.items())[:2] for candidates in choice.logprobs]
        return cls(
            output.prompt_token_ids,
            choice.token_ids,
            [pair[1][0] for pair in pairs],
            [pair[0][1].logprob - pair[1][1].logprob for pair in pairs],
        )

    def judge(self, tokens: list[int]) -> str:
        """ "equal", "near tie", or "wrong": up to the first difference."""
        for mine, known, second, lead in zip(tokens, self.tokens, self.seconds, self.leads):
            if mine != known:
                return "near tie" if mine == second and lead < NEAR_TIE else "wrong"
        return "equal" if len(tokens) == len(self.tokens) else "wrong"


GOLDEN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
QUIET = GOLDEN.clone(logprobs=2)  # the same, heard with what else could have been said


def hear_goldens(llm: LLM, rng: random.Random) -> list[Golden]:
    """One after the other, on an engine that does nothing else."""
    vocabulary, longest = llm.info.vocab_size, llm.info.max_model_len - 24
    found = []
    for length in (2, 17, 40, 64, min(130, longest)):
        prompt = [rng.randrange(4, vocabulary) for _ in range(length)]
        found.append(Golden.of(llm.generate(prompt, QUIET, use_tqdm=False)[0]))
    return found


def random_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    """Greedy, plain or truncated draws, penalties; now and then edits, reports, choices."""
    chosen: dict[str, Any] = {
        "temperature": rng.choice((0, 0, 0.6, 1.0, 1.4)),
        "max_tokens": rng.choice((1, 3, 8, 20, 60)),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.choice((None, rng.randrange(2**63))),
    }
    for name, share, values in (
        ("top_k", 0.3, (1, 5, 40, 10_000)),
        ("top_p", 0.3, (0.1, 0.8, 0.95)),
        ("min_p", 0.15, (0.02, 0.3)),
        ("repetition_penalty", 0.15, (0.8, 1.2)),
        ("presence_penalty", 0.1, (-0.5, 0.5)),
        ("frequency_penalty", 0.1, (0.4,)),
        ("logprobs", 0.1, (0, 1, 20)),
        ("prompt_logprobs", 0.05, (0, 3)),
        ("min_tokens", 0.1, (1,)),
        ("n", 0.1, (2, 3)),
        ("stop_token_ids", 0.1, (list(range(0, vocabulary, 7)),)),
        ("logit_bias", 0.05, ({rng.randrange(vocabulary): 3.0},)),
        ("allowed_token_ids", 0.05, (list(range(10, 30)),)),
    ):
        if rng.random() < share:
            chosen[name] = rng.choice(values)
    return SamplingParams(**chosen)


@dataclass
class Open:
    """A handle that has not ended yet."""

    params: SamplingParams
    golden: Golden | None
    tokens: list[int] = field(default_factory=list)
    leaves_after: int | None = None  # tokens, after which it is aborted
    aborted: bool = False


class Load:
    """``run`` drives an LLM's engine by hand. ``problems``: what should not have been; ``counts``
    of how requests ended and what became of known answers."""

    def __init__(self, llm: LLM, goldens: list[Golden], rng: random.Random) -> None:
        self.llm = llm
        self.goldens = goldens
        self.rng = rng
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self._open: dict[int, Open] = {}
        self._next_handle = 1 << 20
        self._most_open = 2 * llm.info.max_num_seqs
        stem = random.Random(0)
        longest = llm.info.max_model_len - 64
        self._stem = [stem.randrange(4, llm.info.vocab_size) for _ in range(longest)]

    def run(self, seconds: float) -> None:
        """So long, and then until all have ended; at the end nothing runs, waits or holds a block,
        and the tables and the block pool are as they must be."""
        engine, end = self.llm.engine, time.monotonic() + seconds
        while (arriving := time.monotonic() < end) or engine.has_work:
            if arriving:
                self._arrive()
            outputs = engine.step()
            if outputs is not None:
                self._hear(outputs)
            self.num_steps += 1
            if self.num_steps % STEPS_PER_CHECK == 0:
                engine.scheduler.check()
        engine.scheduler.check()
        stats = self.llm.stats
        left = stats.num_running, stats.num_waiting, stats.blocks_used, len(self._open)
        if any(left):
            self.problems.append(f"left at the end: {left} running, waiting, blocks, not told")

    def _arrive(self) -> None:
        """Mostly nobody, now and then a crowd."""
        for _ in range(self.rng.choice((0, 0, 0, 0, 1, 1, 2, self.llm.info.max_num_seqs))):
            if len(self._open) < self._most_open:
                self._add()

    def _add(self) -> None:
        rng, info = self.rng, self.llm.info
        golden = rng.choice(self.goldens) if self.goldens and rng.random() < 0.2 else None
        if golden is not None:
            prompt, params = golden.prompt, GOLDEN
        else:
            params = random_params(rng, info.vocab_size)
            tail = [rng.randrange(4, info.vocab_size) for _ in range(rng.choice((1, 3, 20, 100)))]
            beginning = rng.randrange(len(self._stem)) if rng.random() < 0.4 else 0
            room = info.max_model_len - (params.max_tokens or 1)
            prompt = (self._stem[:beginning] + tail)[:room]
            params = params.clone(n=min(params.n, info.max_num_seqs))
        words = [[rng.randrange(info.vocab_size) for _ in range(2)] for _ in range(30)]
        bad_words = words if golden is None and rng.random() < 0.05 else None
        try:
            request = prepare(
                info, params, prompt, handle=self._next_handle, request_id=str(self._next_handle),
                arrival=time.monotonic(), bad_words=bad_words,
            )  # fmt: skip
        except InvalidRequest:  # n long answers may need more blocks than there are
            self.counts["refused"] += 1
            return
        leaves = rng.randrange(20) if rng.random() < ABORT_SHARE else None
        for choice in range(params.n):
            self._open[self._next_handle + choice] = Open(params, golden, leaves_after=leaves)
        self._next_handle += params.n
        self.llm.engine.add(request)

    def _hear(self, outputs: Outputs) -> None:
        vocabulary = self.llm.info.vocab_size
        for handle, token in outputs.pairs():
            entry = self._open.get(handle)
            if entry is None or not 0 <= token < vocabulary:
                self.problems.append(f"token {token} of {handle}, {entry}")
            else:
                entry.tokens.append(token)
        for rejected in outputs.rejected:
            self.problems.append(f"rejected: {rejected.message}")
        for finished in outputs.finished:
            self._end(finished.handle, finished.reason, finished.message)
        for row in outputs.logprobs:
            if not all(value <= 1e-3 for value in row.values):
                self.problems.append(f"log-probabilities {row.values}")
        leaving = [
            handle
            for handle, entry in self._open.items()
            if entry.leaves_after is not None and len(entry.tokens) >= entry.leaves_after
        ]
        for handle in leaving:
            self._open[handle].aborted, self._open[handle].leaves_after = True, None
        self.llm.engine.abort(leaving)

    def _end(self, handle: int, reason: FinishReason, message: str) -> None:
        entry = self._open.pop(handle, None)
        self.counts[reason.value] += 1
        if entry is None:
            self.problems.append(f"{handle} ended twice")
            return
        length, most = len(entry.tokens), entry.params.max_tokens
        expected = {
            FinishReason.ABORT: entry.aborted,
            FinishReason.LENGTH: length == most,
            FinishReason.STOP: length > 0 and length > entry.params.min_tokens,
        }
        if not expected.get(reason, False):
            self.problems.append(f"ended with {reason} {message} after {length} of {most} tokens")
        if entry.golden is not None and not entry.aborted:
            verdict = entry.golden.judge(entry.tokens)
            self.counts[verdict] += 1
            if verdict == "wrong":
                self.problems.append(f"{entry.golden} was answered with {entry.tokens}")
