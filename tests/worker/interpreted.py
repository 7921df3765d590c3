"""The GPU's runner without a GPU: its kernels are interpreted, its graphs are lists of steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.grammar.grammars import Grammars
from octavo.speculation import SpeculativeConfig
from octavo.worker import graphs
from octavo.worker.device import Device
from octavo.worker.graphs import Graphs, Shape, decode_sizes, largest_shapes
from octavo.worker.sizes import Sizes
from tests.worker.plans import SumModel

BLOCK, MAX_LEN, NUM_BLOCKS = 4, 256, 64
CPU = torch.device("cpu")


def config(threads: int = 1, speculative: SpeculativeConfig | None = None) -> EngineConfig:
    return EngineConfig(
        speculative=speculative or SpeculativeConfig(),
        cache=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        parallel=ParallelConfig(cpu_threads=threads),
    )


def ways_to_run(few_blocks: int) -> pytest.MarkDecorator:
    """``num_blocks``, ``graphs`` and the ``settings`` of an engine: with preemption, with cut
    prompts, and without graphs and overlap."""
    ways: dict[str, tuple[int, bool, dict[str, Any]]] = {
        "few-blocks-graphs": (few_blocks, True, {}),
        "chunks-graphs": (64, True, {"long_prefill_token_threshold": 5}),
        "few-blocks-no-overlap-no-graphs": (few_blocks, False, {"async_scheduling": False}),
    }
    return pytest.mark.parametrize(
        "num_blocks,graphs,settings", list(ways.values()), ids=list(ways)
    )


class FakeGraph:
    """What is enqueued during its capture is done by each replay, and not before."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.shapes: list[Shape] = []
        self.steps: list[Callable[[], None]] = []
        self.num_replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.cuda.capturing is None and pool is self.cuda.pool
        self.cuda.capturing = self

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.capturing = None

    def replay(self) -> None:
        assert self.cuda.capturing is None
        self.num_replays += 1
        for step in self.steps:
            step()


class FakeCuda:
    """What ``worker.graphs`` uses of torch.cuda. ``compute``: what a recorded step does.

    ``eager`` and ``captured``: the shapes, as they came. ``fail``: the next capture breaks off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compute: Callable[[Shape], None]) -> None:
        self.compute = compute
        self.capturing: FakeGraph | None = None
        self.pool = object()
        self.graphs: list[FakeGraph] = []
        self.eager: list[Shape] = []
        self.captured: list[Shape] = []
        self.fail = False
        self.num_reserved = 0
        for name, value in {
            "graph_pool_handle": lambda: self.pool,
            "CUDAGraph": self._graph,
            "current_device": lambda: 0,
            "stream": lambda stream: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(graphs, "capture_stream", lambda device: None)
        monkeypatch.setattr(graphs, "reserve_small_tensors", self._reserve)

    def record(self, shape: Shape) -> None:
        """To be given to Graphs in place of a device's ``compute``."""
        self.recorder(self.compute)(shape)

    def recorder(self, compute: Callable[[Shape], None]) -> Callable[[Shape], None]:
        """In place of another function of a device's."""

        def record(shape: Shape) -> None:
            if self.capturing is None:
                self.eager.append(shape)
                compute(shape)
            elif self.fail:
                self.fail = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            else:
                self.captured.append(shape)
                self.capturing.shapes.append(shape)
                self.capturing.steps.append(lambda: compute(shape))

        return record

    def _graph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    def _reserve(self) -> None:
        assert self.capturing is not None
        self.num_reserved += 1


class Interpreted:
    """Executes plans on a SumModel. With ``monkeypatch``, common steps run padded: once enqueued
    kernel by kernel, then captured."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch | None = None,
        max_num_seqs: int = 8,
        max_tokens: int = 64,
        grammars: Grammars | None = None,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        from octavo.ops.triton.sampling import Scratch
        from octavo.worker.cuda_runner import CudaRunner

        self.model: Any = SumModel()
        found = config(speculative=speculative)
        self.gpu = CudaRunner(found, Path("none"), Device("cpu", ""), grammars=grammars)
        self.gpu.model = self.model
        sizes = Sizes(BLOCK, max_num_seqs, max_tokens, MAX_LEN, MAX_LEN, False)
        self.gpu._reserve(sizes, CPU)
        self.gpu.step.cache = self.model.allocate_cache(NUM_BLOCKS, BLOCK)
        self.slots = self.gpu.slots
        # Tiles of the size of the vocabulary: interpreting those of a GPU takes ten times as long.
        self.gpu.step.sampler.scratch = Scratch.allocate(
            self.gpu.step.max_rows, SumModel.vocab, CPU, chunk=128, group=16, capacity=128, few=32
        )
        if monkeypatch is not None:
            step, buffers = self.gpu.step, self.gpu._buffer_sizes(sizes)
            self.cuda = FakeCuda(monkeypatch, step.compute)
            self.gpu.graphs = Graphs(
                decode_sizes(max_num_seqs), *buffers, self.cuda.record, step.rehearse
            )
            self.gpu.graphs.reserve(largest_shapes(max_num_seqs, *buffers))
            self.gpu.forwards = Graphs(
                decode_sizes(max_num_seqs),
                *buffers,
                self.cuda.recorder(step.compute_last),
                step.rehearse,
                self.gpu.graphs.pool,
            )

    @property
    def forward_graphs(self) -> list[FakeGraph]:
        """Captured ones of steps whose draws wait for masks."""
        assert self.gpu.forwards is not None
        return list(self.gpu.forwards._captured.values())  # type: ignore[misc]

    @property
    def logit_rows(self) -> int:
        return self.gpu.step.logit_rows

    @logit_rows.setter
    def logit_rows(self, rows: int) -> None:
        self.gpu.step.logit_rows = rows

    def execute(self, plan: StepPlan) -> StepResult:
        return self.gpu.launch(plan).finish()
