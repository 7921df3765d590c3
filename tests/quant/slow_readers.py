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
            zero = code_at(qzeros[g], bits, o)
            if not is_v2:
                zero = (zero + 1) % (1 << bits)
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
