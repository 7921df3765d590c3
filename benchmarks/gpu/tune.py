"""Measures which kernel multiplies each linear fastest, and writes the table of plans.

    python -m benchmarks.gpu.tune --models llama-8b,qwen3-0.6b --seconds 60

A figure is microseconds per call in a captured chain over more weights than the L2 cache holds,
launch gaps included, as a decode step has it; cuBLAS is a candidate, with SiLU·mul's kernel after
it where the epilogue asks for that. Every candidate's result is checked first. When the time is
over, shapes not yet measured keep what the table says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.ops.triton.linear import TritonLinear
from octavo.ops.triton.plans import BUCKETS, CUBLAS, TABLE, Plan, Shape, candidates

# hidden, attention width, qkv width, intermediate, vocabulary
MODELS = {
    "llama-8b": (4096, 4096, 6144, 14336, 128256),
    "qwen3-0.6b": (1024, 2048, 4096, 3072, 151936),
    "smollm2-135m": (576, 576, 960, 1536, 49152),
}
ROWS = {1: 1, 16: 8, 32: 32, 64: 64}  # measured for each bucket
COLD = 128 << 20  # bytes of weights to go through: twice the L2 cache
CALLS = 16  # of a chain, at least
WORST = 0.02  # relative error of BF16 against FP32


@dataclass(frozen=True)
class Measured:
    plan: Plan
    us: float


def shapes_of(model: str) -> list[Shape]:
    hidden, attention, qkv, intermediate, vocab = MODELS[model]
    return [
        Shape(qkv, hidden, "none"),
        Shape(hidden, attention, "add"),
        Shape(2 * intermediate, hidden, "silu_mul"),
        Shape(hidden, intermediate, "add"),
        Shape(vocab, hidden, "logits"),
    ]


class Subject:
    """One shape: copies of its weight that do not fit into the cache together, and inputs."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        copies = -(-COLD // (shape.n * shape.k * dtype.itemsize))
        weights = [self._random(shape.n, shape.k, dtype=dtype) / shape.k**0.5]
        weights += [weights[0].clone() for _ in range(copies)]
        self.linears = [TritonLinear([weight], None, shape.epilogue) for weight in weights]
        self.x = {bucket: self._random(rows, shape.k, dtype=dtype) for bucket, rows in ROWS.items()}
        self.other = {
            bucket: self._random(rows, shape.n, dtype=dtype) if shape.epilogue == "add" else None
            for bucket, rows in ROWS.items()
        }

    def _random(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype)

    def call(self, linear: TritonLinear, bucket: int) -> Tensor:
        other = self.other[bucket]
        return linear(self.x[bucket], other if other is None else other.clone())

    def build(self, bucket: int, plan: Plan) -> None:
        """Compiles the plan's kernel, in any thread."""
        with torch.inference_mode():
            linear = TritonLinear([self.linears[0].weight], None, self.shape.epilogue)
            linear.use({bucket: plan})
            self.call(linear, bucket)

    def error(self, bucket: int, plan: Plan) -> float:
        """Of a result, against FP32, relative to its largest value."""
        linear = self.linears[0]
        exact = self.x[bucket].float() @ linear.weight.float().t()
        other = self.other[bucket]
        if self.shape.silu:
            gate, up = exact.chunk(2, dim=-1)
            exact = torch.nn.functional.silu(gate) * up
        if other is not None:
            exact += other
        linear.use({bucket: plan})
        found = self.call(linear, bucket).float()
        return float((found - exact).abs().max() / exact.abs().max())

    def time(self, bucket: int, plan: Plan, replays: int = 5) -> float:
        """Microseconds per call."""
        for linear in self.linears:
            linear.use({bucket: plan})
        calls = -(-CALLS // len(self.linears)) * len(self.linears)
        x, other = self.x[bucket], self.other[bucket]
        graph = torch.cuda.CUDAGraph()
        self.linears[0](x, other)
        with torch.cuda.graph(graph):
            for index in range(calls):
                self.linears[index % len(self.linears)](x, other)
        graph.replay()
        spans = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(start.elapsed_time(end))
        return min(spans) * 1e3 / calls


def tune(subject: Subject, bucket: int) -> list[Measured]:
    """All candidates of a bucket that compute the right thing, the fastest first."""
    measured = []
    for plan in candidates(subject.shape, bucket):
        error = subject.error(bucket, plan)
        if not error <= WORST:
            raise RuntimeError(f"{subject.shape}, {plan}: relative error {error:.3g}")
        measured.append(Measured(plan, subject.time(bucket, plan)))
    return sorted(measured, key=lambda entry: entry.us)


def tune_shape(shape: Shape, dtype: torch.dtype) -> Iterable[dict[str, Any]]:
    """Rows of the table, one for each bucket."""
    subject = Subject(shape, dtype)
    todo = [(bucket, plan) for bucket in BUCKETS for plan in candidates(shape, bucket)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: subject.build(*item), todo))
    torch.cuda.synchronize()
    for bucket in BUCKETS:
        found = tune(subject, bucket)
        (cublas,) = (entry.us for entry in found if entry.plan == CUBLAS)
        best = found[0]
        rate = shape.n * shape.k * dtype.itemsize / best.us / 1e6
        print(
            f"{shape.epilogue:8} {shape.n:6} x {shape.k:<5} rows {bucket:2}: {best.us:7.2f} us, "
            f"{rate:.2f} TB/s, cuBLAS {cublas:7.2f}; {best.plan}",
            flush=True,
        )
        yield {
            "n": shape.n,
            "k": shape.k,
            "epilogue": shape.epilogue,
            "rows": bucket,
            "plan": plain(best.plan),
            "us": round(best.us, 2),
            "cublas_us": round(cublas, 2),
        }


def plain(plan: Plan) -> dict[str, Any]:
    """What differs from a Plan's defaults."""
    defaults = asdict(CUBLAS)
    return {k: v for k, v in asdict(plan).items() if k == "kind" or v != defaults[k]}


def write(path: Path, rows: Sequence[dict[str, Any]], dtype: torch.dtype) -> None:
    """Adds the rows to the table at ``path``, in place of older ones of the same shapes."""
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"plans": []}

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["n"], row["k"], row["epilogue"], row["rows"]

    merged = {key(row): row for row in (*table["plans"], *rows)}
    lines = ",\n".join(json.dumps(row) for row in merged.values())
    head = {
        "device": torch.cuda.get_device_name(),
        "dtype": str(dtype).removeprefix("torch."),
        "measured": f"benchmarks/gpu/tune.py, torch {torch.__version__}",
    }
    path.write_text(f'{json.dumps(head)[:-1]}, "plans": [\n{lines}\n]}}\n')


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b", help=", ".join(MODELS))
    parser.add_argument("--seconds", type=float, default=60, help="start no shape after so many")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    shapes = dict.fromkeys(s for model in options.models.split(",") for s in shapes_of(model))
    for shape in shapes:
        if time.monotonic() - started > options.seconds:
            print(f"time is over: {shape} keeps its plans")
            continue
        rows += tune_shape(shape, torch.bfloat16)
        write(options.output, rows, torch.bfloat16)
    print(f"{len(rows)} plans in {time.monotonic() - started:.0f} s: {options.output}")


if __name__ == "__main__":
    main()
