"""MXFP4 weights as gpt-oss stores them, expanded while loading.

A block is 32 values along the input axis: 16 bytes of two FP4 numbers (E2M1) each, the lower half
first, and one byte of their common scale (E8M0). OCP Microscaling Formats specification 1.0:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quant.mxfp4 import BLOCK, BLOCK_BYTES, powers, table

__all__ = ["BLOCK", "BLOCK_BYTES", "expand"]

_BLOCKS_AT_A_TIME = 1 << 20  # keeps FP32 intermediates under 150 MB


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks: uint8 [..., n, 16]; scales: uint8 [..., n]. Returns [..., 32 n] in ``dtype``: exact
    in FP32 and BF16; FP16 rounds what is too small for it and has no room for what is too large.
    The scale 255 stands for no number, so its block's values are NaN."""
    packed, exponents = blocks.reshape(-1, BLOCK_BYTES), scales.reshape(-1, 1)
    pairs = _pairs(blocks.device)
    out = torch.empty(len(packed), BLOCK, dtype=dtype, device=blocks.device)
    for start in range(0, len(packed), _BLOCKS_AT_A_TIME):
        part = slice(start, start + _BLOCKS_AT_A_TIME)
        values = pairs.index_select(0, packed[part].flatten().int()).view(-1, BLOCK)
        out[part] = values * powers(exponents[part])
    return out.view(*scales.shape[:-1], BLOCK * scales.shape[-1])


def _pairs(device: torch.device) -> Tensor:
    """The two numbers of every byte, FP32 [256, 2]."""
    values = table(device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
