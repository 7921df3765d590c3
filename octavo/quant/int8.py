"""INT8 at load: dense weights rounded to 8 bits per output channel, inputs per token (W8A8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.quant.format import BIAS, WEIGHT, LinearVersions, StoredTensor, joined_bias

if TYPE_CHECKING:
    import torch


class Int8:
    name = "int8"

    def tensors(self, bias: bool) -> tuple[StoredTensor, ...]:
        return (WEIGHT, BIAS) if bias else (WEIGHT,)

    def finish(
        self,
        parts: Sequence[Mapping[str, Any]],
        epilogue: str,
        versions: LinearVersions,
    ) -> Callable[..., torch.Tensor]:
        from octavo.ops.quantized import quantize_channels

        weights = [quantize_channels(part["weight"]) for part in parts]
        apply: Callable[..., torch.Tensor] = versions.quantized(
            weights, joined_bias(parts), epilogue, versions.dtype
        )
        return apply
