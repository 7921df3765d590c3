"""Weights of 16 bits that are rounded while loading, layer by layer: to what, and what they take.

Never imports torch at module level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from octavo.quant import bitsandbytes

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import Quantized
    from octavo.quant.multiply import LinearVersions

GROUP = 64  # inputs with a scale of their own; docs/cpu.md has the figures of others
BLOCK = 128  # of FP8 per block, as DeepSeek-V3's checkpoints have them


@dataclass(frozen=True)
class Rounding:
    """``name``: as in ``--quantization``. ``round``: of a weight [out, in] by the versions chosen.
    ``bits``: of a weight; ``scale_bytes``: of all scales of a matrix [out, in]. ``meaning``: in a
    few words. ``head``: whether the output head is rounded as well."""

    name: str
    meaning: str
    bits: int
    scale_bytes: Callable[[int, int], int]
    round: Callable[[Tensor, LinearVersions], Quantized]
    head: bool = False

    def bytes_of(self, out_features: int, in_features: int) -> int:
        packed = out_features * in_features * self.bits // 8
        return packed + self.scale_bytes(out_features, in_features)


def _by_channel(rows: int, size: int) -> int:
    return 4 * rows


def _by_group(group: int) -> Callable[[int, int], int]:
    return lambda rows, size: 4 * rows * ceil(size / group)


def _float8(block: tuple[int, int]) -> Callable[[Tensor, LinearVersions], Any]:
    return lambda weight, versions: versions["quantize_float8"](weight, block)


def _int8(group: int, weight_only: bool) -> Callable[[Tensor, LinearVersions], Any]:
    """``group`` 0: all inputs."""

    def round_to(weight: Tensor, versions: LinearVersions) -> Quantized:
        from dataclasses import replace

        size = group or ceil(weight.shape[1] / 4) * 4
        found: Quantized = replace(versions["quantize"](weight, size), weight_only=weight_only)
        return found

    return round_to


def _nf4(weight: Tensor, versions: LinearVersions) -> Any:
    return versions["quantize_table"](weight, bitsandbytes.TABLES["nf4"], bitsandbytes.BLOCK)


def roundings(device: str) -> dict[str, Rounding]:
    """By the names of ``--quantization``, on "cpu" or "cuda"."""
    on_cpu = device == "cpu"
    group = GROUP if on_cpu else 0
    found = (
        Rounding(
            "int8",
            "weights and inputs in 8 bits",
            8,
            _by_group(GROUP) if on_cpu else _by_channel,
            _int8(group, weight_only=False),
            head=on_cpu,
        ),
        Rounding(
            "int8_weight_only",
            "weights in 8 bits, inputs as they are",
            8,
            _by_group(GROUP),
            _int8(GROUP, weight_only=True),
            head=on_cpu,
        ),
        Rounding(
            "fp8",
            "E4M3 by output channel, inputs by token",
            8,
            _by_channel,
            _float8((1, 0)),
        ),
        Rounding(
            "fp8_per_channel",
            "E4M3 by output channel, inputs by token",
            8,
            _by_channel,
            _float8((1, 0)),
        ),
        Rounding(
            "fp8_per_tensor",
            "E4M3 by matrix, inputs by token",
            8,
            _by_channel,
            _float8((0, 0)),
        ),
        Rounding(
            "fp8_per_block",
            f"E4M3 by blocks of {BLOCK} x {BLOCK}, inputs by token and {BLOCK}",
            8,
            lambda rows, size: 4 * ceil(rows / BLOCK) * ceil(size / BLOCK),
            _float8((BLOCK, BLOCK)),
        ),
        Rounding(
            "bitsandbytes",
            f"NF4 in groups of {bitsandbytes.BLOCK}",
            4,
            _by_group(bitsandbytes.BLOCK),
            _nf4,
        ),
        Rounding(
            "bitsandbytes_int8",
            "LLM.int8: 8 bits by output channel, inputs as they are",
            8,
            _by_channel,
            _int8(0, weight_only=True),
        ),
    )
    return {rounding.name: rounding for rounding in found}
