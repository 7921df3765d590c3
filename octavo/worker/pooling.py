"""From hidden states to a prompt's vector, over as many chunks as it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.types import Pooling


class Pools:
    """Running sums of prompts under way, by slot, on the device where the hidden states are."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(
        self, slot: int, kind: Pooling, hidden: Tensor, start: int, prompt_len: int
    ) -> Tensor | None:
        """hidden: [t, hidden] of the prompt's tokens from ``start`` on, after the final norm.
        Returns the vector, FP32 [hidden], with the prompt's last token, else None."""
        is_last = start + len(hidden) >= prompt_len
        if kind is Pooling.LAST:
            return hidden[-1].to(torch.float32, copy=True) if is_last else None
        total = hidden.sum(0, dtype=torch.float32)
        before = self._sums.pop(slot, None)  # of an earlier request's that ended before its last
        if start and before is not None:
            total += before
        if is_last:
            return total / prompt_len
        self._sums[slot] = total
        return None
