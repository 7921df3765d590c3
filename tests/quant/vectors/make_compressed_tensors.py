"""Writes compressed_tensors.json: what the compressed-tensors package makes of random matrices, and
what it takes it for. Needs the package, which octavo does not; run by hand:

    python -m tests.quant.vectors.make_compressed_tensors
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.quant.stored import encoded

OUTPUTS, INPUTS = 16, 32
PACKED = [
    {"num_bits": bits, "symmetric": symmetric, **strategy}
    for bits in (4, 8)
    for symmetric in (True, False)
    for strategy in ({"strategy": "group", "group_size": 16}, {"strategy": "channel"})
]
PLAIN = [
    {"type": "int", "strategy": "channel"},
    {"type": "int", "strategy": "channel", "symmetric": False},
    {"type": "float", "strategy": "channel"},
    {"type": "float", "strategy": "tensor"},
    {"type": "float", "strategy": "block", "block_structure": [4, 16]},
]


def scales_of(arguments: QuantizationArgs) -> tuple[int, ...]:
    strategy = arguments.strategy
    if strategy == "group":
        return OUTPUTS, INPUTS // arguments.group_size
    if strategy == "block":
        rows, columns = arguments.block_structure
        return OUTPUTS // rows, INPUTS // columns
    return (OUTPUTS, 1) if strategy == "channel" else (1,)


def case(compressor: Any, values: dict[str, Any]) -> dict[str, Any]:
    arguments = QuantizationArgs(**values)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    shape = scales_of(arguments)
    state = {
        "weight": torch.randn(OUTPUTS, INPUTS),
        "weight_scale": torch.rand(shape).mul(0.05).add(0.02).half().float(),
    }
    if not arguments.symmetric:
        middle = 1 << (arguments.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-middle, middle, shape, dtype=torch.int8)
    stored = compressor.compress(state, scheme)
    return {
        "weights": values,
        "tensors": {name: encoded(tensor) for name, tensor in stored.items()},
        "dense": encoded(compressor.decompress(stored, scheme)["weight"].float()),
    }


def main() -> None:
    torch.manual_seed(0)
    found = {
        "compressed-tensors": compressed_tensors.__version__,
        "pack-quantized": [case(PackedQuantizationCompressor, values) for values in PACKED],
        "naive-quantized": [case(NaiveQuantizationCompressor, values) for values in PLAIN],
    }
    path = Path(__file__).with_name("compressed_tensors.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
