"""GGUF's quantized types as groups of codes, exactly as stored, which is what kernels multiply,
and the numbers they stand for.

Layouts: https://github.com/ggml-org/ggml (ggml-common.h). A block of the types with ``_K``
and of IQ4_XS holds 256 values, of the others 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.model.loader.gguf_kinds import KINDS
from octavo.ops.weights import Quantized, QuantizedWeight, TableWeight


@dataclass(frozen=True)
class _Groups:
    """Of n blocks. codes: uint8 [n, values]; scales, minimums: FP16 or FP32 [n, groups]."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None


def grouped(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Quantized:
    """raw: uint8, all bytes of a tensor of type ``kind`` (a key of ``KINDS``); shape: (out, in)."""
    found, rows = KINDS[kind], shape[0]
    groups = _READ[kind](raw.view(-1, found.num_bytes))
    codes, scales = groups.codes.reshape(shape), groups.scales.reshape(rows, -1)
    if found.table is not None:
        table = torch.tensor(found.table, device=raw.device)
        return TableWeight(codes, table, scales.float(), found.bits, found.group)
    return QuantizedWeight(
        codes,
        scales,
        None if groups.minimums is None else groups.minimums.reshape(rows, -1),
        found.bits,
        found.group,
        found.zero,
    )


def expanded(blocks: Tensor, kind: str) -> Tensor:
    """blocks: uint8 [n, bytes] of type ``kind``, on any device. Their values, FP32 [n, size]:
    products are exact, a minimum is added with one rounding."""
    found = KINDS[kind]
    groups = _READ[kind](blocks)
    codes = groups.codes.view(len(blocks), -1, found.group)
    if found.table is not None:
        values = torch.tensor(found.table, device=blocks.device)[codes.int()]
    else:
        values = codes.float()
    if found.zero:
        values -= found.zero
    values *= groups.scales[:, :, None]
    if groups.minimums is not None:
        values += groups.minimums[:, :, None]
    return values.flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """FP16 at byte ``at`` of each block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n]: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4], a bit for each of 32 values -> [n, 32], 16 where it is set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Groups(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Groups:
    return _Groups(blocks[:, 2:] ^ 128, _half(blocks, 0))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of eight groups, FP32 [n, 8]: twelve bytes of 6-bit factors at byte 4,
    of the FP16 numbers before them."""
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    factors = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    lows = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    scale, low = _half(blocks, 0).float(), _half(blocks, 2).float()
    return scale * factors.float(), -(low * lows.float())


def _q4_k(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # two groups of 32 share 32 bytes
    return _Groups(codes.flatten(1), *_scales_of_k(blocks))


def _q5_k(blocks: Tensor) -> _Groups:
    fifth, low = blocks[:, 16:48], blocks[:, 48:]
    codes = _nibbles(low.reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = codes | (fifth[:, None, :] >> shifts & 1) << 4
    return _Groups(codes.flatten(1), *_scales_of_k(blocks))


def _q6_k(blocks: Tensor) -> _Groups:
    """Halves of 128 values, of which a byte of the two upper bits serves four."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    factors = blocks[:, 192:208].view(torch.int8).float()
    return _Groups((low | high << 4).flatten(1), _half(blocks, 208).float() * factors)


def _quarters(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 4, n]: the lowest two bits of all, the next two ..."""
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=packed.device)[:, None]
    return packed[..., None, :] >> shifts & 3


def _q2_k(blocks: Tensor) -> _Groups:
    """A byte of factors for each 16 values: of the scale, and above of what is taken away."""
    factors, codes = blocks[:, :16], _quarters(blocks[:, 16:80].reshape(-1, 2, 32))
    scale, low = _half(blocks, 80).float(), _half(blocks, 82).float()
    return _Groups(
        codes.flatten(1), scale * (factors & 15).float(), -(low * (factors >> 4).float())
    )


def _q3_k(blocks: Tensor) -> _Groups:
    """Third bits apart, and 6-bit factors of each 16 values: eight bytes hold four bits of two of
    them, four bytes two bits of four."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    third = (blocks[:, None, :32] >> shifts & 1).view(-1, 2, 4, 32)
    codes = _quarters(blocks[:, 32:96].reshape(-1, 2, 32)) | third << 2
    low, high = _nibbles(blocks[:, 96:104]), _quarters(blocks[:, 104:108]).flatten(1)
    factors = (low | high << 4).float() - 32
    return _Groups(codes.flatten(1), _half(blocks, 108).float() * factors)


def _iq4_nl(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Groups:
    """Eight groups, whose 6-bit factors lie as two bits of each in bytes 2 and 3 and four in bytes
    4 to 7."""
    high = _quarters(blocks[:, 2:4]).transpose(1, 2).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    factors = (low | high << 4).float() - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return _Groups(codes.flatten(1), _half(blocks, 0).float() * factors)


_READ: dict[str, Callable[[Tensor], _Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
