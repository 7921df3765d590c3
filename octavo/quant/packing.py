"""Codes of a few bits in words of 32: one stream of bits, the lowest first, where a code may begin
in one word and end in the next (GPTQ, SqueezeLLM, compressed-tensors)."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """words: int32 [n, m], a stream along the first axis. Its first ``count`` codes, uint8
    [count, m]."""
    import torch
    import torch.nn.functional as F

    unit = lcm(bits, 32)  # bits after which codes begin at the same places of words again
    span, codes = unit // 32, unit // bits
    words = F.pad(words, (0, 0, 0, -len(words) % span)).unflatten(0, (-1, span))
    out = torch.empty(len(words), codes, words.shape[2], dtype=torch.uint8, device=words.device)
    for place in range(codes):
        word, shift = divmod(place * bits, 32)
        code = words[:, word] >> shift
        inside = min(bits, 32 - shift)  # of its bits in this word; a shift copies the sign
        code = code & (1 << inside) - 1
        if inside < bits:
            code |= words[:, word + 1] << inside & (1 << bits) - 1
        out[:, place] = code
    return out.flatten(0, 1)[:count]


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse. codes: uint8 [count, m], below 2^bits. int32 [ceil(count * bits / 32), m]."""
    import torch
    import torch.nn.functional as F

    unit = lcm(bits, 32)
    span, size = unit // 32, unit // bits
    groups = F.pad(codes, (0, 0, 0, -len(codes) % size)).unflatten(0, (-1, size))
    words = torch.zeros(len(groups), span, codes.shape[1], dtype=torch.int64, device=codes.device)
    for place in range(size):
        word, shift = divmod(place * bits, 32)
        code = groups[:, place].long()
        words[:, word] |= code << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, word + 1] |= code >> 32 - shift
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return signed.flatten(0, 1)[: -(-len(codes) * bits // 32)]
