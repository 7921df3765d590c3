"""INT8 at load (W8A8): dense weights and their inputs rounded to 8 bits, in groups of inputs.

One scale per output channel and token costs seven times as much quality as groups of 64
(docs/cpu.md has the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.quant.dense import Dense
from octavo.quant.format import LinearVersions

if TYPE_CHECKING:
    import torch

GROUP = 64
BYTES_PER_WEIGHT = 1 + 4 / GROUP


class Int8(Dense):
    name = "int8"

    def finish(
        self,
        parts: Sequence[Mapping[str, Any]],
        epilogue: str,
        versions: LinearVersions,
    ) -> Callable[..., torch.Tensor]:
        rounded = [{**part, "weight": versions.quantize(part["weight"], GROUP)} for part in parts]
        return super().finish(rounded, epilogue, versions)
