"""Keys and values in 8 bits: rounded to what a cache keeps, and read again.

E4M3 and E5M2 (FP8) are multiples of a scale for each kv head. int8 are multiples of a scale for
each head of a token, max |x| / 127, FP32, which stand behind the numbers of their piece (the keys
or the values of one block and head). Attention multiplies in FP16, where all of these numbers are
exact, and leaves the scales to scores and weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PLAIN, INT8, E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
KINDS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
SCALE_BYTES = torch.float32.itemsize  # of a token, with int8


def piece_size(block_size: int, head_dim: int, kind: int) -> int:
    """Elements of a block's keys, or values, of one head."""
    return block_size * (head_dim + (SCALE_BYTES if kind == KINDS[torch.int8] else 0))


@triton.jit
def int8_scale(x):
    """x: FP32 [m, n]. Of each row max |x| / 127, [m, 1]; no number where one of x is none."""
    return (tl.max(tl.abs(x), 1) / 127.0 + 0.0 * tl.sum(x, 1))[:, None]


@triton.jit
def int8_codes(x, scale):
    """x / scale to the nearest, ties to even: a sum with 1.5 * 2^23 has no digits after the
    point."""
    levels = x / tl.where(scale == 0.0, 1.0, scale)
    return ((levels + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def in_largest(scales, unit):
    """scales: [n], of int8, 0 and more. In units of the largest so far, ``unit`` > 0 before them;
    what was summed up in the old unit is to be multiplied by; and the new unit."""
    new = tl.maximum(unit, tl.max(scales, 0))
    return scales / new, unit / new, new


@triton.jit
def in_half(codes, KIND: tl.constexpr, ASM: tl.constexpr):
    """A tile of 8-bit numbers in FP16."""
    if (KIND == INT8) & ASM:  # as _halves_of_int8; conversions of integers are slow
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, upper, bias;
            xor.b32 codes, $2, 0x80808080;
            mov.b32 upper, 0x64646464;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, codes, upper, 0x4140;
            prmt.b32 $1, codes, upper, 0x4342;
            sub.rn.f16x2 $0, $0, bias;
            sub.rn.f16x2 $1, $1, bias;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        found = codes.to(tl.float16)
    return found


@triton.jit
def halves_of(pairs, KIND: tl.constexpr, ASM: tl.constexpr):
    """int16, two neighbouring numbers each: FP16 tensors of the first and of the second ones; of
    E4M3, 2^-8 of their values. (An 8-bit tensor would be read from shared memory byte by byte to
    become a matrix operand.)"""
    if KIND == E4M3:
        first, second = _halves_of_e4m3(pairs, ASM)
    elif KIND == E5M2:
        first, second = _halves_of_e5m2(pairs)
    else:
        first, second = _halves_of_int8(pairs, ASM)
    return first, second


@triton.jit
def _halves_of_e4m3(pairs, ASM: tl.constexpr):
    """Bits are only moved: sign, exponent and mantissa go where FP16 has them, whose exponent
    counts from 15, not 7."""
    if ASM:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            shl.b32 $0, $2, 8;
            shl.b32 low, $2, 7;
            and.b32 low, low, 0x3f803f80;
            lop3.b32 $0, $0, 0x80008000, low, 0xea;
            shr.u32 high, $2, 1;
            and.b32 high, high, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, high, 0xea;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = pairs.to(tl.uint16, bitcast=True)
        first = (((bits << 8) & 0x8000) | ((bits << 7) & 0x3F80)).to(tl.uint16)
        second = ((bits & 0x8000) | ((bits >> 1) & 0x3F80)).to(tl.uint16)
        first = first.to(tl.float16, bitcast=True)
        second = second.to(tl.float16, bitcast=True)
    return first, second


@triton.jit
def _halves_of_e5m2(pairs):
    """E5M2 is the upper half of FP16."""
    bits = pairs.to(tl.uint16, bitcast=True)
    first = (bits << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    second = (bits & 0xFF00).to(tl.uint16).to(tl.float16, bitcast=True)
    return first, second


@triton.jit
def _halves_of_int8(pairs, ASM: tl.constexpr):
    """A number plus 128 is the last digits of 1024 + that in FP16: 1152 more than the number."""
    if ASM:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, upper, bias;
            xor.b32 codes, $2, 0x80808080;
            mov.b32 upper, 0x64646464;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, codes, upper, 0x4240;
            prmt.b32 $1, codes, upper, 0x4341;
            sub.rn.f16x2 $0, $0, bias;
            sub.rn.f16x2 $1, $1, bias;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = ((pairs << 8).to(tl.int16) >> 8).to(tl.float16)
        second = (pairs >> 8).to(tl.float16)
    return first, second
