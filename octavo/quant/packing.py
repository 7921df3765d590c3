"""Codes of a few bits in words of 32: one stream of bits, the lowest first, where a code may begin
in one word and end in the next (GPTQ, SqueezeLLM, compressed-tensors)."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """words: int32 [m, n], a stream in each row. Its first ``count`` codes, uint8 [m, count]."""
    import torch
    import torch.nn.functional as F

    span, size = _unit(bits)
    stored = as_bytes(words)
    stored = F.pad(stored, (0, -stored.shape[1] % span)).unflatten(1, (-1, span))
    unit: Tensor = stored[..., 0]
    if span > 1:
        unit = unit.int()
        for byte in range(1, span):
            unit |= stored[..., byte].int() << 8 * byte
    codes = torch.empty(*unit.shape, size, dtype=torch.uint8, device=words.device)
    for place in range(size):
        codes[..., place] = unit >> bits * place & (1 << bits) - 1
    return codes.flatten(1)[:, :count].contiguous()


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse. codes: uint8 [m, count], below 2^bits. int32 [m, ceil(count * bits / 32)]."""
    import torch
    import torch.nn.functional as F

    span, size = _unit(bits)
    count = -(-codes.shape[1] * bits // 32)
    padded = F.pad(codes, (0, -codes.shape[1] % 32))  # whole words
    places = padded.unflatten(1, (-1, size))
    unit = places[..., 0].int()
    for place in range(1, size):
        unit |= places[..., place].int() << bits * place
    stored = torch.stack([unit >> 8 * byte & 255 for byte in range(span)], dim=-1)
    return stored.to(torch.uint8).flatten(1).view(torch.int32)[:, :count].contiguous()


def as_bytes(words: Tensor) -> Tensor:
    """words: int32 [m, n], whatever their strides. uint8 [m, 4 n], the lowest first."""
    import torch

    flat = words.contiguous().as_strided((words.numel(),), (1,))  # strides of axes of 1 are any
    return flat.view(torch.uint8).view(len(words), -1)


def _unit(bits: int) -> tuple[int, int]:
    """The bytes after which codes begin at the same bits of a byte again, and how many codes."""
    whole = lcm(bits, 8)
    return whole // 8, whole // bits
