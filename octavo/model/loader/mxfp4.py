"""MXFP4 weights as gpt-oss stores them.

A block is 32 values along the input axis: 16 bytes of two FP4 numbers (E2M1) each, the lower half
first, and one byte of their common scale (E8M0). OCP Microscaling Formats specification 1.0:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.tables import E2M1
from octavo.ops.weights import TableWeight

BLOCK = 32  # values
BLOCK_BYTES = BLOCK // 2
_NOT_A_NUMBER = 255


def weight(blocks: Tensor, scales: Tensor) -> TableWeight:
    """blocks: uint8 [out, n, 16]; scales: uint8 [out, n]. [out, 32 n], exactly. The scale 255
    stands for no number, so its block's values are NaN."""
    packed = blocks.flatten(1)
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    table = torch.tensor(E2M1, device=blocks.device)
    return TableWeight(codes, table, _powers(scales), 4, BLOCK)


def _powers(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) for E8M0 numbers e, by the bits of an FP32 number; the lowest is subnormal."""
    bits = exponents.int() << 23
    lowest, none = 1 << 22, 0x7FC00000  # 2 ** -127 and NaN
    bits = torch.where(exponents == 0, lowest, bits)
    bits = torch.where(exponents == _NOT_A_NUMBER, none, bits)
    return bits.view(torch.float32)
