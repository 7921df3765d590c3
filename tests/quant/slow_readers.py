"""Readers of checkpoint formats, written from their published descriptions, one number at a time:
no part of octavo. Each takes arrays as stored and gives FP32 [out, in]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def code_at(words: Array, bits: int, index: int) -> int:
    """The ``index``-th code of a stream of bits in words of 32, the lowest bit first."""
    value = 0
    for bit in range(bits):
        word, shift = divmod(index * bits + bit, 32)
        value |= ((int(words[word]) >> shift) & 1) << bit
    return value


def gptq_zero(words: Array, bits: int, index: int, is_v2: bool) -> int:
    """The ``index``-th zero of a row of words. v1 takes 1 from all zeros of a word at once, but
    from each of 3 bits by itself."""
    if is_v2:
        return code_at(words, bits, index)
    if bits == 3:
        return (code_at(words, bits, index) + 1) % 8
    word, place = divmod(index, 32 // bits)
    ones = sum(1 << bits * n for n in range(32 // bits))
    return ((int(words[word]) + ones) % (1 << 32) >> bits * place) % (1 << bits)


def gptq(
    qweight: Array, qzeros: Array, scales: Array, g_idx: Array | None, bits: int, is_v2: bool
) -> Array:
    """qweight: int32 [in * bits / 32, out]; qzeros: int32 [groups, out * bits / 32]; scales:
    [groups, out]; g_idx: [in], the group of each input."""
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group = inputs // scales.shape[0]
    dense = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            g = i // group if g_idx is None else int(g_idx[i])
            zero = gptq_zero(qzeros[g], bits, o, is_v2)
            code = code_at(qweight[:, o], bits, i)
            dense[o, i] = np.float32(code - zero) * np.float32(scales[g, o])
    return dense


def awq(qweight: Array, qzeros: Array, scales: Array) -> Array:
    """qweight: int32 [in, out / 8]; qzeros: int32 [groups, out / 8]; scales: [groups, out]. In a
    word, output 8 w + 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble."""
    places = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    group = inputs // scales.shape[0]
    dense = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        shift = 4 * places[o % 8]
        for i in range(inputs):
            code = int(qweight[i, o // 8]) >> shift & 15
            zero = int(qzeros[i // group, o // 8]) >> shift & 15
            dense[o, i] = np.float32(code - zero) * np.float32(scales[i // group, o])
    return dense


def float8(byte: int, exponent_bits: int) -> float:
    """OCP FP8: E4M3 (4; no infinity, NaN is all ones) or E5M2 (5; as IEEE)."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 128 else 1.0
    exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    top = exponent == (1 << exponent_bits) - 1
    if exponent_bits == 4 and top and mantissa == 7:
        return float("nan")
    if exponent_bits == 5 and top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def fp8(stored: Array, scale_of: Array, exponent_bits: int) -> Array:
    """stored: uint8 [out, in]; scale_of: FP32 [out, in], each value's scale."""
    dense = np.empty(stored.shape, np.float32)
    for place in np.ndindex(stored.shape):
        value = np.float32(float8(int(stored[place]), exponent_bits))
        dense[place] = value * np.float32(scale_of[place])
    return dense


def block_scales(scales: Array, shape: tuple[int, int], block: tuple[int, int]) -> Array:
    """Each value's scale; ``block``: outputs and inputs of one."""
    spread = np.empty(shape, np.float32)
    for o, i in np.ndindex(shape):
        spread[o, i] = scales[o // block[0], i // block[1]]
    return spread


def pack_quantized(
    packed: Array, scales: Array, zeros: Array | None, g_idx: Array | None, bits: int, inputs: int
) -> Array:
    """compressed-tensors. packed: int32 [out, ceil(in * bits / 32)]; scales: [out, groups]; zeros:
    int32 [ceil(out * bits / 32), groups]. Codes and zeros are signed, stored plus 2^(bits - 1)."""
    outputs, groups = scales.shape
    group, offset = inputs // groups, 1 << (bits - 1)
    dense = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            g = i // group if g_idx is None else int(g_idx[i])
            code = code_at(packed[o], bits, i) - offset
            zero = 0 if zeros is None else code_at(zeros[:, g], bits, o) - offset
            dense[o, i] = np.float32(code - zero) * np.float32(scales[o, g])
    return dense


def int_quantized(weight: Array, scale_of: Array, zero_of: Array | None) -> Array:
    """weight: int8 [out, in]; scale_of, zero_of: [out, in], each value's own."""
    dense = np.empty(weight.shape, np.float32)
    for place in np.ndindex(weight.shape):
        zero = 0 if zero_of is None else int(zero_of[place])
        dense[place] = np.float32(int(weight[place]) - zero) * np.float32(scale_of[place])
    return dense


def four_bit(
    stored: Array, table: Array, scales: Array, shape: tuple[int, int], block: int
) -> Array:
    """bitsandbytes. stored: uint8, two codes in a byte, the first in the upper half; scales: FP32,
    of each ``block`` of values in a row of all."""
    dense = np.empty(shape, np.float32)
    for o, i in np.ndindex(shape):
        place = o * shape[1] + i
        byte = int(stored[place // 2])
        code = byte >> 4 if place % 2 == 0 else byte & 15
        dense[o, i] = np.float32(table[code]) * np.float32(scales[place // block])
    return dense


def nested_scales(codes: Array, table: Array, scales: Array, block: int, offset: float) -> Array:
    """bitsandbytes' quantized scales. codes: uint8 [n]; table: FP32 [256]; scales: of blocks."""
    found = np.empty(len(codes), np.float32)
    for place, code in enumerate(codes):
        product = np.float32(table[int(code)]) * np.float32(scales[place // block])
        found[place] = product + np.float32(offset)
    return found


def squeezellm(
    qweight: Array, table: Array, outliers: tuple[Array, Array, Array] | None, bits: int
) -> Array:
    """qweight: int32 [in * bits / 32, out]; table: [out, 2^bits]; outliers: rows, cols, vals of a
    matrix in CSR."""
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    dense = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            dense[o, i] = np.float32(table[o, code_at(qweight[:, o], bits, i)])
        if outliers is not None:
            rows, columns, values = outliers
            for place in range(int(rows[o]), int(rows[o + 1])):
                dense[o, int(columns[place])] += np.float32(values[place])
    return dense


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(blocks: Array, scales: Array) -> Array:
    """blocks: uint8 [out, n, 16], the lower half of a byte first; scales: uint8 [out, n], powers of
    two by E8M0."""
    outputs, count, _ = blocks.shape
    dense = np.empty((outputs, 32 * count), np.float32)
    for o, i in np.ndindex(dense.shape):
        byte = int(blocks[o, i // 32, i % 32 // 2])
        code = byte & 15 if i % 2 == 0 else byte >> 4
        exponent = int(scales[o, i // 32])
        scale = float("nan") if exponent == 255 else 2.0 ** (exponent - 127)
        dense[o, i] = (-1 if code & 8 else 1) * E2M1[code & 7] * scale
    return dense
