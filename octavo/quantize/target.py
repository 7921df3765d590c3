"""Where quantized weights go: a recipe's checkpoint format, and its rounding to the nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from octavo.ops.float8 import quantize_float8
from octavo.ops.quantized import quantize
from octavo.ops.tables import quantize_table
from octavo.ops.weights import Quantized, TableWeight
from octavo.quant import awq, bitsandbytes, compressed_tensors, fp8, gptq, squeezellm
from octavo.quant.compressed_weights import Int8Stored, Packed
from octavo.quantize.grid import Grid
from octavo.quantize.recipe import Recipe


class Format(Protocol):
    """What is used of a ``CheckpointFormat``."""

    def check(self, out_features: int, in_features: int) -> None: ...

    def write(self, weight: Any) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Target:
    """``config``: of the modules that stay dense, what config.json says. ``files``: older files of
    the same contents that the format's own tools look for. ``round``: to the nearest, of formats
    that are not calibrated. ``grid``: of those that are and have one."""

    format: Format
    config: Callable[[Sequence[str]], Mapping[str, Any]]
    files: tuple[str, ...] = ()
    round: Callable[[Tensor], Quantized] | None = field(default=None)
    grid: Grid | None = None


def target_of(recipe: Recipe) -> Target:
    """``recipe``: checked and fitted."""
    bits, group = recipe.bits or 0, max(recipe.group or 0, 0)
    symmetric = recipe.symmetric is not False
    grid = Grid(bits, group, symmetric, recipe.search)
    if recipe.format == "gptq":
        stored = gptq.GPTQ(bits, group, symmetric)
        order = recipe.act_order
        return Target(
            stored,
            lambda skipped: gptq.config(stored, order, quantizer=["octavo"]),
            ("quantize_config.json",),
            grid=grid,
        )
    if recipe.format == "awq":
        packed = awq.AWQ(group)
        plain = Grid(bits, group, symmetric=False)  # AWQ's clipping is its search
        return Target(packed, lambda skipped: awq.config(packed, skipped), grid=plain)
    if recipe.format == "w4a16":
        words = Packed(bits, group)
        return Target(words, lambda skipped: compressed_tensors.config(words, skipped), grid=grid)
    if recipe.format == "squeezellm":
        tables = squeezellm.SqueezeLLM(bits)
        return Target(
            tables, lambda skipped: squeezellm.config(tables, skipped), ("quant_config.json",)
        )
    if recipe.format.startswith("fp8"):
        return _float8(recipe.format)
    if recipe.format == "int8":
        codes = Int8Stored()
        channel = Grid(8, 0, symmetric=True)
        return Target(
            codes, lambda skipped: compressed_tensors.config(codes, skipped), round=channel.round
        )
    return _bitsandbytes(recipe.format)


def _float8(name: str) -> Target:
    if name == "fp8_per_channel":
        channel = fp8.FP8(name="compressed-tensors")
        return Target(
            channel,
            lambda skipped: compressed_tensors.config(channel, skipped),
            round=lambda weight: quantize_float8(weight, (1, 0)),
        )
    block = (128, 128) if name == "fp8_per_block" else (0, 0)
    stored = fp8.FP8(block, "weight_scale_inv" if block[0] else "weight_scale")
    return Target(
        stored,
        lambda skipped: fp8.config(stored, skipped),
        round=lambda weight: quantize_float8(weight, block),
    )


def _bitsandbytes(name: str) -> Target:
    if name == "bnb_int8":
        eight = bitsandbytes.EightBit()
        return Target(
            eight,
            lambda skipped: bitsandbytes.config(eight, skipped),
            round=lambda weight: quantize(weight, weight.shape[1]),
        )
    four = bitsandbytes.FourBit(name)
    return Target(
        four,
        lambda skipped: bitsandbytes.config(four, skipped),
        round=lambda weight: _in_blocks(weight, bitsandbytes.TABLES[name]),
    )


def _in_blocks(weight: Tensor, table: tuple[float, ...]) -> TableWeight:
    """In bitsandbytes' blocks, which go on from row to row."""
    outputs, inputs = weight.shape
    block = bitsandbytes.BLOCK
    group = bitsandbytes.block_group(block, inputs)
    flat = F.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    found = quantize_table(flat, table, block)
    codes = found.codes.flatten()[: weight.numel()].view(outputs, inputs)
    assert found.scales is not None
    scales = found.scales.flatten().repeat_interleave(block // group)
    scales = scales[: outputs * -(-inputs // group)].view(outputs, -1)
    return TableWeight(codes, found.table, scales.contiguous(), found.bits, group)
