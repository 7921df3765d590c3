"""Engine: the loop's body. Schedule, run, update, tell; time, errors and statistics live here.

``octavo.LLM`` calls it in the same process, ``engine.process`` behind ZMQ.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np

from octavo.config import EngineConfig
from octavo.core.block_pool import BlockPool, PrefixKeys, root_key
from octavo.core.events import Event, EventKind
from octavo.core.fair import waiting_queue
from octavo.core.plan import Float32, Logprobs, StepPlan, StepResult
from octavo.core.request import Request, State
from octavo.core.scheduler import Limits, Scheduler, Update
from octavo.core.speculation import Speculation
from octavo.engine.cost import StepCosts
from octavo.engine.messages import (
    CLIENT_SHIFT,
    AddRequest,
    EngineInfo,
    EngineStats,
    Finished,
    Outputs,
    PooledPrompt,
    PromptLogprobRows,
    Rejected,
    Started,
    TokenLogprobRow,
    unpack_ids,
)
from octavo.engine.stage_use import StageUse
from octavo.engine.verify_cost import VerifyCosts
from octavo.grammar.grammars import Grammars
from octavo.speculation import most_draws, speculating
from octavo.types import (
    FinishReason,
    InvalidRequest,
    RequestTimings,
    StepFailed,
    StepProfile,
)

logger = logging.getLogger(__name__)

# Plans that may be in flight at once: one runs, the next is ready. A pipeline has one per stage.
PLANS_IN_FLIGHT = 2
# How long a step that has nothing else to do waits for a grammar to be compiled.
PREPARING_SECONDS = 0.005
# Steps between two measurements of what the filled part of the used blocks is.
FRAGMENTATION_STEPS = 8
MOST_NAMED = 8  # requests that a line of the log names


class Executor(Protocol):
    """Who computes plans, strictly in the order they were submitted."""

    def submit(self, plan: StepPlan) -> None:
        """Takes a plan; does not wait for the device."""

    def collect(self) -> StepResult:
        """The oldest result not yet collected, waiting for it. Raises StepFailed for its step."""

    def idle(self) -> bool:
        """Uses a moment in which no plan is in flight for work that makes later steps faster. False
        when there is none left."""

    @property
    def num_pending(self) -> int:
        """How often ``idle`` still has something to do."""

    @property
    def num_stages(self) -> int:
        """Of the pipeline that plans go through."""

    @property
    def problem(self) -> str:
        """Why plans do not come back for the moment; "" where nothing is known to be wrong."""

    def start_profile(self, directory: Path) -> None:
        """Traces the steps submitted from now on. Raises ConfigError where that is impossible."""

    def stop_profile(self) -> StepProfile:
        """Writes the trace of the steps submitted since the start. Raises ConfigError without."""

    def shutdown(self) -> None:
        """Ends after the plans already submitted. Idempotent."""

    def abandon(self) -> None:
        """This process ends now: tells others, on other hosts too, and waits for nothing."""


class Engine:
    """One replica: a scheduler, and an executor that obeys it."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        self.grammars = grammars or Grammars()
        self._preparing: list[Request] = []  # in order of arrival
        self.costs = StepCosts()
        self._verify_costs = VerifyCosts()
        self._at_once = 0  # see Speculation
        self._speculation: Speculation | None = None
        if wanted := speculating(config.speculative):
            if info.device_kind != "cpu":
                self._at_once = most_draws(info.max_num_seqs, wanted.num_tokens)
            self._speculation = Speculation(
                wanted.num_tokens, info.max_num_seqs, self._verify_costs, self._at_once
            )
        self.step_started: float | None = None  # when the plan that runs now was first to run
        self._executor = executor
        self._clock = clock
        self._seed = config.model.seed
        self._requests: dict[int, Request] = {}
        self._started: list[Started] = []
        self._rejected: list[Rejected] = []
        self._failed: list[Finished] = []  # on arrival
        self._ended: list[Request] = []  # outside a step: nothing to compute
        self._submitted: deque[float] = deque()
        self._last_collect = 0.0
        self._schedule_seconds = 0.0
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._use = StageUse(executor.num_stages)
        self._fragmentation = 0.0
        overlap = config.scheduler.async_scheduling
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                chunked_prefill=config.scheduler.enable_chunked_prefill,
                adaptive_chunks=config.scheduler.adaptive_chunks,
                long_prefill_threshold=config.scheduler.long_prefill_token_threshold,
                max_in_flight=PLANS_IN_FLIGHT if overlap else 1,
                stages=executor.num_stages,
            ),
            BlockPool(info.num_blocks, info.block_size, config.cache.enable_prefix_caching),
            eos_ids=info.eos_ids,
            clock=clock,
            queue=waiting_queue(
                config.scheduler.scheduling_policy, config.scheduler.priority_ageing
            ),
            cost=self.costs,
            on_event=self._on_event,
            speculation=self._speculation,
        )
        # Facts of the model that make equal ids mean different KV.
        kept = config.cache.kv_cache_dtype
        facts = (info.model, info.dtype, kept, str(info.kv_cache_bytes // info.num_blocks))
        self._root = lru_cache(1024)(lambda salt: root_key(salt, *facts))

    # ---- requests ----

    @property
    def _has_stages(self) -> bool:
        return self._executor.num_stages > 1

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.has_work or self._preparing or self._has_news)

    @property
    def _has_news(self) -> bool:
        return bool(self._rejected or self._failed or self._ended or self._scheduler.finished_early)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def add(self, message: AddRequest) -> None:
        """Queues the n choices of a request. What can never run comes back as Rejected, what fails
        in any other way as Finished(ERROR): one request never stops the loop."""
        handles = range(message.handle, message.handle + message.params.n)
        try:
            choices = self._choices(message)
        except InvalidRequest as error:
            self._rejected += [Rejected(handle, str(error), error.param) for handle in handles]
        except Exception as error:
            logger.exception("request %s failed on arrival", message.request_id)
            timings = RequestTimings(arrival=message.arrival)
            text = f"{type(error).__name__}: {error}"
            self._failed += [
                Finished(handle, FinishReason.ERROR, None, timings, message=text)
                for handle in handles
            ]
        else:
            for request in choices:
                self._requests[request.handle] = request
                if request.grammar:
                    request.state = State.PREPARING
                    self._preparing.append(request)
                else:
                    self._scheduler.add(request)

    def _choices(self, message: AddRequest) -> list[Request]:
        prompt, n = unpack_ids(message.prompt_ids), message.params.n
        self._scheduler.check_fits(len(prompt), message.max_tokens, n)
        root = self._root(message.salt)
        # The prompt's log-probabilities are told once, by choice 0: the others share its blocks.
        others = message.params.settled(prompt_logprobs=None) if n > 1 else message.params
        choices = [
            Request(
                message.handle + choice,
                prompt,
                others if choice else message.params,
                message.max_tokens,
                request_id=message.request_id,
                seed=self._seed_of(message, choice),
                priority=message.priority,
                arrival=message.arrival,
                chain=PrefixKeys(root, self.info.block_size),
                bad_words=message.bad_words,
                pooling=message.pooling,
                tenant=message.tenant,
                weight=message.weight,
                grammar=message.grammar,
                grammar_after=message.grammar_after,
            )
            for choice in range(n)
        ]
        for request in choices:
            if request.grammar:
                self.grammars.prepare(request.grammar)
        return choices

    def _add_prepared(self) -> None:
        """Hands requests to the scheduler whose grammars are compiled. None waits for another's."""
        waiting = []
        for request in self._preparing:
            if not self.grammars.ready(request.grammar):
                waiting.append(request)
            elif problem := self.grammars.problem(request.grammar):
                self._rejected.append(Rejected(request.handle, problem, "structured_outputs"))
                del self._requests[request.handle]
                self.grammars.release(request.grammar)
            else:
                self._scheduler.add(request)
        self._preparing = waiting

    def abort(self, handles: list[int]) -> None:
        """Ends these now; unknown and ended ones are passed over. Finished(ABORT) follows."""
        for handle in handles:
            request = self._requests.get(handle)
            if request is None:
                continue
            if request.state is State.PREPARING:
                self._preparing.remove(request)
            if self._scheduler.abort(request):
                self._ended.append(request)

    def abort_client(self, client: int) -> None:
        """Ends all requests of a client that has gone."""
        self.abort([handle for handle in self._requests if handle >> CLIENT_SHIFT == client])

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. False (and nothing done) while requests run."""
        if len(self._scheduler.running):
            return False
        self._scheduler.pool.forget_all()
        return True

    def _seed_of(self, message: AddRequest, choice: int) -> int:
        """Choice i of a seeded request draws with seed + i; others from (server seed, id, i)."""
        if message.params.seed is not None:
            return (message.params.seed + choice) % 2**64
        facts = f"{self._seed}/{message.request_id}/{choice}".encode()
        return int.from_bytes(blake2b(facts, digest_size=8).digest(), "little")

    # ---- a step ----

    def step(self) -> Outputs | None:
        """Issues what can run, then waits for the oldest plan's result. None if there was neither a
        result nor anything to tell."""
        began = time.perf_counter()
        if self._preparing:
            self._add_prepared()
        self._issue()
        self._schedule_seconds = time.perf_counter() - began
        if self._preparing and not (self._scheduler.num_in_flight or self._has_news):
            self.grammars.prepared.wait(PREPARING_SECONDS)
            self.grammars.prepared.clear()
        if not self._scheduler.num_in_flight:
            return self._outputs(None, None) if self._has_news else None
        try:
            result = self._executor.collect()
        except StepFailed as failure:
            return self._fail(failure)
        cost = self._measure(self._clock(), result.busy_seconds)
        began = time.perf_counter()
        update = self._scheduler.update(result)
        self._observe_cost(update.plan, result, cost)
        self._issue()  # before anything else: the device is waiting
        if not self._submitted:
            self._use.end()
        self._schedule_seconds += time.perf_counter() - began
        return self._outputs(update, result)

    def _issue(self) -> None:
        while (plan := self._scheduler.schedule()) is not None:
            now = self._clock()
            if not self._submitted:
                self.step_started = now
            self._use.begin(now)
            self._submitted.append(now)
            self._executor.submit(plan)

    def _measure(self, collected: float, busy: Float32 | None) -> float:
        """The oldest plan is back. Returns what it cost: seconds of the stage that took longest.
        ``busy``: those of each stage. Where nobody measured them, plans come back as often as that
        stage computes one, unless there are too few of them to keep all stages at work."""
        submitted, stages = self._submitted.popleft(), self._executor.num_stages
        through = collected - submitted
        cost = min(collected - max(submitted, self._last_collect), through / stages)
        if busy is not None and stages > 1:
            cost = float(busy.max())
        self._step_seconds = cost if stages == 1 else through
        self._use.observe(collected, busy)
        self._last_collect = collected
        self.step_started = collected if self._submitted else None
        return cost

    def _observe_cost(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        num_known = num_decode = int(plan.num_known.sum())
        if num_known > plan.num_rows:
            num_decode = int(np.count_nonzero(plan.num_known == 1))
        self.costs.observe(num_decode, num_known - num_decode, seconds)
        self._step_tokens = num_known
        if result.num_drafted is not None:
            num_guesses = int(result.num_drafted.sum())
            self._step_tokens += num_guesses
            if self._at_once:
                num_guesses = num_decode * (result.tokens.shape[1] - 1)
            if num_decode == num_known:
                num_drawn = int(result.num_accepted.sum())
                self._verify_costs.observe(num_decode, num_guesses, num_drawn, seconds)

    def _fail(self, failure: StepFailed) -> Outputs:
        """One step failed: its requests end with the error, the loop goes on."""
        self._measure(self._clock(), None)
        if not self._submitted:
            self._use.end()
        logger.error("%s failed: %s", self.under_way(), failure)
        for request in self._scheduler.fail():
            request.message = str(failure)
            self._ended.append(request)
        return self._outputs(None, None)

    def under_way(self) -> str:
        """The step whose result is awaited, for the log: its size, and whose requests it has."""
        plan = self._scheduler.oldest_plan
        if plan is None:
            return "the engine's loop, outside of a step,"
        requests = self._scheduler.running.requests
        names = [r.request_id for slot in plan.slots if (r := requests[slot]) is not None]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return (
            f"step {plan.step} ({plan.total_tokens} tokens of {plan.num_rows} sequences: "
            f"{', '.join(names[:MOST_NAMED])}{more})"
        )

    # ---- telling ----

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.ADMITTED:
            request = self._requests[event.handle]
            if request.num_preemptions == 0:
                started = Started(event.handle, event.time, request.num_cached_tokens)
                self._started.append(started)

    def _outputs(self, update: Update | None, result: StepResult | None) -> Outputs:
        ended = [*self._ended, *self._scheduler.finished_early]
        self._scheduler.finished_early.clear()
        outputs = Outputs(self._stats(), started=self._started, rejected=self._rejected)
        self._started, self._rejected, self._ended = [], [], []
        if update is not None and result is not None:
            outputs.handles = update.handles.astype("<i8").tobytes()
            outputs.tokens = update.tokens.astype("<i4").tobytes()
            ended += update.finished
            if result.logprobs is not None:
                outputs.logprobs = self._logprob_rows(update, result, result.logprobs)
            if result.prompt_logprobs:
                outputs.prompt_logprobs = [
                    _prompt_rows(handle, update.plan, row, result.prompt_logprobs[row])
                    for row, handle in update.row_handles.items()
                ]
            outputs.pooled = [
                PooledPrompt(handle, result.pooled[row].astype("<f4").tobytes())
                for row, handle in update.pooled_handles.items()
            ]
        outputs.finished = [*self._failed, *map(self._finished, ended)]
        self._failed = []
        return outputs

    def _finished(self, request: Request) -> Finished:
        del self._requests[request.handle]
        if request.grammar:
            self.grammars.release(request.grammar)
        assert request.finish_reason is not None
        return Finished(
            request.handle,
            request.finish_reason,
            request.stop_reason,
            request.timings,
            request.num_preemptions,
            request.message,
            request.own_fault,
            request.num_drafts,
            request.num_accepted_drafts,
        )

    def _logprob_rows(
        self, update: Update, result: StepResult, logprobs: Logprobs
    ) -> list[TokenLogprobRow]:
        """In the order of the update's tokens, for the handles that asked."""
        entries_of: dict[int, list[int]] = {}  # of each row, for its tokens, the last one first
        for entry in reversed(range(len(result.logprob_rows))):
            entries_of.setdefault(int(result.logprob_rows[entry]), []).append(entry)
        rows = []
        for row, handle in zip(update.rows.tolist(), update.handles.tolist()):
            if not (left := entries_of.get(row)):
                continue
            entry = left.pop()
            count = int((logprobs.ids[entry] >= 0).sum())
            ids = logprobs.ids[entry, :count].tolist()
            values = logprobs.values[entry, :count].tolist()
            rows.append(TokenLogprobRow(handle, ids, values, int(logprobs.ranks[entry])))
        return rows

    def stats(self) -> EngineStats:
        """Live state and totals."""
        self._measure_fragmentation()
        return self._stats()

    def _measure_fragmentation(self) -> None:
        pool, running = self._scheduler.pool, self._scheduler.running
        filled = int(running.computed[running.order].sum())
        places = int(running.capacity[running.order].sum())
        used = pool.num_held * pool.block_size
        self._fragmentation = (places - filled) / used if used else 0.0

    def _stats(self) -> EngineStats:
        """As ``stats``, with a fragmentation that may be some steps old: it takes the longest."""
        scheduler = self._scheduler
        counters, pool, running = scheduler.counters, scheduler.pool, scheduler.running
        if counters.steps % FRAGMENTATION_STEPS == 0 or not len(running):
            self._measure_fragmentation()
        stats = EngineStats(
            time=self._clock(),
            num_running=len(running),
            num_waiting=len(scheduler.waiting) + len(self._preparing),
            blocks_used=pool.num_held,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_preemptions=counters.preemptions,
            num_copies=counters.copies,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            generation_tokens=counters.generation_tokens,
            num_steps=counters.steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            schedule_seconds=self._schedule_seconds,
            fragmentation=self._fragmentation,
            graphs_pending=self._executor.num_pending,
            stage_busy_seconds=self._use.busy_seconds.tolist() if self._has_stages else [],
            work_seconds=self._use.work_seconds,
            bubble=self._use.bubble,
        )
        if self._speculation is not None:
            drafts = self._speculation.counters
            stats.num_drafts = drafts.num_drafts
            stats.num_draft_tokens = drafts.num_draft_tokens
            stats.num_accepted_drafts = drafts.num_accepted
            stats.drafted_at, stats.accepted_at = drafts.drafted_at, drafts.accepted_at
            stats.draft_length = self._speculation.length
            stats.saved_seconds = self._verify_costs.saved_seconds
        return stats


def _prompt_rows(handle: int, plan: StepPlan, row: int, logprobs: Logprobs) -> PromptLogprobRows:
    """Log-probabilities of the tokens after each of a row's: positions start + 1 on."""
    counts = (logprobs.ids >= 0).sum(axis=1).tolist()
    return PromptLogprobRows(
        handle,
        int(plan.starts[row]) + 1,
        [ids[:count] for ids, count in zip(logprobs.ids.tolist(), counts)],
        [values[:count] for values, count in zip(logprobs.values.tolist(), counts)],
        np.asarray(logprobs.ranks).tolist(),
    )
