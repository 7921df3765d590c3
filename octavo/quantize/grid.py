"""Even grids: the scale and zero of each group of weights, and rounding to them.

A weight becomes (code - zero) * scale. Scales are numbers of FP16, as checkpoints store them,
before anything is rounded by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.weights import QuantizedWeight

# Candidates of a search: shares of the range that are kept. What lies beyond is clipped.
_SHARES = torch.linspace(1.0, 0.5, 26)
_NORM = 2.4  # of the error that the search makes small: GPTQ's, which minds large errors more
_LEAST_SCALE = 2.0**-24  # of FP16


@dataclass(frozen=True)
class Grid:
    """``bits``: of a code. ``group``: inputs that share a scale and a zero; 0: all. ``symmetric``:
    zeros are 2^(bits - 1), else each group has its own, at least 1 (older readers of GPTQ cannot
    tell a zero of 0). ``search``: ranges are shrunk where that makes the error smaller, else they
    reach from the smallest weight to the largest."""

    bits: int
    group: int
    symmetric: bool
    search: bool = False

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1

    def fit(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights: [n, g], a group a row. Scales and zeros, of its dtype, [n, 1] each."""
        low, high = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
        if not self.search:
            return self._between(low, high)
        best = torch.full_like(low, torch.inf)
        scale, zero = torch.ones_like(low), torch.zeros_like(low)
        for share in _SHARES.tolist():
            candidate = self._between(low * share, high * share)
            error = (self.rounded(weights, *candidate) - weights).abs_().pow_(_NORM)
            total = error.sum(1, keepdim=True)
            better = total < best
            best = torch.where(better, total, best)
            scale = torch.where(better, candidate[0], scale)
            zero = torch.where(better, candidate[1], zero)
        return scale, zero

    def _between(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """0 is always one of the grid's numbers."""
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.symmetric:
            half = torch.maximum(-low, high)
            zero = torch.full_like(low, (self.highest + 1) // 2)
            return _half(2 * half / self.highest), zero
        scale = _half((high - low) / self.highest)
        zero = (-low / scale).round().clamp(1, self.highest)
        alone = low == 0  # a zero of 1 takes one code of the others
        return torch.where(alone, _half(high / (self.highest - 1)), scale), zero

    def codes(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest codes, ties to even, in the dtype of ``weights``."""
        return ((weights / scale).round_() + zero).clamp_(0, self.highest)

    def rounded(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (self.codes(weights, scale, zero) - zero) * scale

    def pack(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None
    ) -> QuantizedWeight:
        """codes: [out, in]; scales, zeros: [out, groups]; order: see ``QuantizedWeight``."""
        own = None if self.symmetric else zeros.to(torch.uint8)
        return QuantizedWeight(
            codes.to(torch.uint8),
            scales.half(),
            None,
            self.bits,
            self.group or codes.shape[1],
            (self.highest + 1) // 2 if self.symmetric else 0,
            own,
            order,
        )

    def round(self, weight: Tensor) -> QuantizedWeight:
        """To the nearest: weight [out, in], whose groups are whole."""
        wide, group = weight.float(), self.group or weight.shape[1]
        rows = wide.view(-1, group)
        scale, zero = self.fit(rows)
        codes = self.codes(rows, scale, zero).view(wide.shape)
        count = wide.shape[1] // group
        return self.pack(codes, scale.view(-1, count), zero.view(-1, count))


def _half(scale: Tensor) -> Tensor:
    """Rounded to FP16; of a group of zeros 1."""
    rounded = scale.half().to(scale.dtype)
    return torch.where(scale == 0, 1.0, rounded.clamp(_LEAST_SCALE, 65504.0))
