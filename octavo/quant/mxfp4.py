"""MXFP4: blocks of 32 FP4 numbers (E2M1), the lower half of a byte first, and a scale (E8M0) each.

OCP Microscaling Formats specification 1.0:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
gpt-oss keeps its experts so; ``model.loader`` knows where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.quant.fields import Fields
from octavo.quant.format import Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.weights import TableWeight

BLOCK = 32  # values
BLOCK_BYTES = BLOCK // 2
_NOT_A_NUMBER = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three lower bits


def read(blocks: Tensor, scales: Tensor) -> TableWeight:
    """blocks: uint8 [out, n, 16]; scales: uint8 [out, n]. Of a matrix [out, 32 n], as stored."""
    import torch

    from octavo.ops.weights import TableWeight

    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return TableWeight(codes, table(blocks.device), powers(scales), 4, BLOCK)


def table(device: torch.device) -> Tensor:
    """What the 16 codes stand for, FP32."""
    import torch

    values = torch.tensor(_MAGNITUDES, device=device)
    return torch.cat((values, -values))


def powers(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) for E8M0 numbers e, FP32, by the bits of such a number; the lowest one is
    subnormal, 255 stands for NaN."""
    import torch

    bits = exponents.int() << 23
    lowest, none = 1 << 22, 0x7FC00000  # 2 ** -127 and NaN
    bits = torch.where(exponents == 0, lowest, bits)
    bits = torch.where(exponents == _NOT_A_NUMBER, none, bits)
    return bits.view(torch.float32)


def scheme(fields: Fields) -> Scheme:
    """Only experts are quantized, which lie in tensors of all of them."""
    fields.names("modules_to_not_convert")
    return Scheme("mxfp4", lambda module: None)
