"""Weights as they are: FP32, BF16 or FP16. GGUF types are dequantized into this while loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.quant.format import StoredTensor

if TYPE_CHECKING:
    import torch

_WEIGHT = StoredTensor("weight", (("out", 1), ("in", 1)))
_BIAS = StoredTensor("bias", (("out", 1),))


class Dense:
    name = "dense"

    def tensors(self, bias: bool) -> tuple[StoredTensor, ...]:
        return (_WEIGHT, _BIAS) if bias else (_WEIGHT,)

    def finish(
        self,
        parts: Sequence[Mapping[str, torch.Tensor]],
        epilogue: str,
        linear: Callable[..., Any],
    ) -> Callable[..., torch.Tensor]:
        import torch

        biases = [part["bias"] for part in parts if "bias" in part]
        weights = [part["weight"] for part in parts]
        apply: Callable[..., torch.Tensor] = linear(
            weights, torch.cat(biases) if biases else None, epilogue
        )
        return apply
