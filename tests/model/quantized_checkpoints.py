"""A dense checkpoint in every format that quantizes, with a dense one of the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.ops.float8 import quantize_float8
from octavo.ops.tables import quantize_table
from octavo.ops.weights import Float8Weight, Outliers, Quantized, QuantizedWeight, TableWeight
from octavo.quant import awq, bitsandbytes, compressed_tensors, fp8, gptq, squeezellm
from octavo.quant.compressed_weights import Int8Stored, Packed


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


def of_fp8(block: tuple[int, int], static: bool = False, e5m2: bool = False) -> Kind:
    suffix = "weight_scale_inv" if block[0] > 1 else "weight_scale"
    found = fp8.FP8(block if block[0] > 1 else (0, 0), suffix, static)

    def round_to(weight: Tensor) -> Float8Weight:
        rounded = quantize_float8(weight, block)
        if e5m2:
            kind = torch.float8_e5m2
            rounded = replace(rounded, values=rounded.values.float().to(kind))
        scale = torch.tensor(0.02) if static else None
        return replace(rounded, input_scale=scale)

    return Kind(found, round_to, fp8.config(found))


def of_compressed(found: Packed | Int8Stored | fp8.FP8, round_to: Callable[..., Any]) -> Kind:
    return Kind(found, round_to, compressed_tensors.config(found))


def of_bitsandbytes(kind: str) -> Kind:
    found = bitsandbytes.FourBit(kind)

    def round_to(weight: Tensor) -> TableWeight:
        group = bitsandbytes.block_group(bitsandbytes.BLOCK, weight.shape[1])
        flat = weight.reshape(-1, bitsandbytes.BLOCK)
        rounded = quantize_table(flat, bitsandbytes.TABLES[kind], bitsandbytes.BLOCK)
        scales = rounded.scales.repeat_interleave(bitsandbytes.BLOCK // group, dim=1)
        codes = rounded.codes.view(weight.shape)
        return TableWeight(codes, rounded.table, scales.view(len(weight), -1), 4, group)

    return Kind(found, round_to, bitsandbytes.config(found))


def in_127ths(weight: Tensor) -> QuantizedWeight:
    """LLM.int8 keeps the largest magnitude of each output."""
    largest = weight.abs().amax(1, keepdim=True)
    scales = largest / torch.tensor(127.0)
    codes = ((weight / scales).round() + 128).to(torch.uint8)
    return QuantizedWeight(codes, scales, None, 8, weight.shape[1], 128)


def of_squeezellm(bits: int, share: float) -> Kind:
    """Tables of evenly spread quantiles; ``share`` of the largest numbers stands apart."""
    found = squeezellm.SqueezeLLM(bits)

    def round_to(weight: Tensor) -> TableWeight:
        marks = (torch.arange(1 << bits) + 0.5) / (1 << bits)
        table = weight.quantile(marks, dim=1).T.contiguous()
        apart = weight.abs() >= weight.abs().quantile(1 - share) if share else None
        codes = (weight[:, :, None] - table[:, None]).abs().argmin(-1)
        outliers = None
        if apart is not None:
            left = torch.where(apart, weight - table.gather(1, codes), 0)
            rows, columns = apart.nonzero(as_tuple=True)
            starts = torch.cat((rows.new_zeros(1), apart.sum(1).cumsum(0))).int()
            outliers = Outliers(starts, columns.int(), left[rows, columns])
        return TableWeight(codes.to(torch.uint8), table, None, bits, outliers=outliers)

    return Kind(found, round_to, squeezellm.config(found))


KINDS = {
    **{f"gptq {bits} bits": of_gptq(bits, 32, False) for bits in (2, 3, 4, 8)},
    "gptq symmetric": of_gptq(4, 32, True),
    "gptq, one group": of_gptq(4, 0, True),
    "gptq act-order": of_gptq(4, 32, False, order=True),
    "gptq v2": of_gptq(4, 32, False, version="gptq_v2"),
    "awq": of_awq(32),
    "awq, one group": of_awq(0, True),
    "fp8 by tensor": of_fp8((0, 0)),
    "fp8 by channel": of_fp8((1, 0)),
    "fp8 by block": of_fp8((128, 128)),
    "fp8 static": of_fp8((0, 0), static=True),
    "fp8 e5m2": of_fp8((1, 0), e5m2=True),
    "w8a8 fp8": of_compressed(fp8.FP8(name="compressed-tensors"), of_fp8((1, 0)).round),
    "w4a16": of_compressed(Packed(4, 32), on_grid(4, 32, True)),
    "w4a16 asymmetric": of_compressed(Packed(4, 32, False), on_grid(4, 32, False)),
    "w8a8 int8": of_compressed(Int8Stored(), on_grid(8, 0, True)),
    "nf4": of_bitsandbytes("nf4"),
    "fp4": of_bitsandbytes("fp4"),
    "llm.int8": Kind(
        bitsandbytes.EightBit(), in_127ths, bitsandbytes.config(bitsandbytes.EightBit())
    ),
    "squeezellm 3 bits": of_squeezellm(3, 0.0),
    "squeezellm 4 bits, sparse": of_squeezellm(4, 0.005),
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
