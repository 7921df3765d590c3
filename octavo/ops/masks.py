"""Masks of ids that may be drawn: a bit per id in int32 words, the lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def keep_allowed(logits: Tensor, masks: Tensor) -> None:
    """In place: -inf wherever the row's bit is 0.

    logits: float32 [n, V]; masks: int32 [n, W], W >= V / 32 (bits behind the V-th say nothing).
    """
    vocab = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    banned = ((masks[..., None] >> shifts) & 1).flatten(-2)[..., :vocab] == 0
    logits.masked_fill_(banned, NEG_INF)
