"""The real scheduler and block pool, with the toy worker of tests/fixtures/toy.py as the device."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from octavo.core import plan as wire
from octavo.core.block_pool import BlockPool, PrefixKeys, root_key
from octavo.core.fair import waiting_queue
from octavo.core.plan import NewRequest, StepPlan, StepResult
from octavo.core.request import Request, State
from octavo.core.scheduler import Limits, Scheduler, Update
from octavo.core.speculation import Speculation
from octavo.types import FinishReason, SamplingParams
from tests.fixtures import toy

SEED_STRIDE = 1000  # seeds of two requests differ by at least so much; choice i adds i


@dataclass(frozen=True)
class Settings:
    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 48
    max_in_flight: int = 2
    stages: int = 1
    caching: bool = True
    chunked_prefill: bool = True
    long_prefill_threshold: int = 0
    policy: str = "fcfs"
    ageing: float = 0.0
    guesses: int = 0  # most of a row


class Free:
    """Guesses cost nothing."""

    def seconds(self, num_rows: int, num_guesses: np.ndarray) -> np.ndarray:
        return np.ones(len(num_guesses))


@dataclass
class Choice:
    """One choice of a request, what it must answer, and what has come of it so far."""

    request: Request
    prompt: list[int]
    salt: bytes
    expected: toy.Answer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[list[int], list[float], int]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.request.state is State.FINISHED


@dataclass
class _InFlight:
    plan: StepPlan
    encoded: bytes
    result: StepResult | None = None
    tainted: bool = False  # a plan before it failed: what it reads means nothing


class ToyEngine:
    """Requests in, steps by hand: ``issue`` a plan, ``collect`` the oldest result.

    All promises are checked as it goes: the worker's (see ToyWorker), the scheduler's ``check``
    after every call, and each ended request against its answer.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.events: list[object] = []
        self.pool = BlockPool(settings.num_blocks, settings.block_size, settings.caching)
        self.scheduler = Scheduler(
            Limits(
                settings.max_num_seqs,
                settings.max_num_batched_tokens,
                settings.max_model_len,
                chunked_prefill=settings.chunked_prefill,
                long_prefill_threshold=settings.long_prefill_threshold,
                max_in_flight=settings.max_in_flight,
                stages=settings.stages,
            ),
            self.pool,
            eos_ids=[toy.EOS],
            clock=self._tick,
            queue=waiting_queue(settings.policy, settings.ageing),
            on_event=self.events.append,
            speculation=(
                Speculation(settings.guesses, settings.max_num_seqs, Free())
                if settings.guesses
                else None
            ),
        )
        self.worker = toy.ToyWorker(
            settings.num_blocks,
            settings.block_size,
            settings.max_num_seqs,
            root_of=lambda new: toy.root(self._by_seed(new).salt),
            limit_of=lambda new: self._by_seed(new).request.max_len,
        )
        self.choices: dict[int, Choice] = {}
        self.in_flight: deque[_InFlight] = deque()
        self._handles_by_seed: dict[int, int] = {}
        self._num_requests = 0

    def _tick(self) -> float:
        self.now += 0.001
        return self.now

    def _by_seed(self, new: NewRequest) -> Choice:
        return self.choices[self._handles_by_seed[new.seed]]

    # ---- requests ----

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        salt: bytes = b"",
        n: int = 1,
        priority: int = 0,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[Choice]:
        """Adds the n choices of a request, as an engine does. InvalidRequest if it cannot fit."""
        self.scheduler.check_fits(len(prompt), max_tokens, n)
        self._num_requests += 1
        added = []
        for index in range(n):
            seed = self._num_requests * SEED_STRIDE + index
            params = SamplingParams(
                n=n,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=list(stop_token_ids),
                ignore_eos=ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            request = Request(
                len(self.choices),
                np.array(prompt, dtype=np.int32),
                params,
                max_tokens,
                seed=seed,
                priority=priority,
                arrival=self._tick(),
                chain=PrefixKeys(root_key(salt), self.settings.block_size),
                tenant=salt,
            )
            expected = toy.answer(
                prompt,
                seed,
                max_tokens,
                salt=salt,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            )
            choice = Choice(request, list(prompt), salt, expected)
            self.choices[request.handle] = choice
            self._handles_by_seed[seed] = request.handle
            self.scheduler.add(request)
            added.append(choice)
        self._settle()
        return added

    def abort(self, choice: Choice) -> None:
        was_finished = choice.finished
        assert self.scheduler.abort(choice.request) == (not was_finished)
        self.scheduler.check()
        if not was_finished:
            self._judge(choice, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all()
        self.scheduler.check()

    # ---- steps ----

    def issue(self, *, execute_now: bool = True) -> bool:
        """Schedules a plan; the device runs it now, or as late as it may. False if none came."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is None:
            return False
        assert 0 < plan.total_tokens <= self.settings.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.settings.max_num_seqs
        self.in_flight.append(_InFlight(plan, wire.encode(plan)))
        if self.settings.stages > 1:
            self._check_stages(plan)
        else:
            assert len(self.in_flight) <= self.settings.max_in_flight
        if execute_now:
            for item in self.in_flight:
                self._execute(item)
        return True

    def _check_stages(self, plan: StepPlan) -> None:
        """The first stage can compute the plan: it knows all ids, since none of them is still to be
        drawn by a plan in flight."""
        assert len(self.in_flight) <= self.settings.stages
        drawing = [
            (int(slot), int(epoch))
            for item in self.scheduler._in_flight
            for slot, epoch, flag in zip(item.slots, item.epochs, item.plan.flags)
            if flag & wire.SAMPLE
        ]
        assert len(set(drawing)) == len(drawing), "a row draws in two plans in flight"
        running = self.scheduler.running
        ends = plan.starts + plan.num_known
        assert (ends <= running.known[plan.slots]).all(), "ids that the host does not know"

    def _execute(self, item: _InFlight) -> None:
        if item.result is not None:
            return
        assert wire.encode(item.plan) == item.encoded, "a plan changed after it was issued"
        result = self.worker.execute(wire.decode(item.encoded, StepPlan), tainted=item.tainted)
        item.result = wire.decode(wire.encode(result), StepResult)

    def collect(self) -> Update | None:
        """Takes the result of the oldest plan in flight, if there is one."""
        if not self.in_flight:
            return None
        item = self.in_flight.popleft()
        self._execute(item)
        assert item.result is not None
        update = self.scheduler.update(item.result)
        self.scheduler.check()
        self._record(item, item.result, update)
        for request in update.finished:
            choice = self.choices[request.handle]
            assert request.finish_reason is not None
            assert request.finish_reason.value == choice.expected.reason
            self._judge(choice, request.finish_reason)
        return update

    def fail(self) -> None:
        """The oldest plan in flight fails on the device, having written who knows what."""
        if not self.in_flight:
            return
        item = self.in_flight.popleft()
        self._execute(item)
        for later in self.in_flight:
            later.tainted = True
            self._execute(later)
        for failed in (item, *self.in_flight):
            self.worker.scramble(failed.plan.step)
        for request in self.scheduler.fail():
            self._judge(self.choices[request.handle], FinishReason.ERROR)
        self.scheduler.check()

    def step(self) -> bool:
        """One turn of an engine's loop with plans in flight. False when nothing is left to do."""
        while self.issue():
            pass
        return self.collect() is not None

    def finish(self, limit: int = 20_000) -> None:
        """Runs until every request has ended, then proves that nothing is left behind."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError(f"not done after {limit} steps")
        stuck = [choice.request for choice in self.choices.values() if not choice.finished]
        assert not stuck, f"nothing can run, yet these have not ended: {stuck}"
        self._settle()
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        assert not self.scheduler.has_work
        assert len(self.scheduler.running) == 0 and len(self.scheduler.waiting) == 0
        assert self.pool.num_held == 0, f"{self.pool.num_held} blocks leaked"
        counted = self.scheduler.counters.generation_tokens
        assert counted == sum(len(choice.tokens) for choice in self.choices.values())
        self.scheduler.check()

    def _settle(self) -> None:
        for request in self.scheduler.finished_early:
            assert request.finish_reason is not None
            self._judge(self.choices[request.handle], request.finish_reason)
        self.scheduler.finished_early.clear()

    # ---- what came out ----

    def _record(self, item: _InFlight, result: StepResult, update: Update) -> None:
        handles = update.handles.tolist()
        for handle, token in zip(handles, update.tokens.tolist()):
            choice = self.choices[handle]
            choice.tokens.append(token)
            position = len(choice.tokens)
            assert choice.tokens[-1:] == choice.expected.tokens[position - 1 : position], (
                f"choice {handle}: token {position} is {token}, {choice.expected} was due"
            )
        handle_of = dict(zip(update.rows.tolist(), handles))
        left = Counter(update.rows.tolist())  # tokens of each row
        for index, row in enumerate(result.logprob_rows.tolist()):
            if left[row] > 0:
                left[row] -= 1
                assert result.logprobs is not None
                self.choices[handle_of[row]].logprobs.append(_entry(result.logprobs, index))
        for row, handle in update.row_handles.items():
            table, start = result.prompt_logprobs[row], int(item.plan.starts[row])
            for index in range(len(table.ids)):
                entry = _entry(table, index)
                known = self.choices[handle].prompt_logprobs.setdefault(start + index, entry)
                assert known == entry

    def _judge(self, choice: Choice, reason: FinishReason) -> None:
        """A choice has ended: its output is the oracle's, or the oracle's beginning."""
        request, expected = choice.request, choice.expected
        assert request.finish_reason is reason and not request.blocks
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert choice.tokens == expected.tokens[: len(choice.tokens)]
            return
        assert choice.tokens == expected.tokens
        assert request.stop_reason == expected.stop_reason
        assert request.tokens.tolist() == choice.prompt + expected.tokens
        assert request.num_cached_tokens < len(choice.prompt)
        if not self.settings.caching or request.params.prompt_logprobs is not None:
            assert request.num_cached_tokens == 0
        self._judge_logprobs(choice)

    def _judge_logprobs(self, choice: Choice) -> None:
        params, sequence = choice.request.params, choice.prompt + choice.tokens
        digests = [toy.root(choice.salt)]
        for token in sequence:
            digests.append(toy.extend(digests[-1], token))

        def expected(position: int, k: int) -> tuple[list[int], list[float], int]:
            """Of the token at ``position``, given those before it."""
            return _entry(toy.logprob_table([(digests[position], sequence[position], k)]), 0)

        length = len(choice.prompt)
        if params.logprobs is not None:
            assert choice.logprobs == [
                expected(position, params.logprobs) for position in range(length, len(sequence))
            ]
        if params.prompt_logprobs is not None:
            assert choice.prompt_logprobs == {
                position - 1: expected(position, params.prompt_logprobs)
                for position in range(1, length)
            }


def _entry(table: wire.Logprobs, index: int) -> tuple[list[int], list[float], int]:
    width = int((table.ids[index] >= 0).sum())
    ids, values = table.ids[index, :width].tolist(), table.values[index, :width].tolist()
    return ids, values, int(table.ranks[index])
