"""MXFP4 blocks against a decoder that reads the specification's bits one number at a time."""

from __future__ import annotations

import math

import torch

from octavo.quant import mxfp4


def number(nibble: int) -> float:
    """E2M1: a sign, two bits of exponent (bias 1), one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    size = math.ldexp(2 + mantissa, exponent - 2) if exponent else mantissa / 2
    return -size if sign else size


def decoded(blocks: list[int], scale: int) -> list[float]:
    power = math.nan if scale == 255 else math.ldexp(1.0, scale - 127)
    return [number(nibble) * power for byte in blocks for nibble in (byte & 15, byte >> 4)]


def test_every_byte_and_scale_is_exact():
    dtype = torch.float32
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1, 1).view(256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    found = mxfp4.read(blocks, scales).dense()
    assert found.shape == (256, 32) and found.dtype == dtype
    expected = [decoded(row, s) for row, s in zip(blocks[:, 0].tolist(), scales[:, 0].tolist())]
    wanted = torch.tensor(expected, dtype=torch.float64)
    in_range = wanted.abs() <= torch.finfo(dtype).max  # 2 ** 127 times 6 is not
    torch.testing.assert_close(
        found.double(), wanted.where(in_range, wanted.sign() * math.inf), rtol=0, atol=0,
        equal_nan=True,
    )  # fmt: skip
    signs = torch.tensor([[math.copysign(1, value) for value in row] for row in expected])
    assert torch.equal(found[:255].signbit(), signs[:255] < 0)  # of zeros too


def test_blocks_lie_along_the_last_axis():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (12, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (12, 2), generator=generator, dtype=torch.uint8)
    weight = mxfp4.read(blocks, scales)
    assert weight.shape == (12, 64) and weight.group == 32
    for place, row in enumerate(weight.dense().tolist()):
        pairs = zip(blocks[place].tolist(), scales[place].tolist())
        assert row == [value for pair in pairs for value in decoded(*pair)]
