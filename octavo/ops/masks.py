"""Masks of ids that may be drawn: a bit per id in int32 words, the lowest bit first. The
definition; ``ops.triton.masks`` is a GPU's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEG_INF = float("-inf")


def keep_allowed(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """In place: -inf wherever the bit of a row's mask is 0.

    logits: float32 [n, V]; index: int [n], the mask of each row, -1 where it is left alone; masks:
    int32 [m, W], W >= V / 32 (bits behind the V-th say nothing).
    """
    rows = (index >= 0).nonzero().squeeze(-1)
    own = ~masks[index[rows].to(torch.int64)]
    # On a CPU NumPy takes bits apart in half the time.
    banned = unpacked_by_numpy(own) if own.device.type == "cpu" else unpacked(own)
    logits[rows] = logits[rows].masked_fill_(banned[:, : logits.shape[-1]], NEG_INF)


def unpacked(words: Tensor) -> Tensor:
    """bool [m, 32 W] of int32 [m, W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(-2) != 0


def unpacked_by_numpy(words: Tensor) -> Tensor:
    """The same, of words on the host."""
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)
