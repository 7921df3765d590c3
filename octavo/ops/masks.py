"""Masks of ids that may be drawn: a bit per id in int32 words, the lowest bit first. The
definition; ``ops.triton.masks`` is a GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def keep_allowed(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """In place: -inf wherever the bit of a row's mask is 0.

    logits: float32 [n, V]; index: int [n], the mask of each row, -1 where it is left alone; masks:
    int32 [m, W], W >= V / 32 (bits behind the V-th say nothing).
    """
    rows = (index >= 0).nonzero().squeeze(-1)
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    own = masks[index[rows].to(torch.int64)]
    banned = ((own[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, NEG_INF)
