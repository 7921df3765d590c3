"""Run by test_triton_compile.py in a process of its own: compiles launches for Hopper, prints JSON.

Arguments: nothing for Qwen3-30B-A3B's and gpt-oss's experts, ``all`` for every candidate plan of
the former too.
"""

from __future__ import annotations

import json
import sys

import torch

from octavo.ops.routing import Routing
from octavo.ops.triton import moe, moe_plans, moe_route
from octavo.ops.triton.moe_plans import Plans
from tests.fixtures.triton_aot import described, recorded
from tests.ops.moe_cases import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3

TOKENS = (1, 8, 256, 512, 4096)  # one by one, then each height of tiles


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_experts(
    routing: Routing,
    hidden: int,
    inner: int,
    tokens: int,
    plans: Plans | None = None,
    bias: bool = False,
) -> None:
    count = routing.num_experts
    biases = (meta(count, 2 * inner), meta(count, hidden)) if bias else ()
    activation = "swiglu_clamped" if bias else "silu_mul"
    weights = (meta(count, 2 * inner, hidden), meta(count, hidden, inner))
    made = moe.TritonExperts(*weights, activation, *biases)
    made.plans = plans
    x, other = meta(tokens, hidden), meta(tokens, hidden)
    ids = meta(tokens, routing.top_k, dtype=torch.int32)
    made(x, ids, meta(tokens, routing.top_k, dtype=torch.float32), other)


def launch_all(everything: bool) -> None:
    for tokens in TOKENS:
        launch_experts(QWEN3, 2048, 768, tokens)
        launch_experts(Routing(32, 4), 2880, 2880, tokens, bias=True)
        chosen = moe_plans.choose(tokens, 8, 128, (2048, 768), hopper=True)
        for plans in moe_plans.candidates(chosen, 8, (2048, 768)) if everything else ():
            launch_experts(QWEN3, 2048, 768, tokens, plans)
    for routing in (QWEN3, DEEPSEEK_V2, DEEPSEEK_V3):
        correction = meta(routing.num_experts, dtype=torch.float32)
        for slots in (None, meta(64, dtype=torch.int64)):
            moe_route.route(meta(64, routing.num_experts), routing, correction, slots)


if __name__ == "__main__":
    with recorded() as launches:
        launch_all(sys.argv[1:] == ["all"])
    for launch in launches:
        print(json.dumps(described(launch)), flush=True)
