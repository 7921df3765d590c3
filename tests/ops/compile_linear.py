"""Run by test_triton_compile.py in a process of its own: compiles launches for Hopper, prints JSON.

Arguments: nothing for a choice of shapes, ``all`` for every plan of the shipped table too.
"""

from __future__ import annotations

import json
import sys

import torch

from octavo.ops.triton import blocks, embedding, linear, norm
from octavo.ops.triton.plans import BUCKETS, Shape, shipped_table
from tests.fixtures.triton_aot import described, recorded

CHOICE = [  # odd n, k of half tiles, every epilogue
    Shape(963, 584, "none"),
    Shape(576, 1536, "add"),
    Shape(3072, 576, "silu_mul"),
    Shape(49152, 576, "logits"),
]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_linear(shape: Shape, buckets: tuple[int, ...], bias: bool) -> None:
    weight = meta(shape.n, shape.k)
    made = linear.TritonLinear([weight], meta(shape.n) if bias else None, shape.epilogue)
    for bucket in buckets:
        if made.plans[bucket].kind != "cublas":
            other = meta(bucket, shape.n) if shape.epilogue == "add" else None
            made(meta(bucket, shape.k), other)


def main(everything: bool) -> None:
    blocks._addresses = lambda device, *pointers: meta(len(pointers), dtype=torch.int64)
    with recorded() as launches:
        for shape in CHOICE:
            launch_linear(shape, BUCKETS if everything else (1, 16), bias=True)
        for shape in sorted({shape for shape, _ in shipped_table()}, key=str) * everything:
            launch_linear(shape, BUCKETS, bias=False)
        for rows, size in ((1, 576), (64, 4096), (100, 16384)):
            norm.rms_norm(meta(rows, size), meta(size), 1e-5)
            embedding.embedding(meta(rows, dtype=torch.int64), meta(1000, size))
            linear.silu_mul(meta(rows, 2 * size))
        blocks.copy_blocks([meta(9, 8, 2, 64, 128)], meta(4, 2, dtype=torch.int64))
    for launch in launches:
        print(json.dumps(described(launch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["all"])
