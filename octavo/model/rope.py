"""Rotary frequencies from a RopeSpec, and the cos/sin tables of a step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.model.spec import (
    BY_LENGTH,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    TensorScaling,
    YarnScaling,
)


class Rope:
    """cos and sin of any positions on ``device``; an ``octavo.ops.attention.Rope``. Pairs that do
    not turn (all of them where ``spec`` is None) come last, with cos 1 and sin 0.

    With ``DynamicScaling`` and ``LongRopeScaling`` the frequencies follow the context length of the
    step that computes a token, and its key keeps them: as in transformers with a cache.

    ``max_position``: positions a context may have. ``factors``: FP32 [dim / 2], the checkpoint's
    divisors for ``TensorScaling``.
    """

    def __init__(
        self,
        spec: RopeSpec | None,
        head_dim: int,
        max_position: int,
        factors: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_position = max_position
        self._tables: dict[tuple[int, torch.device], Tensor] = {}
        self._theta = spec.theta if spec else 1.0
        self._scaling = scaling = spec.scaling if spec else None
        self._dim = (spec.dim or head_dim) if spec else 0
        self._still = head_dim // 2 - self._dim // 2
        self.attention_factor = 1.0
        frequencies = base_frequencies(self._theta, self._dim)
        if isinstance(scaling, LinearScaling):
            frequencies = frequencies / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            frequencies = llama3_frequencies(frequencies, scaling)
        elif isinstance(scaling, YarnScaling):
            frequencies = yarn_frequencies(frequencies, self._theta, scaling)
            self.attention_factor = scaling.attention_factor
        elif isinstance(scaling, TensorScaling):
            assert factors is not None
            frequencies = frequencies / factors.cpu()
        elif isinstance(scaling, LongRopeScaling):
            self._long = (frequencies / torch.tensor(scaling.long)).to(device)
            frequencies = frequencies / torch.tensor(scaling.short)
            self.attention_factor = scaling.attention_factor
        self.frequencies = frequencies.to(device)
        self._exponents = _exponents(self._dim).to(device)

    def __call__(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """positions, lengths (of each one's context): int64 [m]. FP32 [m, head_dim / 2] each."""
        frequencies: Tensor = self.frequencies
        if isinstance(self._scaling, DynamicScaling):
            frequencies = self._dynamic(self._scaling, lengths)
        elif isinstance(self._scaling, LongRopeScaling):
            beyond = (lengths > self._scaling.original)[:, None]
            frequencies = torch.where(beyond, self._long, self.frequencies)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        if self._still:
            cos, sin = F.pad(cos, (0, self._still), value=1.0), F.pad(sin, (0, self._still))
        return cos, sin

    def table(self, length: int, device: torch.device) -> Tensor | None:
        """cos, then sin of the first ``length`` positions, FP32 [length, head_dim]. Made once, so
        not while a CUDA graph is captured. None where they depend on the context's length."""
        if isinstance(self._scaling, BY_LENGTH):
            return None
        if (length, device) not in self._tables:
            positions = torch.arange(length, device=self.frequencies.device)
            table = torch.cat(self(positions, positions), dim=1)
            self._tables[length, device] = table.to(device)
        return self._tables[length, device]

    def _dynamic(self, scaling: DynamicScaling, lengths: Tensor) -> Tensor:
        """[m, dim / 2]: the base grows with each context (NTK-aware, bloc97, emozilla)."""
        exponent = self._dim / (self._dim - 2)
        excess = lengths.clamp(min=scaling.original) / scaling.original
        base = self._theta * (scaling.factor * excess - (scaling.factor - 1)) ** exponent
        return base[:, None] ** -self._exponents


def rotary_order(head_dim: int, dim: int) -> Tensor:
    """Which of a head's numbers goes where, int64 [head_dim], so that of the first ``dim``, which
    turn in pairs (i, i + dim / 2), pairs become (i, i + head_dim / 2)."""
    turning, still = torch.arange(dim).chunk(2), torch.arange(dim, head_dim).chunk(2)
    return torch.cat((turning[0], still[0], turning[1], still[1]))


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def base_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(dim)


def llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths beyond original / low_freq_factor shrink by ``factor``, those below
    original / high_freq_factor stay, a linear blend between (Llama 3.1's reference)."""
    turns = scaling.original * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def yarn_frequencies(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Blend of interpolated and unchanged frequencies, by how often a dimension turns within the
    original context (Peng et al. 2023, section 3.2)."""
    half = len(frequencies)

    def dimension(turns: float) -> float:
        return half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
