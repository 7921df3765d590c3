"""Weights as the checkpoint holds them: FP32, BF16 or FP16, or a GGUF file's groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.quant.format import LinearVersions, StoredTensor, joined_bias, weight_and_bias

if TYPE_CHECKING:
    import torch


class Dense:
    name = "dense"

    def tensors(self, bias: bool) -> tuple[StoredTensor, ...]:
        return weight_and_bias(bias)

    def finish(
        self,
        parts: Sequence[Mapping[str, Any]],
        epilogue: str,
        versions: LinearVersions,
    ) -> Callable[..., torch.Tensor]:
        """Quantized weights that are fused with dense ones are expanded."""
        from octavo.ops.weights import QuantizedWeight

        weights, bias = [part["weight"] for part in parts], joined_bias(parts)
        grouped = [isinstance(weight, QuantizedWeight) for weight in weights]
        apply: Callable[..., torch.Tensor]
        if all(grouped):
            apply = versions.quantized(weights, bias, epilogue, versions.dtype)
        else:
            dense = [
                weight.dense().to(versions.dtype) if is_grouped else weight
                for weight, is_grouped in zip(weights, grouped)
            ]
            apply = versions.dense(dense, bias, epilogue)
        return apply
