"""Runner: owns the device, one model and its KV cache; executes plans one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.plan import SAMPLE, NewRequest, StepPlan, StepResult
from octavo.grammar.grammars import Grammars
from octavo.machine import available_cores, available_memory
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.model.shard import ALONE, TensorParallel
from octavo.speculation import Speculating, reason, speculating
from octavo.types import Progress, SamplingParams
from octavo.worker import batch as batches
from octavo.worker.draws import Drawer
from octavo.worker.info import PhaseClock, WorkerInfo
from octavo.worker.memory import left_for_cache, plan_memory
from octavo.worker.pooling import Pools
from octavo.worker.sampler import describe, no_logprobs, stack
from octavo.worker.sizes import MemoryPlan
from octavo.worker.slots import Slots
from octavo.worker.speculative.combine import make_proposer
from octavo.worker.speculative.draft import (
    IGNORED,
    Draft,
    DraftModel,
    DraftProposer,
    FirstLayers,
    check_vocabulary,
)
from octavo.worker.speculative.proposer import Proposer
from octavo.worker.stages import Stages

if TYPE_CHECKING:
    from octavo.parallel import World

# Logits are computed for so many bytes of rows at a time.
LOGITS_BYTES = 64 << 20
WARM_UP_TOKENS = 15
WARM_UP_SECONDS = 0.5


class Runner:
    """Loads a model, reserves its memory and computes steps, all on the calling thread."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        load: Callable[..., Model] = load_model,
        grammars: Grammars | None = None,
        world: World | None = None,
    ) -> None:
        """``world``: of several ranks, of which this is one; each executes the same plans. Those
        that have no ``grammars`` are given what the first of them draws."""
        self.config = config
        self.grammars = grammars
        self.path = path
        self.load = load
        self.world = world
        self.speculating = speculating(config.speculative)
        self.stages: Stages | None = None
        self.busy_seconds = 0.0  # of the last step, without waiting for the stage before
        self.ranks = ALONE if world is None else TensorParallel.of(world.tensor)

    def start(self, progress: Progress) -> WorkerInfo:
        """Everything before the first plan. Raises ConfigError for what cannot be used."""
        threads = self.config.parallel.cpu_threads or available_cores()
        torch.set_num_threads(threads)
        clock = PhaseClock(progress)
        with torch.inference_mode():
            self.model = self._loaded(clock.enter)
            self.draft = self._loaded_draft(clock.enter)
            spec = self.model.spec
            clock.enter("cache", -1.0)
            memory = self._plan_memory(spec.max_position)
            self._reserve(memory)
            clock.enter("warm-up", -1.0)
            self._warm_up(memory.num_blocks)
        return WorkerInfo(
            architecture=spec.architecture,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device="cpu",
            device_kind="cpu",
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=memory.max_model_len,
            block_size=memory.block_size,
            num_blocks=memory.num_blocks,
            kv_cache_bytes=memory.kv_cache_bytes,
            weight_bytes=self._weight_bytes,
            max_num_seqs=memory.max_num_seqs,
            max_num_batched_tokens=memory.max_num_batched_tokens,
            threads=threads,
            implementations=dict(self.model.implementations),
            startup_seconds=clock.finish(),
            reasons={**self.model.reasons, **memory.reasons, **reason(self.speculating)},
        )

    def _loaded(self, progress: Progress) -> Model:
        return self._load(self.path, self.config, progress)

    def _loaded_draft(self, progress: Progress) -> Model | None:
        """The model that guesses, where that is one of its own."""
        wanted, path = self.speculating, Path(self.config.speculative.draft_path)
        if wanted is None or wanted.draft != "draft_model":
            return None
        model = replace(
            self.config.model, model=str(path), quantization=wanted.quantization, hf_overrides={}
        )
        draft = self._load(path, replace(self.config, model=model), progress)
        check_vocabulary(draft, self.model, path)
        return draft

    def _load(self, path: Path, config: EngineConfig, progress: Progress) -> Model:
        if self.world is None:
            return self.load(path, config, progress)
        place = self.world.place
        return self.load(
            path,
            config,
            progress,
            ranks=self.ranks,
            stage=place.stage,
            num_stages=place.pipeline_size,
        )

    def _plan_memory(self, model_length: int) -> MemoryPlan:
        """The same on all ranks: what the one with the least memory can hold. Those of a host have
        an equal part of it."""
        if self.world is None:
            return plan_memory(self.config, self._kv_bytes, model_length, self._free_memory(1))
        everyone = self.world.everyone
        everyone.smallest([0])  # all have loaded
        num_local = self.world.place.num_local
        free = self._free_memory(num_local) // num_local
        everyone.smallest([0])  # and looked, before one takes some of it
        plan = plan_memory(self.config, self._kv_bytes, model_length, free)
        blocks, length = everyone.smallest([plan.num_blocks, plan.max_model_len])
        kept = blocks * self._kv_bytes(plan.block_size)
        return replace(plan, num_blocks=blocks, max_model_len=length, kv_cache_bytes=kept)

    def take_drawn(self, results: Sequence[StepResult]) -> None:
        """What the last stage drew in steps that this one has computed its part of."""
        if self.stages and not self.stages.is_last:
            self.stages.take_drawn(results, self.slots)

    def _free_memory(self, num_ranks: int) -> int:
        """Bytes that this engine's ranks on this host may still take, all having loaded."""
        weights = num_ranks * self._weight_bytes
        return left_for_cache(self.config.parallel, available_memory(), weights)

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes one plan. After an exception the slots are as the next plan expects them."""
        began, waited = time.perf_counter(), self._waited
        with torch.inference_mode():
            try:
                if self.proposer is not None:
                    self.proposer.apply(plan)
                self.slots.apply(plan)
                if len(plan.copies):
                    pairs = torch.from_numpy(plan.copies.astype(np.int64))
                    self.model.copy_blocks(self.cache, pairs)
                return self._compute(plan)
            except Exception:
                self.slots.skip(plan)
                raise
            finally:
                spent = time.perf_counter() - began
                self.busy_seconds = spent - (self._waited - waited)

    @property
    def _waited(self) -> float:
        return self.stages.waited if self.stages else 0.0

    def _reserve(self, memory: MemoryPlan) -> None:
        """Cache, slots and step buffers. On a CPU this takes address space; the system commits a
        page when it is first written, so the cache costs what has been used of it."""
        rows, tokens = memory.max_num_seqs, memory.max_num_batched_tokens
        vocab = self.model.spec.vocab_size
        self.cache = self.model.allocate_cache(memory.num_blocks, memory.block_size)
        self.slots = Slots(
            rows, memory.max_model_len, memory.block_size, vocab, self.grammars, self.follows
        )
        self.batches = batches.BatchBuilder(self.slots, max(rows, tokens), rows)
        self.pools = Pools()
        self.logit_rows = max(1, LOGITS_BYTES // (4 * vocab))
        self.drawer = Drawer(self.model, self.slots, self.ranks, self.follows, self.logit_rows)
        self.proposer: Proposer | None = None
        if self.speculating is not None:
            drafts = self._drafts(self.speculating, memory.num_blocks)
            self.proposer = make_proposer(self.speculating, self.slots, drafts)
        if self.world is not None and self.world.place.pipeline_size > 1:
            self.stages = Stages(self.world, self.model)

    def _drafts(self, wanted: Speculating, num_blocks: int) -> DraftProposer | None:
        """What computes guesses, if something does."""
        draft: Draft
        if self.draft is not None:
            draft = DraftModel(self.draft, num_blocks, self.slots, self.batches)
        elif wanted.draft_layers:
            layers = wanted.draft_layers
            draft = FirstLayers(self.model, self.cache, layers, self.slots, self.batches)
        else:
            return None
        drawer = Drawer(draft.model, self.slots, self.ranks, self.follows, self.logit_rows, IGNORED)
        return DraftProposer(draft, self.slots, self.batches, drawer)

    def _kv_bytes(self, block_size: int) -> int:
        """Of a block of so many tokens, over all layers, the draft model's too."""
        models = [self.model] if self.draft is None else [self.model, self.draft]
        return sum(model.kv_bytes_per_block(block_size) for model in models)

    @property
    def _weight_bytes(self) -> int:
        return self.model.weight_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def follows(self) -> bool:
        """Whether another rank draws in this one's place, where that is more than the most likely
        token."""
        place = None if self.world is None else self.world.place
        is_last = place is None or place.stage == place.pipeline_size - 1
        return not (self.ranks.leads and is_last)

    def _compute(self, plan: StepPlan) -> StepResult:
        guesses = None
        if plan.most_drafts and self.proposer is not None:
            guesses = self._guess(self.proposer, plan)
        batch = self.batches.build(plan, guesses)
        hidden = self.stages.receive(len(batch.forward.token_ids)) if self.stages else None
        if self.stages and not self.stages.is_last:
            self.stages.send(self.model.forward(batch.forward, self.cache, hidden))
            self.stages.expect(plan, batch, self.slots)
            return _nothing(plan)
        result = self._finish(plan, batch, hidden)
        if plan.num_drafts is not None:
            none = np.zeros(plan.num_rows, dtype=np.int32)
            result.num_drafted = none if guesses is None else guesses
        return result

    def _guess(self, proposer: Proposer, plan: StepPlan) -> np.ndarray:
        """How many guesses each row brings, int32 [n]; they are in the slots' histories then."""
        assert plan.num_drafts is not None
        asked = plan.num_drafts.nonzero()[0]
        counts, ids = proposer.propose(plan.slots[asked], plan.num_drafts[asked])
        self.slots.write_guesses(plan.slots[asked], counts, ids)
        guesses = np.zeros(plan.num_rows, dtype=np.int32)
        guesses[asked] = counts
        return guesses

    def _finish(self, plan: StepPlan, batch: batches.StepBatch, given: Tensor | None) -> StepResult:
        """What the last stage does, or the only one. ``given``: hidden states of the one before."""
        result = _nothing(plan)
        if len(batch.scored) or len(batch.pooled):
            hidden = self.model.forward(batch.forward, self.cache, given)
            self._score_prompts(batch, hidden, result)
            self._pool_prompts(batch, hidden, result)
            last = hidden[batch.forward.logit_rows]
        elif batch.forward.decode_rows == len(batch.drawing) == plan.num_rows:  # no guesses
            last = self.model.forward(batch.forward, self.cache, given)
        else:
            last = self.model.forward_last(batch.forward, self.cache, given)
        if len(batch.drawing):
            if self.proposer is not None:
                self.proposer.computed(batch, last)
            self.drawer.draw(batch, last, result)
        return result

    def _score_prompts(self, batch: batches.StepBatch, hidden: Tensor, result: StepResult) -> None:
        """For each token of the rows that ask, the log-probability of the token after it."""
        for row in batch.scored.tolist():
            slot, start = int(batch.slots[row]), int(batch.starts[row])
            end = min(start + int(batch.num_tokens[row]), int(self.slots.prompt_len[slot]) - 1)
            shift = int(batch.first_tokens[row]) - start
            k = int(self.slots.prompt_logprobs[slot])
            parts = [no_logprobs(k)]
            for low in range(start, end, self.logit_rows):
                high = min(low + self.logit_rows, end)
                logits = self.model.logits(hidden[shift + low : shift + high])
                following = self.slots.history[slot, low + 1 : high + 1].to(torch.int64)
                wanted = np.full(high - low, k, dtype=np.int32)
                parts.append(describe(logits.log_softmax(-1), following, wanted))
            result.prompt_logprobs[int(batch.plan_rows[row])] = stack(parts)

    def _pool_prompts(self, batch: batches.StepBatch, hidden: Tensor, result: StepResult) -> None:
        for row in batch.pooled.tolist():
            slot, first = int(batch.slots[row]), int(batch.first_tokens[row])
            vector = self.pools.add(
                slot,
                self.slots.pooling[slot],
                hidden[first : first + int(batch.num_tokens[row])],
                int(batch.starts[row]),
                int(self.slots.prompt_len[slot]),
            )
            if vector is not None:
                result.pooled[int(batch.plan_rows[row])] = vector.numpy()

    def _warm_up(self, num_blocks: int) -> None:
        """One small prompt and one token after it, so that the first request finds threads, kernels
        and allocator ready. Leaves nothing behind but values in free blocks."""
        began = time.perf_counter()
        longest = min(self.slots.max_len, num_blocks * self.slots.block_size) - 1
        length = min(WARM_UP_TOKENS, longest, self.batches.max_tokens)
        if length < 1:
            return
        params = SamplingParams(temperature=0.8, top_p=0.95)
        self.execute(_first_plan(length, params, self.slots.block_size))
        if self.world is None and time.perf_counter() - began < WARM_UP_SECONDS / 2:
            self.execute(_next_plan(length))
        self.slots.free(np.zeros(1, dtype=np.int32))
        if self.stages:
            self.stages.settle()


def _nothing(plan: StepPlan) -> StepResult:
    """The result of a step that draws nothing."""
    tokens = np.zeros((plan.num_rows, 1), dtype=np.int32)
    accepted = np.zeros(plan.num_rows, dtype=np.int32)
    return StepResult(plan.step, tokens, accepted, np.zeros(0, dtype=np.int32))


def _first_plan(num_tokens: int, params: SamplingParams, block_size: int) -> StepPlan:
    """Slot 0 is placed with a prompt of zeros and blocks 0, 1 … for one token more, and draws."""
    blocks = np.arange(-(-(num_tokens + 1) // block_size), dtype=np.int32)
    return StepPlan(
        step=-1,
        slots=_ints(0),
        num_tokens=_ints(num_tokens),
        starts=_ints(0),
        flags=np.array([SAMPLE], dtype=np.uint8),
        block_starts=_ints(0),
        block_indptr=_ints(0, len(blocks)),
        block_ids=blocks,
        freed_slots=_ints(),
        copies=np.zeros((0, 2), dtype=np.int32),
        new_requests=[NewRequest(0, num_tokens, params, seed=0)],
        new_indptr=_ints(0, num_tokens),
        new_token_ids=np.zeros(num_tokens, dtype=np.int32),
    )


def _next_plan(position: int) -> StepPlan:
    """Slot 0 computes the token at ``position``, which it drew, and draws the next."""
    return StepPlan(
        step=-1,
        slots=_ints(0),
        num_tokens=_ints(1),
        starts=_ints(position),
        flags=np.array([SAMPLE], dtype=np.uint8),
        block_starts=_ints(0),
        block_indptr=_ints(0, 0),
        block_ids=_ints(),
        freed_slots=_ints(),
        copies=np.zeros((0, 2), dtype=np.int32),
        new_requests=[],
        new_indptr=_ints(0),
        new_token_ids=_ints(),
    )


def _ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)
