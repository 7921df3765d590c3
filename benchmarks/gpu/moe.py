"""Time of a mixture of experts on one GPU: routing and experts, a graph replayed.

    python -m benchmarks.gpu.moe [--model qwen3-30b-a3b] [--tokens 1 8 64 512] [--candidates]

A graph runs as many layers with weights of their own as exceed the GPU's L2 cache, each with a
routing of its own, uniform over the experts. "floor" is what the chosen experts' weights take to
read at 4.55 TB/s, the best that a GEMV reaches on an H200; "bar" (qwen3-30b-a3b, experts alone) is
a well-known Triton grouped GEMM's time there. ``--candidates`` times every plan worth trying in
place of the chosen ones, which takes minutes. Prints microseconds as JSON and writes
benchmarks/results/gpu_moe.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import gpus, save
from octavo.ops.routing import Routing
from octavo.ops.triton.moe import TritonExperts
from octavo.ops.triton.moe_plans import Plans, candidates
from octavo.ops.triton.moe_route import route

SHAPES = {  # routing, hidden size, an expert's size, clamped SwiGLU with biases
    "qwen3-30b-a3b": (Routing(128, 8), 2048, 768, False),
    "mixtral-8x7b": (Routing(8, 2), 4096, 14336, False),
    "gpt-oss-20b": (Routing(32, 4), 2880, 2880, True),
}
BARS = {"qwen3-30b-a3b": {1: 40, 8: 172, 64: 316, 512: 350}}
BYTES_PER_MICROSECOND = 4.55e6
CACHE_BYTES = 200 << 20
REPLAYS = 20


def layers_of(name: str, tokens: int) -> list[TritonExperts]:
    """So many that what one step of each reads exceeds the cache; at least two."""
    routing, hidden, inner, biased = SHAPES[name]
    experts = routing.num_experts
    used = min(experts, tokens * routing.top_k) * 6 * hidden * inner
    made = []
    for _ in range(max(2, -(-CACHE_BYTES // used))):
        shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
        shapes += [(experts, 2 * inner), (experts, hidden)] * biased
        gate_up, down, *biases = (
            torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.03) for shape in shapes
        )
        activation = "swiglu_clamped" if biased else "silu_mul"
        made.append(TritonExperts(gate_up, down, activation, *biases))
    return made


def microseconds(step: Callable[[], Any], per: int) -> dict[str, float]:
    """Best and median of a captured ``step``, which does the same ``per`` times."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / per)
    return {"best": round(min(times), 2), "median": round(median(times), 2)}


def experts_step(layers: list[TritonExperts], x: Tensor, choices: list[Any]) -> Callable[[], None]:
    def step() -> None:
        y = x
        for layer, (ids, weights) in zip(layers, choices):
            y = layer(y, ids, weights, x)

    return step


def measure(name: str, tokens: int, all_plans: bool) -> dict[str, Any]:
    routing, hidden, inner, _ = SHAPES[name]
    layers = layers_of(name, tokens)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    logits = [
        torch.randn(tokens, routing.num_experts, dtype=torch.bfloat16, device="cuda")
        for _ in layers
    ]
    choices = [route(row, routing) for row in logits]
    found: dict[str, Any] = {
        "experts": microseconds(experts_step(layers, x, choices), len(layers)),
        "route": microseconds(lambda: [route(row, routing) for row in logits], len(layers)),
    }
    read = sum(len(ids.unique()) for ids, _ in choices) / len(layers) * 6 * hidden * inner
    found["floor"] = round(read / BYTES_PER_MICROSECOND, 1)
    found["share"] = round(found["floor"] / found["experts"]["best"], 3)
    bar = BARS.get(name, {}).get(tokens)
    if bar is not None:
        found |= {"bar": bar, "met": found["experts"]["best"] <= bar}
    if all_plans:
        chosen = layers[0].choose(tokens, routing.top_k)
        found["chosen"] = asdict(chosen)
        others = candidates(chosen, routing.top_k, (hidden, inner))
        found["candidates"] = compared(layers, x, choices, others)
    return found


def compared(
    layers: list[TritonExperts], x: Tensor, choices: list[Any], others: Iterable[Plans]
) -> list[dict[str, Any]]:
    """Fastest first."""
    rows = []
    for plans in others:
        for layer in layers:
            layer.plans = plans
        times = microseconds(experts_step(layers, x, choices), len(layers))
        rows.append(times | asdict(plans))
    return sorted(rows, key=lambda row: row["best"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--candidates", action="store_true", help="time every plan worth trying")
    options = parser.parse_args()
    with torch.inference_mode():
        figures = {
            str(tokens): measure(options.model, tokens, options.candidates)
            for tokens in options.tokens
        }
    told = {"gpus": gpus(), "model": options.model, "microseconds": figures}
    print(json.dumps(told, indent=1))
    save("gpu_moe", told)


if __name__ == "__main__":
    main()
