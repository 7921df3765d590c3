"""Words of packed weights to numbers, in kernels: the one place that knows the kinds.

A code becomes a float by putting it into the mantissa of a power of two, one mask and at most one
shift: the number is that power plus the code, exact. For tensor cores it is BF16 or FP16, two words
at a time, and the power is taken away at once. A GEMV takes FP32 and two words as one of 32 bits,
the power being ``offset``, which it takes away from sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.launch import INTERPRETED

COMPILED = tl.constexpr(not INTERPRETED)  # the interpreter knows no assembly
FIELDS_OF = {0: 1, 2: 8, 3: 16, 4: 4, 8: 2}


@triton.constexpr_function
def place(at: int, bits: int) -> int:
    """The bit of FP32's mantissa that a code's lowest bit goes to from ``at``: as high as shifts
    that several fields share allow, at least 12, so that the offset is at most 2,048."""
    if bits == 4:
        return (12, 16, 16, 12, 16, 12, 16, 16)[at // 4]
    if bits == 2:
        return 12 if at == 0 else at + 10 if at <= 10 else at if at <= 20 else at - 10
    return 23 - bits


@triton.constexpr_function
def offset(field: int, half: int, bits: int) -> int:
    """What ``shifted`` adds to a code."""
    return 0 if bits == 0 else 1 << (23 - place(bits * field + 16 * half, bits))


@triton.constexpr_function
def either(mask: int, one: int) -> str:
    """PTX: (a & mask) | one, in one instruction."""
    return f"lop3.b32 $0, $1, {mask:#x}, {one:#x}, 0xea;"


@triton.constexpr_function
def power(bits: int, bf16: bool) -> int:
    """What ``whole_numbers`` adds to a code before it takes zeros away."""
    if bf16:
        return -128 if bits == 8 else 128
    return 1024


@triton.constexpr_function
def whole_numbers(field: int, bits: int, bf16: bool, zero: int | None) -> str:
    """PTX: two codes less ``zero`` from two words ($1), exact; of 3 bits $2 has the high bits. For
    a zero of None the last operand has what to add, with the power taken away."""
    kind, one = ("bf16x2", 0x43004300) if bf16 else ("f16x2", 0x64006400)
    low = bits * field if bits != 3 else 2 * (field % 8)
    lines = [f"shr.b32 a, $1, {low};"]
    if bits == 8 and bf16:  # too many for BF16's mantissa: two halves of 4 bits, 16 a + b - 256
        lines += [
            f"lop3.b32 b, a, 0x000f000f, {one:#x}, 0xea;",
            "shr.b32 a, a, 4;",
            f"lop3.b32 a, a, 0x000f000f, {one:#x}, 0xea;",
            f"mov.b32 c, {_pair(16, bf16)};",
            f"mov.b32 d, {_pair(-16 * 128 - 256, bf16)};",
            f"fma.rn.{kind} a, a, c, d;",
            f"mov.b32 c, {_pair(1, bf16)};",
            f"fma.rn.{kind} a, a, c, b;",
        ]
    elif bits == 3:
        left = f"shl.b32 b, $2, {2 - field};" if field < 2 else f"shr.b32 b, $2, {field - 2};"
        lines += [
            f"lop3.b32 a, a, 0x00030003, {one:#x}, 0xea;",
            left,
            "lop3.b32 a, b, 0x00040004, a, 0xea;",
        ]
    else:
        mask = ((1 << bits) - 1) * 0x00010001
        lines.append(f"lop3.b32 a, a, {mask:#x}, {one:#x}, 0xea;")
    added = "$3" if bits == 3 else "$2"
    if zero is not None:
        power_of = -128 if bits == 8 and bf16 else 128 if bf16 else 1024
        lines.append(f"mov.b32 d, {_pair(-power_of - zero, bf16)};")
        added = "d"
    lines += [f"mov.b32 c, {_pair(1, bf16)};", f"fma.rn.{kind} $0, a, c, {added};"]
    return "{ .reg .b32 a, b, c, d; " + " ".join(lines) + " }"


@triton.constexpr_function
def multiply_add(bf16: bool) -> str:
    """PTX: $1 * $2 + $3, two numbers of 16 bits at a time."""
    return f"fma.rn.{'bf16x2' if bf16 else 'f16x2'} $0, $1, $2, $3;"


@triton.constexpr_function
def _pair(number: int, bf16: bool) -> str:
    """A whole number of few bits, twice in 32 bits."""
    if number == 0:
        return "0x0"
    sign, size = (0x8000, -number) if number < 0 else (0, number)
    exponent = size.bit_length() - 1
    bits, bias = (7, 127) if bf16 else (10, 15)
    mantissa = (size << bits >> exponent) - (1 << bits)
    assert (mantissa + (1 << bits)) << exponent == size << bits, f"{number} does not fit"
    half = sign | (exponent + bias) << bits | mantissa
    return hex(half << 16 | half)


@triton.constexpr_function
def fields_of(bits: int) -> int:
    return FIELDS_OF[bits]


@triton.constexpr_function
def words_of(bits: int) -> int:
    """Words of a chunk at each place of its planes."""
    return 3 if bits == 3 else 1


@triton.constexpr_function
def shared_fields(bits: int, width: int, group: int) -> int:
    """Neighbouring planes with one scale."""
    fields = FIELDS_OF[bits]
    if group == 0:
        return fields
    planes = group // width
    if planes % fields == 0:
        return fields
    return planes if fields % planes == 0 else 1


@triton.jit
def _moved(word, FROM: tl.constexpr, TO: tl.constexpr):
    if TO >= FROM:
        word = word << (TO - FROM)
    else:
        word = word >> (FROM - TO)
    return word


@triton.jit
def _either(word, MASK: tl.constexpr, ONE: tl.constexpr):
    """(word & MASK) | ONE, int32."""
    if COMPILED:
        ASM: tl.constexpr = either(MASK, ONE)
        found = tl.inline_asm_elementwise(ASM, "=r,r", [word], tl.int32, is_pure=True, pack=1)
    else:
        found = (word & MASK) | ONE
    return found


@triton.jit
def code(low, high, FIELD: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr):
    """int32: the code of a field of words, which begin at bit AT. low: of 3 bits, the words of its
    two lower bits."""
    if BITS == 3:
        found = _moved(low, 2 * (FIELD % 8) + AT, 0) & 3
        found |= _moved(high, FIELD + AT, 2) & 4
    else:
        found = _moved(low, BITS * FIELD + AT, 0) & ((1 << BITS) - 1)
    return found.to(tl.int32)


@triton.jit
def shifted(low, high, FIELD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """FP32: ``offset`` + the code of a field of a half of 32 bits; of FP8, the value."""
    if BITS == 0:
        number = low.to(tl.float32)
    elif BITS == 3:
        found = _either(_moved(low, 2 * (FIELD % 8) + 16 * HALF, 20), 3 << 20, (127 + 3) << 23)
        found |= _moved(high, FIELD + 16 * HALF, 22) & (1 << 22)
        number = found.to(tl.float32, bitcast=True)
    else:
        TO: tl.constexpr = place(BITS * FIELD + 16 * HALF, BITS)
        MASK: tl.constexpr = ((1 << BITS) - 1) << TO
        found = _either(_moved(low, BITS * FIELD + 16 * HALF, TO), MASK, (150 - TO) << 23)
        number = found.to(tl.float32, bitcast=True)
    return number


@triton.jit
def load_words(pointers, inside, ZERO: tl.constexpr, MASKED: tl.constexpr):
    """A tile of words; ZERO, of their type, where not inside."""
    if MASKED:
        words = tl.load(pointers, mask=inside, other=ZERO)
    else:
        words = tl.load(pointers)
    return words


@triton.jit
def load_chunks(pointers, inside, BITS: tl.constexpr, STRIDE: tl.constexpr, MASKED: tl.constexpr):
    """The words of all fields: two halves of the lower bits and the higher ones, of 3 bits, STRIDE
    apart; else the same word for all."""
    first = load_words(pointers, inside, 0 if BITS > 0 else 0.0, MASKED)
    if BITS == 3:
        second = load_words(pointers + STRIDE, inside, 0, MASKED)
        high = load_words(pointers + 2 * STRIDE, inside, 0, MASKED)
    else:
        second, high = first, first
    return first, second, high


@triton.jit
def low_words(first, second, FIELD: tl.constexpr, BITS: tl.constexpr):
    if BITS == 3 and FIELD >= 8:
        low = second
    else:
        low = first
    return low


@triton.jit
def numbers(
    first, second, high, table_rows, FIELD: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """FP32: of a field; of codes without a table ``offset`` + code. table_rows: pointers to the
    tables of the rows."""
    low = low_words(first, second, FIELD, BITS)
    if TABLE:
        found = tl.load(table_rows + code(low, high, FIELD, 16 * HALF, BITS))
    else:
        found = shifted(low, high, FIELD, HALF, BITS)
    return found


@triton.jit
def whole(
    first, second, high, zeros, FIELD: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The codes of a field less their zero, of 16-bit TYPE, exact. zeros: FP32 [rows, 1],
    instead of ZERO where HAS_ZEROS."""
    low = low_words(first, second, FIELD, BITS)
    if COMPILED:
        BF16: tl.constexpr = tl.bfloat16 == TYPE
        ASM: tl.constexpr = whole_numbers(FIELD, BITS, BF16, None if HAS_ZEROS else ZERO)
        if HAS_ZEROS:
            added = (zeros * -1.0 - power(BITS, BF16)).to(TYPE)
        if BITS == 3 and HAS_ZEROS:
            found = tl.inline_asm_elementwise(
                ASM, "=r,r,r,r", [low, high, added], TYPE.value, True, 2
            )
        elif BITS == 3:
            found = tl.inline_asm_elementwise(ASM, "=r,r,r", [low, high], TYPE.value, True, 2)
        elif HAS_ZEROS:
            found = tl.inline_asm_elementwise(ASM, "=r,r,r", [low, added], TYPE.value, True, 2)
        else:
            found = tl.inline_asm_elementwise(ASM, "=r,r", [low], TYPE.value, True, 2)
    else:
        found = code(low, high, FIELD, 0, BITS).to(tl.float32)
        if HAS_ZEROS:
            found -= zeros
        else:
            found -= ZERO
        found = found.to(TYPE)
    return found


@triton.jit
def scaled(numbers, scales, minimums, TYPE: tl.constexpr):
    """numbers * scales + minimums, rounded to their 16-bit TYPE; both are FP32 [rows, 1]."""
    if COMPILED:
        ASM: tl.constexpr = multiply_add(tl.bfloat16 == TYPE)
        factors, terms = scales.to(TYPE), minimums.to(TYPE)
        found = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [numbers, factors, terms], TYPE.value, True, 2
        )
    else:
        found = (numbers.to(tl.float32) * scales + minimums).to(TYPE)
    return found


@triton.constexpr_function
def half_place(field: int, bits: int) -> int:
    """Where ``add_half_products`` finds a field's codes in a byte: there a code, read as FP16, is a
    subnormal number, code * 2^(place - 24)."""
    return bits * field % 8


@triton.constexpr_function
def half_unit(bits: int) -> float:
    """What ``add_half_products`` adds up is this times the products of codes and inputs, which lie
    within -2 .. 2: sums of 32 words fit into FP16, and their last bits into its normal numbers."""
    return 2.0**-14 if bits == 8 else 2.0**-10


@triton.constexpr_function
def half_factor(field: int, bits: int) -> float:
    """Of the inputs of a field, so that subnormal codes times them are in ``half_unit``."""
    return float(half_unit(bits) * 2.0 ** (24 - half_place(field, bits)))


_PACK = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_FMA = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")
_ADD = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
_SUM = tl.constexpr(
    "{ .reg .b16 a, b; .reg .f32 c, d; mov.b32 {a, b}, $1; cvt.f32.f16 c, a; cvt.f32.f16 d, b; "
    "add.f32 $0, c, d; }"
)


@triton.jit
def half_pairs(even, odd):
    """Inputs, FP32, of both halves of words as FP16: two in 32 bits, twice; interpreted apart."""
    if COMPILED:
        pair = tl.inline_asm_elementwise(_PACK, "=r,r,r", [even, odd], tl.int32, True, 1)
        other = pair
    else:
        pair, other = even.to(tl.float16).to(tl.float32), odd.to(tl.float16).to(tl.float32)
    return pair, other


@triton.jit
def add_half_products(sums, word, pair, other, FIELD: tl.constexpr, BITS: tl.constexpr):
    """sums + the products of a field of both halves of words, in FP16, two in 32 bits. Codes are
    used as they lie there, masked: numbers of FP16 below its normal ones, which cost no more."""
    AT: tl.constexpr = half_place(FIELD, BITS)
    if BITS * FIELD >= 8:
        first = word >> 8
    else:
        first = word
    if COMPILED:
        MASK: tl.constexpr = (((1 << BITS) - 1) << AT) * 0x00010001
        codes = first & MASK
        sums = tl.inline_asm_elementwise(_FMA, "=r,r,r,r", [codes, pair, sums], tl.int32, True, 1)
    else:
        low = code(word, word, FIELD, 0, BITS).to(tl.float32)
        high = code(word, word, FIELD, 16, BITS).to(tl.float32)
        sums = sums + (low * pair + high * other) * 2.0 ** (AT - 24)
    return sums


@triton.jit
def half_sums(sums, REDUCE: tl.constexpr):
    """FP32 [rows, words / REDUCE] of ``add_half_products``: REDUCE of 1, 2 or 4."""
    ROWS: tl.constexpr = sums.shape[0]
    PARTS: tl.constexpr = sums.shape[1] // REDUCE
    if COMPILED:
        if REDUCE == 4:
            left, right = tl.split(tl.reshape(sums, (ROWS, PARTS * 2, 2)))
            sums = tl.inline_asm_elementwise(_ADD, "=r,r,r", [left, right], tl.int32, True, 1)
        if REDUCE >= 2:
            left, right = tl.split(tl.reshape(sums, (ROWS, PARTS, 2)))
            sums = tl.inline_asm_elementwise(_ADD, "=r,r,r", [left, right], tl.int32, True, 1)
        found = tl.inline_asm_elementwise(_SUM, "=f,r", [sums], tl.float32, True, 1)
    else:
        found = tl.sum(tl.reshape(sums, (ROWS, PARTS, REDUCE)), 2)
    return found
