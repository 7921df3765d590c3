"""Writes bitsandbytes.json: what bitsandbytes' CPU functions make of random matrices, and what they
take it for. Needs bitsandbytes, which octavo does not; run by hand:

    python -m tests.quant.vectors.make_bitsandbytes
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional

from tests.quant.stored import encoded

SHAPES = (((4, 64), 64), ((3, 36), 64), ((2, 128), 128), ((5, 9), 64))  # and blocks


def four_bit(kind: str, nested: bool, shape: tuple[int, int], block: int) -> dict[str, Any]:
    codes, state = functional.quantize_4bit(
        torch.randn(shape) * 0.1, blocksize=block, compress_statistics=nested, quant_type=kind
    )
    tensors = {"weight": codes}
    tensors |= {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {
        "kind": kind,
        "nested": nested,
        "tensors": {name: encoded(tensor) for name, tensor in tensors.items()},
        "dense": encoded(functional.dequantize_4bit(codes, state)),
    }


def main() -> None:
    torch.manual_seed(0)
    four = [
        four_bit(kind, nested, shape, block)
        for kind in ("nf4", "fp4")
        for nested in (False, True)
        for shape, block in SHAPES
    ]
    codes, largest, _ = functional.int8_vectorwise_quant((torch.randn(5, 32) * 0.1).half())
    eight = {
        "tensors": {"weight": encoded(codes), "SCB": encoded(largest)},
        "dense": encoded(functional.int8_vectorwise_dequant(codes, largest)),
    }
    found = {"bitsandbytes": bitsandbytes.__version__, "four_bit": four, "eight_bit": eight}
    path = Path(__file__).with_name("bitsandbytes.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
