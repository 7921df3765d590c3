"""Times quantized experts of Qwen3-30B-A3B's shape: microseconds a layer, share of bandwidth.

python -m benchmarks.gpu.moe_quantized
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.tune_quantized import timed, weight_of
from octavo.ops.triton.moe_packed import PackedExperts, plan_of
from octavo.ops.triton.packed_plans import PackedPlan

COUNT, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
BANDWIDTH = 4.3e6  # bytes a microsecond
TOKENS = (1, 8, 64, 512, 4096)


@torch.inference_mode()
def main() -> None:
    for kind in ("int4", "float8", "float8-block"):
        gate_up = [weight_of(kind, 2 * INNER, HIDDEN) for _ in range(COUNT)]
        down = [weight_of(kind, HIDDEN, INNER) for _ in range(COUNT)]
        made = PackedExperts(gate_up, down)
        stacks = (made.gate_up.packed, made.down.packed)
        size = sum(t.nbytes for stack in stacks for t in stack.tensors().values()) / COUNT
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            ids = [torch.rand(tokens, COUNT, device="cuda").topk(TOP_K)[1].int() for _ in range(8)]
            weights = torch.rand(tokens, TOP_K, device="cuda")
            used = sum(len(one.unique()) for one in ids) / len(ids)
            for plan in (None, *others(tokens)):
                made.plan = plan
                us = timed([partial(made, x, one, weights) for one in ids])
                share = used * size / BANDWIDTH / us
                print(f"{kind:12} {tokens:5} tokens {us:8.1f} us, {share:.0%} of bandwidth; {plan}")


def others(tokens: int) -> list[PackedPlan]:
    if tokens > 64:
        return [PackedPlan("skinny", 128, 128, 8, 2), PackedPlan("skinny", 64, 64, 4, 3)]
    base = plan_of(16)
    forms = ((64, 128, 4, 4, True), (64, 256, 4, 3, True), (32, 128, 4, 4, False))
    return [
        PackedPlan(base.kind, block_n, block_k, warps, stages, 1, swap)
        for block_n, block_k, warps, stages, swap in forms
    ]


if __name__ == "__main__":
    main()
