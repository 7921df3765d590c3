"""Linears on FP8 weights and inputs rounded to FP8: the definition, and rounding weights.

Formats: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2).
https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.linear import Epilogue, finished
from octavo.ops.registry import register
from octavo.ops.weights import Float8Weight

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
# Scales of zeros only: what is divided by them stays 0.
LEAST_SCALE = 1.0 / (LARGEST * 512.0)


def rounded(x: Tensor, scale: Tensor | None, group: int = 0) -> tuple[Tensor, Tensor]:
    """x: [T, in]. x times 1 / scale, rounded to E4M3 (to the nearest, ties to even, what is too
    large to +-448), and the scales, FP32 [T, groups]. ``scale``: FP32 [], for all; None: of each
    token, or of each of its ``group`` inputs if that is not 0, its largest magnitude / 448."""
    tokens, size = x.shape
    group = group or size
    wide = F.pad(x.float(), (0, -size % group)).view(tokens, -1, group)
    if scale is None:
        scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min(LEAST_SCALE)
    else:
        scales = scale.float().expand(tokens, wide.shape[1], 1)
    values = (wide * (1.0 / scales)).clamp(-LARGEST, LARGEST).to(E4M3)
    whole = values.view(torch.uint8).flatten(1)[:, :size].contiguous().view(E4M3)
    return whole, scales[..., 0]


@register("float8_linear", "torch")
class TorchFloat8Linear:
    """The definition: weights stay FP8, products are formed in FP32 from what they stand for."""

    def __init__(
        self,
        weights: Sequence[Float8Weight],
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        """weights: none of them ``weight_only``; their rows follow one another; with ``silu_mul``
        the gate's, then the up projection's. bias: [sum out_i]. dtype: of x and y; ``logits`` are
        in FP32."""
        self._weights, self._bias = list(weights), bias
        self._epilogue, self._dtype = epilogue, dtype

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """As ``linear`` (ops/linear.py), in x's dtype."""
        y = torch.cat([_product(x, weight) for weight in self._weights], dim=1)
        return finished(y, self._bias, self._epilogue, other, self._dtype)


def _product(x: Tensor, weight: Float8Weight) -> Tensor:
    group = weight.block[1]
    values, scales = rounded(x, weight.input_scale, group if group > 1 else 0)
    per_input = scales.repeat_interleave(group or x.shape[1], dim=1)[:, : x.shape[1]]
    return (values.float() * per_input) @ weight.dense().T


@register("quantize_float8", "torch", batch_invariant="yes")
def quantize_float8(weight: Tensor, block: tuple[int, int]) -> Float8Weight:
    """weight: [out, in]; ``block``: see ``Float8Weight``. E4M3, scales max |weight| / 448 of each
    block, to the nearest."""
    rows, size = weight.shape
    span, group = block[0] or rows, block[1] or size
    padded = F.pad(weight.float(), (0, -size % group, 0, -rows % span))
    blocks = padded.view(padded.shape[0] // span, span, padded.shape[1] // group, group)
    scales = (blocks.abs().amax(dim=(1, 3)) / LARGEST).clamp_min(LEAST_SCALE)
    blocks = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST)
    values = blocks.view(padded.shape)[:rows, :size].to(E4M3)
    return Float8Weight(values.contiguous(), scales, block)
