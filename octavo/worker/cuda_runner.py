"""CudaRunner: owns one GPU, a model and its KV cache. Plans are enqueued without waiting; their
results are fetched later, while the next plan runs.

A step of single tokens is one graph replay. Any other, and steps that need more of the sampler than
the common path gives, are enqueued kernel by kernel, hidden behind the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.plan import POOL, PROMPT_LOGPROBS, SAMPLE, StepPlan, StepResult
from octavo.grammar.grammars import Grammars
from octavo.grammar.matcher import Matcher
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.model.shard import ALONE, TensorParallel
from octavo.ops.needs import EDITS, GRAMMAR, LOGPROBS
from octavo.speculation import Speculating, most_draws, reason, speculating
from octavo.types import ConfigError, Progress
from octavo.worker.batch import Rows, order_rows
from octavo.worker.constraints import advance
from octavo.worker.device import Device
from octavo.worker.device_step import DeviceStep
from octavo.worker.device_tables import DeviceTables
from octavo.worker.gpu_memory import GpuMemory, gpu_sizes, out_of_memory, plan_gpu_memory
from octavo.worker.graphs import (
    MIXED_PROMPT_ROWS,
    Graphs,
    Shape,
    decode_sizes,
    largest_shapes,
    reserve_small_tensors,
)
from octavo.worker.guessing import Guessing
from octavo.worker.info import PhaseClock, WorkerInfo
from octavo.worker.pooling import Pools
from octavo.worker.reports import Report, fetched
from octavo.worker.sampler import no_logprobs, stack
from octavo.worker.sizes import MemoryPlan, Sizes
from octavo.worker.slots import Slots
from octavo.worker.staging import Downloads, Mark

if TYPE_CHECKING:
    from octavo.parallel import World

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Graphs of steps with prompts whose draws wait for masks.
MOST_MIXED_FORWARDS = 32
# Libraries' workspaces inside captured graphs.
WORKSPACES = 256 << 20


@dataclass
class Pending:
    """A step on its way. Everything of the device's in it may be read after ``mark``."""

    step: int
    rows: Rows
    drawing: NDArray[np.bool_]  # [n] in computing order
    places: Int32  # [n] where each row's token is among ``tokens``
    tokens: Int32
    mark: Mark
    prompt_reports: dict[int, tuple[int, list[Report]]]  # the plan's row -> alternatives asked
    # for, and the reports of its tokens in order
    report: Report | None
    reported: NDArray[np.int64]  # the plan's rows that ``report`` describes
    pooled: dict[int, Tensor]  # the plan's row -> its prompt's vector
    constrained: Int64  # [c] rows in computing order that drew under a grammar
    matchers: list[Matcher | None]  # [c] theirs
    grammar_ends: dict[int, str] | None = None  # as StepResult has them, once it is settled
    dropped: list[int] = field(default_factory=list)  # the plan's rows whose token does not count
    width: int = 1  # tokens of each row; more than 1 in a step with guesses, whose ``tokens`` are
    # all that was drawn, then how many of them each row keeps, and how many guesses it had
    num_drafted: Int32 | None = None  # [n] without any; None where there is no speculation

    def settle(self) -> None:
        """Waits for the device, and gives the matchers what their rows drew: in the order of the
        steps, once each."""
        self.mark.wait()
        if self.grammar_ends is not None:
            return
        if not self.matchers:
            self.grammar_ends = {}
            return
        tokens = self.tokens[self.places[self.constrained]].tolist()
        ends, dropped = advance(self.matchers, tokens)
        rows = self.rows.plan_rows[self.constrained]
        self.grammar_ends = {int(rows[index]): message for index, message in ends.items()}
        self.dropped = rows[dropped].tolist()

    def finish(self) -> StepResult:
        """Waits for the device, then tells what was drawn."""
        self.settle()
        n = len(self.drawing)
        if self.width > 1:
            return self._finish_guessing(n)
        tokens = np.zeros((n, 1), dtype=np.int32)
        accepted = np.zeros(n, dtype=np.int32)
        drawn = self.rows.plan_rows[self.drawing]
        tokens[drawn, 0] = self.tokens[self.places[self.drawing]]
        accepted[drawn] = 1
        if self.dropped:
            accepted[self.dropped] = 0
        return StepResult(
            self.step,
            tokens,
            accepted,
            self.reported.astype(np.int32),
            self.report.logprobs() if self.report else None,
            {
                row: stack([no_logprobs(k), *(part.logprobs() for part in parts)])
                for row, (k, parts) in self.prompt_reports.items()
            },
            {row: vector.numpy() for row, vector in self.pooled.items()},
            self.grammar_ends or {},
            num_drafted=self.num_drafted,
        )

    def _finish_guessing(self, n: int) -> StepResult:
        padded = len(self.tokens) // (self.width + 2)
        drawn, told = np.split(self.tokens, [padded * self.width])
        kept, guessed = told.reshape(2, padded)
        order, width = self.rows.plan_rows, self.width
        result = StepResult(
            self.step,
            np.zeros((n, width), dtype=np.int32),
            np.zeros(n, dtype=np.int32),
            np.zeros(0, dtype=np.int32),
            num_drafted=np.zeros(n, dtype=np.int32),
        )
        assert result.num_drafted is not None
        result.tokens[order] = drawn.reshape(padded, width)[self.places]
        result.num_accepted[order] = kept[self.places]
        result.num_drafted[order] = guessed[self.places]
        return result


class CudaRunner:
    """Loads a model, reserves its memory, captures graphs and enqueues steps."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        device: Device,
        load: Callable[..., Model] = load_model,
        grammars: Grammars | None = None,
        world: World | None = None,
    ) -> None:
        """``world``: of several ranks, of which this is one; each executes the same plans, and is
        given the masks of the one that has ``grammars``."""
        self.config = config
        self.grammars = grammars
        self.path = path
        self.device = device
        self.load = load
        self.world = world
        self.ranks = ALONE if world is None else TensorParallel.of(world.tensor)
        self.speculating = speculating(config.speculative)
        self.guessing = None if self.speculating is None else guessing(self.speculating, self.ranks)

    # ---- start ----

    def start(self, progress: Progress) -> WorkerInfo:
        """Everything before the first plan. Raises ConfigError for what cannot be used."""
        clock = PhaseClock(progress)
        device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)
        memory = GpuMemory(total, free)
        if self.world is not None:  # step sizes follow from it
            (total,) = self.world.everyone.smallest([total])
        with torch.inference_mode():
            self.model = self._loaded(clock.enter)
            spec = self.model.spec
            sizes = gpu_sizes(self.config, spec.max_position, total)
            weights = _settled_bytes()
            memory = replace(memory, weights=weights)
            clock.enter("profile")
            with _out_of_memory("profile", self.config, sizes, memory):
                self._reserve(sizes, device)
                memory = self._profile(sizes, memory)
            clock.enter("cache")
            plan = self._agreed(
                plan_gpu_memory(self.config, sizes, self.model.kv_bytes_per_block, memory)
            )
            with _out_of_memory("cache", self.config, sizes, memory):
                self.step.cache = self.model.allocate_cache(plan.num_blocks, plan.block_size)
            clock.enter("graphs")
            with _out_of_memory("graphs", self.config, sizes, memory):
                self._prepare_graphs(sizes)
        return WorkerInfo(
            architecture=spec.architecture,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.device.label,
            device_kind="cuda",
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            kv_cache_bytes=plan.kv_cache_bytes,
            weight_bytes=self.model.weight_bytes,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            threads=torch.get_num_threads(),
            implementations=dict(self.model.implementations),
            startup_seconds=clock.finish(),
            reasons={**self.model.reasons, **plan.reasons, **reason(self.speculating)},
        )

    def _loaded(self, progress: Progress) -> Model:
        if self.world is None:
            return self.load(self.path, self.config, progress, "cuda")
        return self.load(self.path, self.config, progress, "cuda", ranks=self.ranks)

    def _agreed(self, plan: MemoryPlan) -> MemoryPlan:
        """What the rank with the least memory can hold."""
        if self.world is None:
            return plan
        found = self.world.everyone.smallest([plan.num_blocks, plan.max_model_len])
        kept = found[0] * self.model.kv_bytes_per_block(plan.block_size)
        return replace(plan, num_blocks=found[0], max_model_len=found[1], kv_cache_bytes=kept)

    def _reserve(self, sizes: Sizes, device: torch.device) -> None:
        """State and buffers of steps, with a cache of one block for the time being."""
        rows, vocab = sizes.max_num_seqs, self.model.spec.vocab_size
        follows = not self.ranks.leads
        most = self.guessing.most if self.guessing else 0
        self.slots = Slots(
            rows, sizes.max_model_len, sizes.block_size, vocab, self.grammars, follows, most
        )
        tables = DeviceTables.allocate(
            rows, sizes.max_model_len, self.slots.max_blocks, vocab, device
        )
        cache = self.model.allocate_cache(1, sizes.block_size)
        padded, tokens = self._buffer_sizes(sizes)
        self.step = DeviceStep(
            self.model, cache, self.slots, tables, padded, tokens, device, self.guessing
        )
        self.downloads = Downloads(len(self.step.tokens), device)
        self.pools = Pools()
        self.graphs: Graphs | None = None
        self.forwards: Graphs | None = None
        self._unsettled: list[Pending] = []  # whose rows drew under grammars; oldest first

    def _buffer_sizes(self, sizes: Sizes) -> tuple[int, int]:
        return _buffer_sizes(sizes, self.guessing.most if self.guessing else 0)

    def _profile(self, sizes: Sizes, memory: GpuMemory) -> GpuMemory:
        """Runs the largest steps; what they took stays with the allocator for those to come."""
        slots = _settled_bytes() - memory.weights
        rows, tokens = sizes.max_num_seqs, sizes.max_num_batched_tokens
        largest = Shape(rows - 1, 1, max(tokens - rows, 0) + 1)
        reserve_small_tensors()
        peaks = [_peak(lambda: self.step.rehearse(largest))]
        most = self.config.model.max_logprobs
        peaks += [_peak(lambda: self.step.rehearse_reports(rows, tokens, most))]
        captured = [_peak(partial(self.step.rehearse, s)) for s in self._captured_first(sizes)]
        activations = torch.cuda.memory_reserved() - slots - memory.weights
        return replace(
            memory,
            slots=slots,
            activations=max(activations, *peaks, *captured),
            graphs=max(captured) + WORKSPACES if captured else 0,
        )

    def _captured_first(self, sizes: Sizes) -> list[Shape]:
        if self.config.enforce_eager:
            return []
        return largest_shapes(sizes.max_num_seqs, *self._buffer_sizes(sizes))

    def _prepare_graphs(self, sizes: Sizes) -> None:
        """Now for the largest, so that there always is one that fits, and memory for the others."""
        if not self.config.enforce_eager:
            self.graphs = Graphs(
                decode_sizes(sizes.max_num_seqs),
                *self._buffer_sizes(sizes),
                self.step.compute,
                self.step.rehearse,
                widths=self.guessing.widths if self.guessing else (),
            )
            self.graphs.reserve(self._captured_first(sizes))
            # Of steps whose draws wait for masks: captured as they come, in the same memory.
            self.forwards = Graphs(
                decode_sizes(sizes.max_num_seqs),
                *self._buffer_sizes(sizes),
                self.step.compute_last,
                self.step.rehearse,
                self.graphs.pool,
                MOST_MIXED_FORWARDS,
            )
        torch.cuda.synchronize()

    # ---- steps ----

    def launch(self, plan: StepPlan) -> Pending:
        """Enqueues one plan. After an exception the slots are as the next plan expects them, on the
        host and on the device."""
        with torch.inference_mode():
            try:
                self.slots.apply(plan)
                self.step.place(plan)
                self.step.copy_blocks(plan)
                return self._enqueue(plan)
            except torch.AcceleratorError:
                raise
            except Exception:
                self.slots.skip(plan)
                self.step.restore_tables(plan)
                raise

    def idle(self) -> bool:
        """Uses a moment without work to capture a graph. False: there was none to capture."""
        with torch.inference_mode():
            return self.graphs is not None and self.graphs.capture_next()

    @property
    def num_pending(self) -> int:
        return self.graphs.num_pending if self.graphs else 0

    def _enqueue(self, plan: StepPlan) -> Pending:
        if self.guessing is not None and plan.most_drafts:
            width = self.guessing.width(plan.most_drafts)
            if (pending := self._enqueue_guessing(plan, width)) is not None:
                return pending
        rows = order_rows(plan, plan.starts, plan.num_known)
        n = plan.num_rows
        drawing = (rows.flags & SAMPLE) != 0
        needs = np.where(drawing, self.slots.needs[rows.slots], 0)
        scored = ((rows.flags & PROMPT_LOGPROBS) != 0).nonzero()[0]
        reporting = ((needs & LOGPROBS) != 0).nonzero()[0]
        pooling = ((rows.flags & POOL) != 0).nonzero()[0]
        constrained = ((needs & GRAMMAR) != 0).nonzero()[0]
        all_hidden = len(scored) or len(pooling)
        special = all_hidden or len(reporting) or (needs & (EDITS | GRAMMAR)).any()
        common = not special
        decode = rows.decode_rows
        shape = Shape(decode, n - decode, int(rows.num_tokens.sum()) - decode)
        graphs = self.graphs if common else None
        if len(constrained) and not all_hidden:
            graphs = self.forwards
        padded = graphs.fitting(shape) if graphs else None
        places = self.step.stage(plan, rows, padded or shape)
        report: Report | None = None
        prompts: dict[int, tuple[int, list[Report]]] = {}
        pooled: dict[int, Tensor] = {}
        if padded is not None and graphs is not None:
            graphs.run(padded)
            last = self.step.last[: padded.num_rows]
        elif common:
            self.step.compute(shape)
        elif graphs is not None:
            last = self.step.forward(shape)
        else:
            hidden, last = self.step.forward_all(shape)
            prompts = self._score_prompts(rows, scored, hidden)
            pooled = self._pool_prompts(rows, pooling, hidden)
        if not common:
            if len(constrained):
                self._send_masks(rows.slots[constrained], places[constrained], len(last))
            wanted = self.slots.logprobs[rows.slots[reporting]]
            masked = len(constrained) > 0
            told = places[reporting].astype(np.int64)
            report = self.step.draw_special(last, told, wanted, masked)
        tokens, mark = self.downloads.fetch(self.step.tokens[: (padded or shape).num_rows])
        ends = rows.starts + rows.num_tokens
        self.slots.length[rows.slots[drawing]] = ends[drawing] + 1
        pending = Pending(
            plan.step,
            rows,
            drawing,
            places,
            tokens,
            mark,
            prompts,
            report,
            rows.plan_rows[reporting],
            pooled,
            constrained,
            self.slots.constraints.of(rows.slots[constrained].tolist()),
            num_drafted=None if self.guessing is None else np.zeros(n, dtype=np.int32),
        )
        if len(constrained):
            self._unsettled.append(pending)
        return pending

    def _enqueue_guessing(self, plan: StepPlan, width: int) -> Pending | None:
        """A step whose rows bring ``width`` tokens each, guesses and padding among them; None for
        a plan whose rows do not all just decode, or that is too large: it goes without guesses."""
        n, drawing = plan.num_rows, (plan.flags & SAMPLE) != 0
        special = (self.slots.needs[plan.slots] & (LOGPROBS | EDITS | GRAMMAR)).any()
        plain = (plan.num_known == 1).all() and (plan.flags == SAMPLE).all() and not special
        shape = Shape(n, queries=width)
        padded = self.graphs.fitting(shape) if self.graphs else None
        if not plain or (padded or shape).num_tokens > self.step.max_rows:
            return None
        rows = order_rows(plan, plan.starts, plan.num_known)
        rows.num_tokens = plan.num_tokens[rows.plan_rows]
        places = self.step.stage(plan, rows, padded or shape)
        if padded is not None and self.graphs is not None:
            self.graphs.run(padded)
        else:
            self.step.compute(shape)
        told = (padded or shape).num_tokens + 2 * (padded or shape).num_rows
        tokens, mark = self.downloads.fetch(self.step.tokens[:told])
        self.slots.length[rows.slots] = rows.starts + rows.num_tokens + 1  # or less
        nobody = np.zeros(0, dtype=np.int64)
        return Pending(
            plan.step, rows, drawing, places, tokens, mark, {}, None, nobody, {}, nobody, [],
            width=width,
        )  # fmt: skip

    def _send_masks(self, slots: Int32, places: Int32, num_rows: int) -> None:
        """For the rows that draw under grammars. Waits until what those drew before is known, while
        the device computes this step's forward."""
        for pending in self._unsettled:
            pending.settle()
        self._unsettled.clear()
        if self.ranks.leads:
            self.slots.constraints.fill(slots.tolist())
        self.step.send_masks(places, self.slots.constraints.masks[slots], num_rows)
        self.ranks.agreed(self.step.masks_of(num_rows))

    def _pool_prompts(
        self, rows: Rows, pooling: NDArray[np.int64], hidden: Tensor
    ) -> dict[int, Tensor]:
        """The vectors of prompts that end here, on their way to the host."""
        found: dict[int, Tensor] = {}
        firsts = np.cumsum([0, *rows.num_tokens])
        for row in pooling.tolist():
            slot = int(rows.slots[row])
            vector = self.pools.add(
                slot,
                self.slots.pooling[slot],
                hidden[int(firsts[row]) : int(firsts[row + 1])],
                int(rows.starts[row]),
                int(self.slots.prompt_len[slot]),
            )
            if vector is not None:
                found[int(rows.plan_rows[row])] = fetched(vector)
        return found

    def _score_prompts(
        self, rows: Rows, scored: NDArray[np.int64], hidden: Tensor
    ) -> dict[int, tuple[int, list[Report]]]:
        """For each token of the rows that ask, the log-probability of the token after it."""
        reports: dict[int, tuple[int, list[Report]]] = {}
        firsts = np.cumsum([0, *rows.num_tokens])
        for row in scored.tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            end = min(start + int(rows.num_tokens[row]), int(self.slots.prompt_len[slot]) - 1)
            shift = int(firsts[row]) - start
            size = self.step.logit_rows
            parts = [
                self.step.score_prompt(slot, low, min(low + size, end), hidden, shift)
                for low in range(start, end, size)
            ]
            asked = int(self.slots.prompt_logprobs[slot])
            reports[int(rows.plan_rows[row])] = asked, parts
        return reports


def guessing(wanted: Speculating, ranks: TensorParallel) -> Guessing:
    """Raises ConfigError for methods that a GPU does not have."""
    if wanted.methods != ("ngram",):
        raise ConfigError(
            f"speculative method {'+'.join(wanted.methods)} on a GPU: there is ngram alone in this "
            "version; use --spec-method ngram, or leave it out"
        )
    if ranks.shard.size > 1:
        raise ConfigError(
            f"speculation with --tensor-parallel-size {ranks.shard.size} on GPUs: not in this "
            "version; leave one of them out"
        )
    return Guessing(wanted.num_tokens, wanted.shortest, wanted.longest)


def _buffer_sizes(sizes: Sizes, most_guesses: int = 0) -> tuple[int, int]:
    """Rows (or draws, where rows bring guesses) and tokens of the largest step, with the padding
    that a graph may add."""
    rows = most_draws(sizes.max_num_seqs, most_guesses) + MIXED_PROMPT_ROWS[-1]
    return rows, max(rows, sizes.max_num_batched_tokens)


def _settled_bytes() -> int:
    """What the allocator holds when it has given back what is not in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _peak(run: Callable[[], None]) -> int:
    """Bytes that ``run`` held at its most, beyond what was held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def _out_of_memory(
    phase: str, config: EngineConfig, sizes: Sizes, memory: GpuMemory
) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(phase, config, sizes, memory) from error
