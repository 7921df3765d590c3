"""A dense checkpoint in every format that quantizes, with a dense one of the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.ops.weights import Quantized, QuantizedWeight
from octavo.quant import awq, gptq


@dataclass(frozen=True)
class Kind:
    """``round``: a weight of the kind that the format holds, near a dense one. ``format`` writes
    it; ``config``: of the whole checkpoint."""

    format: Any
    round: Callable[[Tensor], Quantized]
    config: Mapping[str, Any]


def on_grid(bits: int, group: int, symmetric: bool, order: bool = False) -> Callable[..., Any]:
    """Rounds to the nearest code; scales in FP16. ``order``: inputs in another order."""

    def round_to(weight: Tensor) -> QuantizedWeight:
        outputs, inputs = weight.shape
        size, top = group or inputs, (1 << bits) - 1
        places = None
        if order:
            places = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
            weight = weight[:, places]
        grouped = weight.float().view(outputs, -1, size)
        if symmetric:
            middle = 1 << (bits - 1)
            scales = (grouped.abs().amax(-1) / max(middle - 1, 1)).half()
            zeros = torch.full_like(scales, middle)
        else:
            low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
            scales = ((high - low) / top).half()
            zeros = (-low / scales.float()).round().clamp(1, top)
        codes = (grouped / scales.float()[..., None] + zeros.float()[..., None]).round()
        codes = codes.clamp(0, top).to(torch.uint8).view(outputs, inputs)
        if symmetric:
            return QuantizedWeight(codes, scales, None, bits, size, middle, order=places)
        zeros = zeros.to(torch.uint8)
        return QuantizedWeight(codes, scales, None, bits, size, 0, zeros, places)

    return round_to


def of_gptq(bits: int, group: int, symmetric: bool, order: bool = False, version: str = "gptq"):
    found = gptq.GPTQ(bits, group, symmetric, version)
    return Kind(found, on_grid(bits, group, symmetric, order), gptq.config(found, order))


def of_awq(group: int, symmetric: bool = False) -> Kind:
    found = awq.AWQ(group)
    return Kind(found, on_grid(4, group, symmetric), awq.config(found))


KINDS = {
    **{f"gptq {bits} bits": of_gptq(bits, 32, False) for bits in (2, 3, 4, 8)},
    "gptq symmetric": of_gptq(4, 32, True),
    "gptq, one group": of_gptq(4, 0, True),
    "gptq act-order": of_gptq(4, 32, False, order=True),
    "gptq v2": of_gptq(4, 32, False, version="gptq_v2"),
    "awq": of_awq(32),
    "awq, one group": of_awq(0, True),
}


def in_format(directory: Path, kind: Kind, to: Path) -> tuple[Path, Path]:
    """The checkpoint in ``directory`` in that format, and a dense one of the same numbers. What
    ends in ``_proj`` is quantized, and experts."""
    tensors = load_file(directory / "model.safetensors")
    packed, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not (module.endswith("_proj") or ".experts." in module) or tensor.dim() != 2:
            continue
        weight = kind.round(tensor)
        del packed[name]
        for suffix, stored in kind.format.write(weight).items():
            packed[f"{module}.{suffix}"] = stored.contiguous()
        dense[name] = weight.dense()
    for path, found, extra in (
        (to / "quantized", packed, {"quantization_config": kind.config}),
        (to / "dense", dense, {}),
    ):
        shutil.copytree(directory, path, dirs_exist_ok=True)
        save_file(found, path / "model.safetensors", {"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **extra}))
    return to / "quantized", to / "dense"
