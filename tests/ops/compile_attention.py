"""Run by test_triton_compile.py in a process of its own: compiles attention's launches for Hopper,
prints JSON."""

from __future__ import annotations

import json

import torch

from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton.attention import TritonPagedAttention
from tests.fixtures.triton_aot import described, recorded
from tests.ops.attention_batches import Columns, Rope

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CASES = [  # geometry, decode rows, tokens of a further row, block size, sinks
    (AttentionGeometry(32, 8, 128), 8, 0, 64, False),
    (AttentionGeometry(32, 8, 128), 64, 8192, 64, False),
    (AttentionGeometry(32, 8, 128, cache_dtype=E4M3), 8, 8192, 64, False),
    (AttentionGeometry(32, 8, 128, cache_dtype=E5M2), 8, 8192, 64, False),
    (AttentionGeometry(32, 8, 128, cache_dtype=torch.int8), 8, 8192, 64, False),
    (AttentionGeometry(16, 8, 128, qk_norm_eps=1e-6), 256, 0, 64, False),
    (AttentionGeometry(64, 8, 64, window=128), 8, 8192, 64, True),
    (AttentionGeometry(8, 8, 80), 8, 100, 16, False),
    (AttentionGeometry(8, 4, 256, window=4096, softcap=50.0), 8, 8192, 64, False),
]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(
    geometry: AttentionGeometry,
    decode: int,
    tokens: int,
    size: int,
    sinks: bool,
    make: type[TritonPagedAttention] = TritonPagedAttention,
) -> None:
    rows, total = decode + (tokens > 0), decode + tokens
    batch = Columns(
        meta(total, dtype=torch.int64),
        meta(total, dtype=torch.int64),
        meta(rows + 1, dtype=torch.int32),
        meta(rows, dtype=torch.int32),
        meta(rows, 8192 // size, dtype=torch.int32),
        size,
        decode,
    )
    attention = make(geometry)
    state = attention.prepare(batch, Rope(geometry.head_dim), BF16)
    heads, dim = geometry.num_heads + geometry.num_kv_heads, geometry.head_dim
    attention(
        meta(total, (heads + geometry.num_kv_heads) * dim),
        meta(*attention.kv_shape(1000, size), dtype=geometry.cache_dtype or BF16),
        state,
        None if geometry.qk_norm_eps is None else meta(heads, dim),
        meta(geometry.num_heads) if sinks else None,
    )


def main() -> None:
    with recorded() as launches:
        for case in CASES:
            launch(*case)
    for one in launches:
        row = described(one) | {
            "rows": one.arguments.get("ROWS"),
            "tma": one.arguments.get("TMA", False),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
