"""Scheduler: which tokens of which requests the next step computes.

No phases: a request has tokens (``total``) and some of them computed (``computed``); a step
computes some more of the difference. ``schedule`` builds a plan, ``update`` takes the result of the
oldest plan in flight; several may be in flight (design rules of overlap, docs/scheduler.md). Knows
no tensors, no time but the clock it is given, no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from octavo.core.block_pool import BlockPool, PrefixMatch
from octavo.core.events import Counters, Event, EventKind, EventSink, ignore
from octavo.core.groups import Groups
from octavo.core.guesses import Guesses
from octavo.core.in_flight import InFlight, Issued
from octavo.core.plan import Int32, StepPlan, StepResult
from octavo.core.plan_builder import PlanBuilder
from octavo.core.prefix import PrefixIndex
from octavo.core.queue import Queue, WaitingQueue
from octavo.core.request import Request, State, worst_case_blocks
from octavo.core.running import Bools, Index, Running
from octavo.core.speculation import Speculation
from octavo.types import FinishReason, InvalidRequest

# A prompt chunk beside decoding rows is never cut below this many tokens.
MIN_CHUNK = 128


class StepCost(Protocol):
    """What steps cost, as measured by the engine; passed in, like the clock."""

    def chunk_limit(self, num_decode_rows: int, num_prompts: int) -> int:
        """Most prompt tokens beside so many decoding rows, while so many prompts could be computed:
        few prompts stay under twice the time of the decode step."""


class NoLimit:
    """The cost table of someone who has measured nothing."""

    def chunk_limit(self, num_decode_rows: int, num_prompts: int) -> int:
        return np.iinfo(np.int32).max


@dataclass(frozen=True)
class Limits:
    """The scheduler's settings, all resolved.

    ``stages``: of a pipeline. With several, as many plans are in flight, whatever
    ``max_in_flight`` says, and no row draws in two of them (``core.groups``).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True  # False: max_num_batched_tokens >= max_model_len, or some starve
    adaptive_chunks: bool = True  # False: prompts take the whole budget beside decoding rows
    long_prefill_threshold: int = 0  # 0: no cap
    max_in_flight: int = 2
    stages: int = 1


@dataclass(slots=True)
class Update:
    """What a step's result changed."""

    plan: StepPlan
    rows: Index  # [m] the row of each token that was drawn for a live request
    handles: np.ndarray  # int64 [m]
    tokens: Int32  # [m]
    finished: list[Request]
    row_handles: dict[int, int]  # handle of each row with prompt log-probabilities
    pooled_handles: dict[int, int]  # handle of each row with a vector


class Scheduler:
    """Owns the waiting queue, the running slots and the block pool of one engine."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        *,
        eos_ids: list[int],
        clock: Callable[[], float],
        queue: Queue | None = None,
        cost: StepCost | None = None,
        on_event: EventSink = ignore,
        speculation: Speculation | None = None,
    ) -> None:
        """``speculation``: how many guesses each row may bring; None: none does."""
        self.limits = limits
        self.speculation = speculation
        self.pool = pool
        self.prefix = PrefixIndex(pool)
        self.waiting: Queue = queue if queue is not None else WaitingQueue()
        self.running = Running(limits.max_num_seqs, limits.max_model_len, self.waiting.key)
        self.waiting.watch(self.running)
        self.counters = Counters()
        self.eos_ids = sorted(set(eos_ids))
        self._guesses: Guesses | None = None
        if speculation is not None:
            self._guesses = Guesses(speculation, self.running, pool, self.eos_ids)
        self._clock = clock
        self._cost = cost or NoLimit()
        self._on_event = on_event
        self._in_flight = InFlight()
        self._groups: Groups | None = None
        self._most_in_flight = limits.max_in_flight
        if limits.stages > 1:
            self._groups = Groups(limits.stages, limits.max_num_seqs)
            self._most_in_flight = limits.stages
        self._freed_slots: list[int] = []
        self.finished_early: list[Request] = []  # ended without a step; emptied by the engine
        self._all_rows = np.arange(limits.max_num_seqs)
        self._places = np.arange(pool.block_size)
        self._starved = (-1, 0)  # who could not be allocated last, with so many blocks free
        self._step = 0
        self._sequence = 0

    # ---- arrivals and departures ----

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest_plan(self) -> StepPlan | None:
        """Of those in flight."""
        return next((issued.plan for issued in self._in_flight), None)

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or len(self.waiting) or len(self._in_flight))

    def check_fits(self, prompt_len: int, max_tokens: int, n: int = 1) -> None:
        """Raises InvalidRequest for what could never run, with the numbers."""
        if prompt_len < 1:
            raise InvalidRequest("the prompt is empty", "prompt")
        if prompt_len + max_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) together exceed the "
                f"maximum length of {self.limits.max_model_len} tokens",
                "max_tokens",
            )
        needed = worst_case_blocks(prompt_len, max_tokens, n, self.pool.block_size)
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"the request may need {needed} KV blocks of {self.pool.block_size} tokens "
                f"({prompt_len} prompt tokens, max_tokens {max_tokens}, n {n}), the whole cache "
                f"has {self.pool.num_blocks}: lower max_tokens or n",
                "max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest if it could never run (``check_fits``)."""
        self.check_fits(request.prompt_len, request.max_len - request.prompt_len)
        request.state = State.WAITING
        request.sequence = self._sequence
        self._sequence += 1
        nothing = request.params.prompt_logprobs is None or request.prompt_len == 1
        if request.max_len == request.prompt_len and nothing and request.pooling is None:
            self._finish(request, FinishReason.LENGTH)  # nothing to compute: echo
            self.finished_early.append(request)
            return
        self.waiting.push(request)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request now, its blocks are free; results in flight for it are dropped. False if
        it had ended before."""
        if request.state is State.FINISHED:
            return False
        if request.state is State.RUNNING:
            self._vacate(request.slot)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        if request.timings.first_token >= 0:
            request.timings.last_token = self._clock()  # a stop string ends a request in this way
        self._finish(request, reason)
        return True

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        request.state = State.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._emit(EventKind.FINISHED, request, len(request.tokens))

    # ---- a plan ----

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run now. Marks its tokens as computed."""
        if len(self._in_flight) >= self._most_in_flight:
            return None
        builder = PlanBuilder(self.running)
        rows, counts, budget, chunk_budget = self._share_budget()
        drafts = None
        if self._guesses is not None:
            drafts = self._guesses.choose(rows, counts, budget)
            counts = counts + drafts
            budget -= int(drafts.sum())
            if self._guesses.hold_blocks(rows, counts, (i.plan for i in self._in_flight)):
                return None
        rows, counts, preempted = self._extend_tables(rows, counts, builder)
        if preempted and drafts is not None:
            drafts = np.zeros(len(rows), dtype=np.int32)  # there were none
        while preempted and not len(rows) and not len(self._in_flight) and len(self.running):
            # All of a group has lost its blocks: another one comes now.
            rows, counts, budget, chunk_budget = self._share_budget()
            rows, counts, _ = self._extend_tables(rows, counts, builder)
            drafts = None if drafts is None else np.zeros(len(rows), dtype=np.int32)
        builder.set_rows(rows, counts, drafts)
        if not preempted:
            self._admit(builder, budget, chunk_budget)
        plan = self._issue(builder) if builder.num_rows else None
        self.pool.end_plan()
        return plan

    def _issue(self, builder: PlanBuilder) -> StepPlan:
        plan = builder.build(self._step, self._freed_slots)
        self._freed_slots = []
        self._step += 1
        self.counters.steps += 1
        self._in_flight.push(plan, builder.slots, self.running.epoch[builder.slots])
        if self._groups is not None:
            self._groups.issued(builder.slots, plan.step)
        if self.running.entered or plan.total_tokens > plan.num_rows:
            self._advance(builder.slots)  # prompts; what decoding fills is found in ``update``
        return plan

    def _share_budget(self) -> tuple[Index, Int32, int, int]:
        """(slots that run, tokens for each, budget left, prompt tokens left beside decoding)."""
        running, limits = self.running, self.limits
        order = running.order
        need = np.minimum(running.total[order], running.limit[order] - 1) - running.computed[order]
        if self._groups is None:
            num_decode = int(np.count_nonzero(need == 1))
            chunk_budget = self._chunk_budget(num_decode)
        else:
            chunk_budget = self._chunk_budget_of_group(self._groups, need)
            num_decode = int(np.count_nonzero(need == 1))
        budget = limits.max_num_batched_tokens - num_decode
        if num_decode == len(order) and budget >= 0:
            return order, need, budget, chunk_budget
        chunk_rows = np.nonzero(need > 1)[0]
        for row in chunk_rows.tolist():
            need[row] = count = self._chunk(int(need[row]), budget, chunk_budget)
            budget -= count
            chunk_budget -= count
        need = np.maximum(need, 0)
        if budget < 0:  # more decoding rows than the budget: first in line first
            need[np.cumsum(need) > limits.max_num_batched_tokens] = 0
        scheduled = need > 0
        return order[scheduled], need[scheduled], budget, chunk_budget

    def _chunk_budget(self, num_decode_rows: int) -> int:
        """Most prompt tokens beside so many decoding rows."""
        adaptive = self.limits.chunked_prefill and self.limits.adaptive_chunks
        if not (adaptive and num_decode_rows):
            return int(np.iinfo(np.int32).max)
        return self._chunk_limit(num_decode_rows, num_decode_rows, 1)

    def _chunk_limit(self, num_decode_rows: int, share: int, stages: int) -> int:
        """``share``: of the decoding rows, what a plan has; prompts are divided in the same way."""
        num_running = len(self.running)
        admissible = min(len(self.waiting), self.limits.max_num_seqs - num_running)
        num_prompts = num_running - num_decode_rows + admissible
        if not num_prompts:
            return int(np.iinfo(np.int32).max)
        return max(MIN_CHUNK, self._cost.chunk_limit(share, -(-num_prompts // stages)))

    def _chunk_budget_of_group(self, groups: Groups, need: Int32) -> int:
        """The same for a plan of one group, which is chosen first (``Groups.choose``). While any
        row decodes, every plan is kept short, those without decoding rows too: it is computed
        between two tokens of each row."""
        most = int(np.iinfo(np.int32).max)
        if not self.limits.chunked_prefill:
            groups.choose(self.running, need, len(self._in_flight))
            return most
        full = groups.stages * self.limits.max_num_batched_tokens
        left = int(need[need > 1].sum())
        left += sum(issued.plan.total_tokens - issued.plan.num_rows for issued in self._in_flight)
        num_free = self.limits.max_num_seqs - len(self.running)
        for request in islice(self.waiting, num_free) if num_free else ():
            if left >= full:
                break
            left += len(request.tokens)
        count, share = groups.choose(self.running, need, len(self._in_flight))
        if count and self.limits.adaptive_chunks:
            most = self._chunk_limit(count, share, groups.stages)
        return max(1, min(most, groups.prompt_share(left, count > 0)))

    def _chunk(self, need: int, budget: int, chunk_budget: int) -> int:
        """Tokens of ``need`` that a row may compute in this plan; 0: none."""
        if not self.limits.chunked_prefill:
            return need if need <= budget else 0
        cap = self.limits.long_prefill_threshold or need
        return max(0, min(need, cap, budget, chunk_budget))

    def _extend_tables(
        self, rows: Index, counts: Int32, builder: PlanBuilder
    ) -> tuple[Index, Int32, bool]:
        """Blocks for the rows that outgrow theirs. While there are too few, the last in line is
        preempted. Returns the rows and counts that are left, and whether any was."""
        running, size = self.running, self.pool.block_size
        over = running.computed[rows] + counts - running.capacity[rows]  # tokens without a place
        grown = (over > 0).nonzero()[0]
        if not len(grown):
            return rows, counts, False
        missing = (over[grown] + (size - 1)) // size
        preempted = False
        while (total := int(np.add.reduce(missing))) > self.pool.num_free:
            victim = self.waiting.last_in_line(running)
            self._preempt(victim)
            preempted = True
            kept = rows != victim
            if not kept.all():
                place = np.cumsum(kept) - 1  # of each row that is left
                missing, grown = missing[kept[grown]], place[grown[kept[grown]]]
                rows, counts = rows[kept], counts[kept]
        slots = rows[grown]
        capacity = running.capacity[slots]
        blocks = self.pool.take(total)
        builder.add_blocks(grown, capacity // size, missing, blocks)
        running.capacity[slots] = capacity + missing * size
        taken = 0
        for slot, count in zip(slots.tolist(), missing.tolist()):
            running.at(slot).blocks += blocks[taken : taken + count]
            taken += count
        return rows, counts, preempted

    def _preempt(self, slot: int) -> None:
        """Recompute later: the request goes back to the queue with its tokens, without blocks."""
        epoch = int(self.running.epoch[slot])
        request = self._vacate(slot)
        self._in_flight.orphan(request, slot, epoch)
        request.state = State.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.push(request)
        self._emit(EventKind.PREEMPTED, request, len(request.tokens))

    def _vacate(self, slot: int, keep: bool = True) -> Request:
        running = self.running
        valid = min(int(running.computed[slot]), int(running.known[slot]))
        request = running.vacate(slot)
        if self.speculation is not None:
            self.speculation.leave(slot, request)
        self.waiting.left(request)
        self.prefix.leave(request, request.tokens[:valid], keep)
        self._freed_slots.append(slot)
        return request

    def _advance(self, slots: Index) -> None:
        """Makes blocks findable that are full, computed by issued plans, and known by their ids."""
        running, size = self.running, self.pool.block_size
        valid = np.minimum(running.known[slots], running.computed[slots])
        first = running.registered[slots]
        grown = (valid - first >= size).nonzero()[0]
        if len(grown):
            self._register_full(slots[grown], first[grown], valid[grown])
        if running.entered:
            began = np.isin(slots, list(running.entered)) & (valid == running.known[slots])
            for slot, count in zip(slots[began].tolist(), valid[began].tolist()):
                running.entered.discard(slot)
                self.prefix.complete(running.at(slot), running.tokens[slot, :count])

    def _register_full(self, slots: Index, first: Int32, valid: Int32) -> None:
        """Blocks of tokens ``first`` .. ``valid`` of each slot; in steady decode just one of each,
        so the ids of every first block are taken in one go."""
        running, size = self.running, self.pool.block_size
        raw = running.tokens[slots[:, None], first[:, None] + self._places].tobytes()
        step = size * running.tokens.itemsize
        for row, slot in enumerate(slots.tolist()):
            self.prefix.append(running.at(slot), raw[row * step : (row + 1) * step])
        running.registered[slots] = first + size
        more = valid - first >= 2 * size
        if np.count_nonzero(more):
            for slot, count in zip(slots[more].tolist(), valid[more].tolist()):
                self.prefix.advance(running.at(slot), running.tokens[slot, :count])
                running.registered[slot] = count - count % size

    # ---- admission ----

    def _admit(self, builder: PlanBuilder, budget: int, chunk_budget: int) -> None:
        """Waiting requests in order, until budget, slots or blocks run out."""
        for request in self.waiting.in_turn():
            if budget <= 0 or chunk_budget <= 0 or not self.running.has_free_slot:
                return
            if request.in_flight:
                return  # preempted: first in line, but its last tokens are still being drawn
            if self.prefix.must_wait(request):
                continue
            if self._starved == (request.handle, self.pool.num_free) and len(self.running):
                return  # nothing has been freed since it could not be allocated
            match = self.prefix.lookup(request)
            if self.prefix.is_being_computed(request, match):
                continue
            # The last token's KV serves nobody where none follows it; its hidden state may.
            silent = request.max_len == request.prompt_len and request.pooling is None
            need = len(request.tokens) - silent - match.num_tokens
            count = self._chunk(need, budget, chunk_budget)
            if not count:
                return
            computed = self._allocate(request, match, builder)
            if computed is None:
                self._starved = (request.handle, self.pool.num_free)
                return  # the first that cannot be allocated stops admission
            self.waiting.remove(request)
            self.waiting.admitted(request, len(request.tokens) - computed)
            self._count_admission(request, computed)
            slot = self.running.place(request, computed, self.pool.block_size)
            if self.speculation is not None:
                self.speculation.enter(slot, request)
            builder.add_request(request, slot, count, self._min_stop_ids(request))
            self.prefix.enter(request)
            budget -= count
            chunk_budget -= count

    def _allocate(self, request: Request, match: PrefixMatch, builder: PlanBuilder) -> int | None:
        """Blocks for all tokens of a waiting request: hits held, an open one copied, the rest
        fresh. Returns the tokens found computed; None if there are too few blocks."""
        pool, size = self.pool, self.pool.block_size
        num_blocks = -(-len(request.tokens) // size)
        num_full = len(match.blocks) - (match.partial > 0)
        reserve = pool.num_blocks // 100 if len(self.running) else 0
        spare = pool.num_free - pool.num_free_among(match.blocks) - (num_blocks - num_full)
        if spare < reserve and match.partial == 0:
            return None
        pool.hold(match.blocks)
        table = list(match.blocks)
        if match.partial:
            copy = pool.fork(table[-1]) if spare >= reserve else None
            if copy is None:  # no room for source and copy at once: recompute those tokens
                pool.release(table)
                whole = PrefixMatch(table[:-1], match.num_tokens - match.partial)
                return self._allocate(request, whole, builder)
            builder.add_copy(table[-1], copy)
            table[-1] = copy
            self.counters.copies += 1
            self._emit(EventKind.COPIED, request, match.partial)
        request.blocks = table + pool.take(num_blocks - len(table))
        request.num_registered = num_full
        return match.num_tokens

    def _count_admission(self, request: Request, computed: int) -> None:
        counters = self.counters
        if request.reads_cache:
            counters.prefix_queries += len(request.tokens)
            counters.prefix_hits += computed
        if request.timings.first_scheduled < 0:
            request.timings.first_scheduled = self._clock()
            request.num_cached_tokens = min(computed, request.prompt_len)
            counters.prompt_tokens += request.prompt_len
            counters.prompt_tokens_cached += request.num_cached_tokens
        self._emit(EventKind.ADMITTED, request, computed)

    def _min_stop_ids(self, request: Request) -> list[int]:
        """Ids that may not be drawn until min_tokens are out."""
        if not request.params.min_tokens:
            return []
        eos = [] if request.params.ignore_eos else self.eos_ids
        return sorted({*eos, *request.stop_ids})

    # ---- a result ----

    def update(self, result: StepResult) -> Update:
        """Takes the result of the oldest plan in flight."""
        issued = self._in_flight.match(result)
        plan, slots, running = issued.plan, issued.slots, self.running
        live = running.epoch[slots] == issued.epochs
        drew = live & (result.num_accepted > 0)
        rows, tokens = self._all_rows[: plan.num_rows], result.tokens[:, 0]
        if np.count_nonzero(drew) < plan.num_rows:
            rows = drew.nonzero()[0]
            slots, tokens = slots[rows], tokens[rows]
        last = tokens
        if self._guesses is None:
            place = running.known[slots]
            known = place + 1
            running.tokens[slots, place] = tokens
        else:
            rows, tokens, last, known = self._guesses.take_runs(result, plan, rows, slots)
        running.known[slots] = known
        if running.undrawn:
            self._stamp_first_tokens(slots)
        handles = running.handles[issued.slots[rows]]
        row_handles = self._prompt_logprob_handles(result, issued, live)
        # One that was preempted computes its vector anew.
        pooled = {row: int(running.handles[plan.slots[row]]) for row in result.pooled if live[row]}
        self._advance(slots if len(slots) == plan.num_rows else issued.slots[live])
        complete = [int(plan.slots[row]) for row in result.grammar_ends if live[row]]
        undrawn = self._finish_undrawn(result, plan, live) if complete else []
        finished = undrawn + self._finish_rows(slots, last, known, complete)
        finished += self._finish_silent(plan, live)
        adopted = self._adopt_orphans(result, issued, finished)
        if adopted:
            extra, late, owners = map(np.array, zip(*adopted))
            rows = np.concatenate([rows, extra])
            tokens = np.concatenate([tokens, late.astype(np.int32)])
            handles = np.concatenate([handles, owners.astype(np.int64)])
        self.counters.generation_tokens += len(tokens)
        return Update(plan, rows, handles, tokens, finished, row_handles, pooled)

    def fail(self) -> list[Request]:
        """The oldest plan in flight failed. Ends its requests, and those of later plans, which may
        have read what it should have written; forgets all cached content. Returns the ended."""
        ended: dict[int, Request] = {}
        for issued in self._in_flight:
            live = np.nonzero(self.running.epoch[issued.slots] == issued.epochs)[0]
            for slot in issued.slots[live].tolist():
                request = self._vacate(slot, keep=False)
                ended[request.handle] = request
            for request in issued.orphans.values():
                request.in_flight -= 1
                if request.state is State.WAITING:
                    self.waiting.remove(request)
                    request.state = State.FINISHED
                    ended[request.handle] = request
            issued.orphans.clear()
        self._in_flight.pop()
        for request in ended.values():
            self._finish(request, FinishReason.ERROR)
        self.pool.forget_all()
        return list(ended.values())

    def _finish_rows(
        self, slots: Index, tokens: Int32, known: Int32, complete: list[int]
    ) -> list[Request]:
        """``complete``: slots whose grammar lets nothing follow; that ends them whatever min_tokens
        and ignore_eos say."""
        running = self.running
        done: Bools = known >= running.limit[slots]
        if complete:
            done |= np.isin(slots, complete)
        for eos in self.eos_ids:
            ends = tokens == eos
            if np.count_nonzero(ends):
                done |= ends & (known >= running.stop_from[slots])
        if running.watched:
            done |= np.isin(slots, list(running.watched))
        finished = []
        for row in done.nonzero()[0].tolist():
            slot = int(slots[row])
            ending = running.at(slot).ending(int(tokens[row]), int(known[row]), self.eos_ids)
            if slot in complete:
                ending = _complete(ending)
            if ending:
                request = self._vacate(slot)
                request.timings.last_token = self._clock()
                self._finish(request, *ending)
                finished.append(request)
        return finished

    def _finish_undrawn(self, result: StepResult, plan: StepPlan, live: Bools) -> list[Request]:
        """Requests whose grammar ended them in place of a token."""
        finished = []
        for row, message in result.grammar_ends.items():
            if live[row] and not result.num_accepted[row]:
                request = self._vacate(int(plan.slots[row]))
                self._finish_by_grammar(request, message)
                finished.append(request)
        return finished

    def _finish_by_grammar(self, request: Request, message: str) -> None:
        """``message``: why its grammar cannot go on; "" where its output is complete."""
        request.message, request.own_fault = message, bool(message)
        request.timings.last_token = self._clock()
        self._finish(request, FinishReason.ERROR if message else FinishReason.STOP)

    def _finish_silent(self, plan: StepPlan, live: Bools) -> list[Request]:
        """Requests that draw nothing end with the plan that computes their last token."""
        finished = []
        for slot in sorted(self.running.silent):
            rows = np.nonzero((plan.slots == slot) & live)[0]
            ends = plan.starts[rows] + plan.num_tokens[rows]
            if len(rows) and int(ends[0]) == self.running.limit[slot] - 1:
                request = self._vacate(slot)
                self._finish(request, FinishReason.LENGTH)
                finished.append(request)
        return finished

    def _adopt_orphans(
        self, result: StepResult, issued: Issued, finished: list[Request]
    ) -> list[tuple[int, int, int]]:
        """Tokens for requests that lost their slot meanwhile: appended, nothing else.
        Returns (row, token, handle) of each."""
        adopted: list[tuple[int, int, int]] = []
        for row, request in issued.orphans.items():
            request.in_flight -= 1
            grammar_end = result.grammar_ends.get(row)
            if request.state is State.FINISHED:
                continue
            if not result.num_accepted[row]:
                if grammar_end is not None:
                    self.waiting.remove(request)
                    self._finish_by_grammar(request, grammar_end)
                    finished.append(request)
                continue
            now = self._clock()
            if request.timings.first_token < 0:
                request.timings.first_token = now
            ending = None
            for token in result.tokens[row, : result.num_accepted[row]].tolist():
                request.append(token)
                adopted.append((row, token, request.handle))
                ending = request.ending(token, len(request.tokens), self.eos_ids)
                if ending:
                    break
            if grammar_end is not None:
                ending = _complete(ending)
            if ending:
                self.waiting.remove(request)
                request.timings.last_token = now
                self._finish(request, *ending)
                finished.append(request)
        return adopted

    def _stamp_first_tokens(self, slots: Index) -> None:
        """``slots`` have just drawn; for some it was the first token since they were placed."""
        for slot in self.running.undrawn.intersection(slots.tolist()):
            self.running.undrawn.discard(slot)
            timings = self.running.at(slot).timings
            if timings.first_token < 0:
                timings.first_token = self._clock()

    def _prompt_logprob_handles(
        self, result: StepResult, issued: Issued, live: Bools
    ) -> dict[int, int]:
        handles = {}
        for row in result.prompt_logprobs:
            if live[row]:
                handles[row] = int(self.running.handles[issued.plan.slots[row]])
            elif row in issued.orphans:
                handles[row] = issued.orphans[row].handle
        return handles

    def _emit(self, kind: EventKind, request: Request, detail: int) -> None:
        self._on_event(Event(kind, self._clock(), self._step, request.handle, detail))

    # ---- proof ----

    def check(self) -> None:
        """Proves the invariants of slots, tables and pool. AssertionError if one fails."""
        running = self.running
        slots = running.order.tolist()
        assert len(set(slots)) == len(slots)
        assert sorted(slots) == [s for s, r in enumerate(running.requests) if r is not None]
        for slot in slots:
            request = running.at(slot)
            assert request.slot == slot and request.state is State.RUNNING
            assert running.computed[slot] <= running.total[slot] <= running.limit[slot]
            assert running.known[slot] <= running.total[slot]
            draws = running.total[slot] - running.known[slot]  # in flight
            most = 1 if self.speculation is None else 1 + self.speculation.most
            assert draws <= most * (1 if self._groups else self._most_in_flight)
            assert running.computed[slot] <= running.capacity[slot]
            assert running.capacity[slot] == len(request.blocks) * self.pool.block_size
        for request in self.waiting:
            assert request.state is State.WAITING and not request.blocks
        self.pool.check([running.at(slot).blocks for slot in slots])
        self.prefix.check(set(map(running.at, slots)))


def _complete(
    ending: tuple[FinishReason, int | None] | None,
) -> tuple[FinishReason, int | None]:
    """How a request ends whose grammar lets nothing follow its last token."""
    return ending if ending and ending[0] is FinishReason.STOP else (FinishReason.STOP, None)
