"""FP8 checkpoints: E4M3 or E5M2 weights with scales (AutoFP8, DeepSeek, Qwen, llm-compressor).

Scales are of the whole matrix, of each output, of each of the projections that the checkpoint holds
as one, or of blocks (DeepSeek-V3, https://arxiv.org/abs/2412.19437). A weight is value * scale,
though the name ``weight_scale_inv`` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.quant.fields import Fields, named_by
from octavo.quant.format import FLOATS, CheckpointFormat, Scheme, StoredTensor, numbers
from octavo.quant.grid import LARGEST_GROUP, check_finite

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import Float8Weight

SCHEMES = ("dynamic", "static")
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class FP8:
    """``block``: outputs and inputs that share a scale; (0, 0): the number of scales tells.
    ``scale``: their suffix. ``static``: inputs are rounded by a stored scale. ``weight_only``: they
    are not rounded at all."""

    block: tuple[int, int] = (0, 0)
    scale: str = "weight_scale"
    static: bool = False
    weight_only: bool = False
    name: str = "fp8"

    def tensors(self) -> tuple[StoredTensor, ...]:
        kinds = (*FLOATS, "F8_E8M0")
        if self.block[0]:
            scales = StoredTensor(
                self.scale, (("out", self.block[0]), ("in", self.block[1])), kinds=kinds
            )
        else:
            scales = numbers(self.scale, (("out", 1), ("one", 1)), kinds=kinds)
        return (
            scales,
            StoredTensor("weight", (("out", 1), ("in", 1)), kinds=("F8_E4M3", "F8_E5M2")),
            numbers("input_scale", optional=not self.static),
        )

    def check(self, out_features: int, in_features: int) -> None:
        """Holds any; blocks at the edges may be smaller."""

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> Float8Weight:
        from octavo.ops.weights import Float8Weight

        scales = tensors[self.scale].float()
        check_finite(scales, self.scale)
        weight = tensors["weight"].contiguous()
        _check_numbers(weight)
        block = self.block
        if not block[0]:
            scales = self._by_output(scales.flatten(), out_features, parts)
            block = (1 if len(scales) > 1 else 0, 0)
        input_scale = None
        if self.static:
            input_scale = self._input_scale(tensors["input_scale"], parts)
        return Float8Weight(weight, scales, block, input_scale, self.weight_only)

    def _by_output(self, scales: Tensor, outputs: int, parts: Sequence[int]) -> Tensor:
        """FP32 [1, 1], or [out, 1]."""
        import torch

        if len(scales) == len(parts) > 1:
            scales = scales.repeat_interleave(torch.tensor(parts, device=scales.device))
        if len(scales) not in (1, outputs):
            among = f", {len(parts)}" if len(parts) > 1 else ""
            raise ValueError(f"{self.scale} has {len(scales)} numbers, not 1{among} or {outputs}")
        return scales[:, None].contiguous()

    def _input_scale(self, stored: Tensor, parts: Sequence[int]) -> Tensor:
        """FP32 []. Projections of one input share a scale for it: the largest, which clips none."""
        scales = stored.float().flatten()
        if len(scales) not in (1, len(parts) or 1):
            raise ValueError(f"input_scale has {len(scales)} numbers for {len(parts) or 1}")
        check_finite(scales, "input_scale")
        if not bool((scales > 0).all()):
            raise ValueError(f"input_scale is {float(scales.min()):g}, which divides nothing")
        return scales.max()

    def bytes_of(self, out_features: int, in_features: int) -> int:
        rows, columns = self.block
        scales = -(-out_features // rows) * -(-in_features // columns) if rows else out_features
        return out_features * in_features + 4 * scales

    def write(self, weight: Float8Weight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight with other blocks or without the
        input scale that the format needs."""
        if weight.block != self.block and (self.block[0] or weight.block not in ((0, 0), (1, 0))):
            raise ValueError(f"scales of blocks {weight.block}, not {self.block}")
        scales = weight.scales
        tensors = {
            "weight": weight.values,
            self.scale: scales.flatten() if weight.block == (0, 0) else scales,
        }
        if self.static:
            if weight.input_scale is None:
                raise ValueError("a static scheme needs a scale of the inputs")
            tensors["input_scale"] = weight.input_scale.reshape(1)
        return tensors


def _check_numbers(weight: Tensor) -> None:
    """Raises ValueError for infinities (of E5M2) and what is no number, which spoil all logits."""
    import torch

    magnitudes = weight.view(torch.uint8) & 127
    least = 127 if weight.dtype == torch.float8_e4m3fn else 124
    count = int((magnitudes >= least).sum())
    if count:
        raise ValueError(f"weight holds {count:,} numbers that are not finite")


def config(format: FP8, skipped: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``skipped``: modules that are dense."""
    values: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if format.static else "dynamic",
        "ignored_layers": list(skipped),
    }
    return values | ({"weight_block_size": list(format.block)} if format.block[0] else {})


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    activations = fields.choice("activation_scheme", allowed=SCHEMES, default="dynamic")
    block = block_size(fields, "weight_block_size")
    if block[0] and activations == "static":
        raise fields.error("activation_scheme", activations, "dynamic, with weight_block_size")
    scale = "weight_scale_inv" if block[0] else "weight_scale"
    format = FP8(block, scale, activations == "static")
    names = ("ignored_layers", "modules_to_not_convert")
    is_skipped = named_by([one for name in names for one in fields.names(name)], fields, names[0])

    def format_of(module: str) -> CheckpointFormat | None:
        return None if is_skipped(module) else format

    return Scheme("fp8", format_of)


def block_size(fields: Fields, name: str) -> tuple[int, int]:
    """[outputs, inputs] of a block, also as "128x128"; (0, 0) where it says nothing."""
    value = fields.values.get(name)
    if value is None:
        return 0, 0
    sizes = value
    if isinstance(value, str):
        sizes = [int(size) if _NUMBER.fullmatch(size) else 0 for size in value.split("x")]
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= LARGEST_GROUP for size in sizes):
        raise fields.error(name, value, f"two numbers up to {LARGEST_GROUP:,}, as [128, 128]")
    return sizes[0], sizes[1]
