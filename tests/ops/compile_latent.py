"""Run by test_triton_compile.py in a process of its own: compiles the launches of latent attention
for Hopper, prints JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch
from torch import Tensor

from octavo.ops.mla import MLAGeometry
from octavo.ops.triton.latent_attention import TritonPagedLatentAttention
from tests.fixtures.triton_aot import compile_launch, recorded
from tests.ops.attention_batches import Columns

CASES = [  # query heads, block size, decode rows, (other rows, their tokens), context
    (128, 64, 1, (1, 500), 8192),
    (128, 16, 64, (0, 0), 8192),
    (16, 64, 8, (2, 4), 8192),
    (16, 16, 8, (0, 0), 1024),
]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


class Rope:
    max_position = 8192

    def table(self, length: int, device: torch.device) -> Tensor:
        return meta(length, 64, dtype=torch.float32)


def step(
    heads: int, block_size: int, decode: int, others: tuple[int, int], context: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    geometry = MLAGeometry(heads, 512, 64, 128, 128, 192**-0.5, interleaved=True)
    rows, tokens = decode + others[0], decode + others[1]
    batch = Columns(
        meta(tokens, dtype=torch.int64),
        meta(tokens, dtype=torch.int64),
        meta(rows + 1, dtype=torch.int32),
        meta(rows, dtype=torch.int32),
        meta(rows, context // block_size, dtype=torch.int32),
        block_size,
        decode,
    )
    attention = TritonPagedLatentAttention(geometry)
    attention(
        meta(tokens, heads, 192, dtype=dtype),
        meta(tokens, 576, dtype=dtype),
        meta(*attention.kv_shape(9, block_size), dtype=dtype),
        attention.prepare(batch, Rope(), dtype),
        meta(heads, 128, 512, dtype=dtype),
        meta(heads, 512, 128, dtype=dtype),
    )


def main() -> None:
    with recorded() as launches:
        for case in CASES:
            step(*case, torch.bfloat16)
        step(128, 64, 64, (0, 0), 8192, torch.float16)
    seen = []
    for launch in launches:
        fixed = {
            parameter.name: launch.arguments[parameter.name]
            for parameter in launch.kernel.params
            if parameter.is_constexpr
        }
        dtype = launch.arguments["mixed_ptr"].dtype
        variant = (launch.kernel.__name__, launch.options, fixed, dtype)
        if variant in seen:
            continue
        seen.append(variant)
        compiled = compile_launch(launch)
        row = asdict(replace(compiled, ptx="")) | {
            "wgmma": compiled.ptx.count("wgmma.mma_async"),
            "mma": compiled.ptx.count("mma.sync"),
            "wide_copies": compiled.ptx.count("cp.async.cg"),
            "fixed": fixed,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
