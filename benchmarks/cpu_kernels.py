"""The operations' versions for a CPU, against each other, kernel by kernel.

    python -m benchmarks.cpu_kernels [--seconds 0.5] [--only linear attention norm]

Random data in BF16 in the demo model's shapes; all 30 layers' weights and caches take turns, so
that they come from where they come from in a model; versions take turns within a measurement.
Writes benchmarks/results/cpu_kernels.json: microseconds a call, best and median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.report import save
from octavo.machine import available_cores
from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry
from tests.ops.attention_batches import Rope, columns

BF16 = torch.bfloat16
LAYERS, HIDDEN, MLP, VOCABULARY = 30, 576, 1536, 49152
GEOMETRY, BLOCK = AttentionGeometry(9, 3, 64), 16
LINEARS = {  # outputs of each weight, inputs, epilogue, how many there are
    "qkv": ([960], HIDDEN, "none", LAYERS),
    "o": ([HIDDEN], HIDDEN, "add", LAYERS),
    "gate_up": ([MLP, MLP], HIDDEN, "silu_mul", LAYERS),
    "down": ([HIDDEN], MLP, "add", LAYERS),
    "head": ([VOCABULARY], HIDDEN, "logits", 2),
}
ROWS = (1, 4, 13, 32, 128, 1024)
BATCHES = {  # tokens in the cache, tokens that come
    "decode, 1 row at 128": ([127], [1]),
    "decode, 1 row at 2,048": ([2047], [1]),
    "decode, 16 rows at 256": ([255] * 16, [1] * 16),
    "decode, 16 rows at 1,024": ([1023] * 16, [1] * 16),
    "prompt of 1,024": ([0], [1024]),
    "512 tokens after 1,536": ([1536], [512]),
    "10 rows at 300, 3 prompts": ([300] * 10 + [0, 0, 512], [1] * 10 + [128, 100, 256]),
}
Calls = dict[str, list[Callable[[], object]]]  # version -> a call per layer


def timed(calls: Calls, seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds a call of each version, which take turns over all layers."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 5 or time.perf_counter() < end:
        for name in calls if turn % 2 else reversed(calls):
            began = time.perf_counter()
            for call in calls[name]:
                call()
            found[name].append((time.perf_counter() - began) / len(calls[name]) * 1e6)
        turn += 1
    return {
        name: {"best": min(times[1:]), "median": statistics.median(times[1:])}
        for name, times in found.items()
    }


def versions(op: str) -> list[registry.Version]:
    """The preferred one, and the best of those that torch computes."""
    native, others = [], []
    for version in registry.runnable(op, "cpu", BF16)[1:]:
        (native if version.name == "native" else others).append(version)
    return [*others[-1:], *native]


def linear_calls(name: str, rows: int) -> Calls:
    outputs, inputs, epilogue, count = LINEARS[name]
    layers = count if rows <= 32 else min(count, 3)
    x = torch.randn(rows, inputs).to(BF16)
    other = torch.randn(rows, sum(outputs)).to(BF16) if epilogue == "add" else None
    calls: Calls = {version.name: [] for version in versions("linear")}
    for _ in range(layers):
        weights = [(torch.randn(out, inputs) / inputs**0.5).to(BF16) for out in outputs]
        for version in versions("linear"):
            apply = version.call(weights, None, epilogue)
            calls[version.name].append(partial(apply, x, other))
    return calls


def attention_calls(past: list[int], new: list[int]) -> Calls:
    rows, width = len(new), max(-(-(p + n) // BLOCK) for p, n in zip(past, new))
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1))
    decode = next((row for row, count in enumerate(new) if count != 1), rows)
    batch = columns(past, new, order.view(rows, width).int(), BLOCK, decode)
    heads = GEOMETRY.num_heads + 2 * GEOMETRY.num_kv_heads
    qkv = torch.randn(sum(new), heads * GEOMETRY.head_dim).to(BF16)
    calls: Calls = {}
    for version in versions("paged_attention"):
        attend = version.call(GEOMETRY)
        state = attend.prepare(batch, Rope(GEOMETRY.head_dim), BF16)
        shape = attend.kv_shape(rows * width, BLOCK)
        caches = [torch.full(shape, 0.5, dtype=BF16) for _ in range(LAYERS if decode else 4)]
        calls[version.name] = [
            lambda attend=attend, cache=cache, state=state: attend(qkv.clone(), cache, state)
            for cache in caches
        ]
    return calls


def norm_calls(rows: int) -> Calls:
    x, weight = torch.randn(rows, HIDDEN).to(BF16), torch.randn(HIDDEN).to(BF16)
    return {
        version.name: [partial(version.call, x, weight, 1e-5)] * LAYERS
        for version in versions("rms_norm")
    }


def cases(only: list[str]) -> Iterator[tuple[str, Callable[[], Calls]]]:
    if "linear" in only:
        for name in LINEARS:
            for rows in ROWS if name != "head" else ROWS[:4]:
                yield (
                    f"{name}, {rows:,} rows",
                    lambda name=name, rows=rows: linear_calls(name, rows),
                )
    if "attention" in only:
        for name, (past, new) in BATCHES.items():
            yield name, partial(attention_calls, past, new)
    if "norm" in only:
        for rows in ROWS:
            yield f"norm, {rows:,} rows", partial(norm_calls, rows)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = ["linear", "attention", "norm"]
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds)
    options = parser.parse_args()
    torch.set_num_threads(available_cores())
    results: dict[str, Any] = {}
    for name, make in cases(options.only):
        results[name] = found = timed(make(), options.seconds)
        shown = ", ".join(f"{v} {t['best']:.1f} ({t['median']:.1f})" for v, t in found.items())
        print(f"{name}: {shown} us", flush=True)
    print(f"saved {save('cpu_kernels', {'threads': torch.get_num_threads(), 'us': results})}")


if __name__ == "__main__":
    main()
