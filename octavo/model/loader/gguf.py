"""GGUF checkpoints: tensors are dequantized while loading, in torch for the common types.

Block layouts: https://github.com/ggml-org/ggml (ggml-common.h); a block holds 32 values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.gguf import GGUFFile
from octavo.model.families.family import Family
from octavo.model.loader.source import translate
from octavo.model.spec import DecoderSpec
from octavo.types import ConfigError


class GGUFSource:
    def __init__(self, file: GGUFFile, spec: DecoderSpec, family: Family) -> None:
        self.where = str(file.path)
        self.spec = spec
        self._names = family.gguf_names
        self._interleaves = family.gguf_interleaves
        self._file = file
        self.shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}

    def stored_name(self, name: str) -> str:
        return translate(name, self._names)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stored = self.stored_name(name)
        kind = self._file.tensors[stored].type.name
        values = dequantize(self._file.raw(stored), kind, stored, self.where, dtype).view(shape)
        part = name.split(".")[-2]
        if self._interleaves and part in ("q", "k"):
            values = halves_from_neighbours(values, self.spec.layers[0].mixer.head_dim)
        return values


def halves_from_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from rotary pairs (2i, 2i + 1) to pairs (i, i + d/2)."""
    split = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def dequantize(raw: np.ndarray, kind: str, name: str, where: str, dtype: torch.dtype) -> Tensor:
    """raw: uint8, all bytes of one tensor; ``kind``: its GGML type's name. Flat, in ``dtype``."""
    if kind in _PLAIN:
        return torch.from_numpy(np.array(raw)).view(_PLAIN[kind]).to(dtype)
    if kind in _BLOCKS:
        num_bytes, decode = _BLOCKS[kind]
        blocks = torch.from_numpy(np.array(raw)).view(-1, num_bytes)
        out = torch.empty(len(blocks), 32, dtype=dtype)
        decode(blocks, out)
        return out.view(-1)
    from gguf import GGMLQuantizationType, quants

    try:
        values = quants.dequantize(raw, GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise ConfigError(f"{where}: {name} is of type {kind}, which cannot be read") from error
    return torch.from_numpy(values).to(dtype).view(-1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """FP16 at byte ``at`` of each block, as FP32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    scale = _half(blocks, 0)
    _nibbles(blocks[:, 2:], scale, scale * -8, out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], _half(blocks, 0), _half(blocks, 2), out)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _nibbles(packed: Tensor, scale: Tensor, minimum: Tensor, out: Tensor) -> None:
    """out = nibble * scale + minimum; low nibbles are values 0 .. 15, high ones 16 .. 31."""
    for half, nibble in ((out[:, :16], packed & 15), (out[:, 16:], packed >> 4)):
        half.copy_(torch.addcmul(minimum, nibble.float(), scale))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Type -> (bytes of a block, what turns blocks [n, bytes] into values [n, 32]).
_BLOCKS: dict[str, tuple[int, Callable[[Tensor, Tensor], None]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, _q8_0),
}
