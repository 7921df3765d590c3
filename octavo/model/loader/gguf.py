"""GGUF checkpoints: tensors are kept in the groups they are stored in, or dequantized while
loading: the types of ``gguf_groups`` in torch, where the weights will lie (a GPU gets the stored
bytes), the others by the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.gguf import GGUFFile, GGUFTensor
from octavo.model.families.family import Family
from octavo.model.loader.experts import Piece
from octavo.model.loader.gguf_groups import expanded, grouped
from octavo.model.loader.gguf_kinds import KINDS
from octavo.model.loader.headers import GGUFHeaders
from octavo.model.loader.source import WHOLE, Share
from octavo.model.loader.upload import Uploader
from octavo.model.quantization import DENSE, Quantization
from octavo.model.spec import DecoderSpec, GQASpec
from octavo.ops.weights import Weight
from octavo.types import ConfigError


class GGUFSource(GGUFHeaders):
    def __init__(
        self,
        file: GGUFFile,
        spec: DecoderSpec,
        family: Family,
        uploader: Uploader | None = None,
        quantization: Quantization = DENSE,
    ) -> None:
        """``uploader``: to the device that is not the CPU. Where ``quantization`` keeps groups,
        quantized matrices come as such, if the kernels know their type."""
        super().__init__(file, spec, family, quantization.keeps_groups)
        self.quantization = quantization
        self._interleaves = family.gguf_interleaves
        self.dtype = None if self.commonest is None else _PLAIN[self.commonest]
        self._uploader = uploader

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, share: Share = WHOLE
    ) -> Callable[[], Weight]:
        if pieces := self.expert_pieces(name, shape):
            calls = [self._fetch_piece(piece, dtype) for piece in pieces]
            return lambda: self._experts.joined(name, [call() for call in calls], dtype)
        stored = self._file.tensors[self.place(name).name]
        kind = stored.type.name
        row, first = stored.num_bytes // stored.shape[0], share.first
        mine = slice(first * row, (first + shape[0]) * row)
        if self._in_groups and kind in KINDS:
            raw = self._raw(stored, mine)
            return lambda: self._in_order(name, grouped(raw(), kind, shape))
        if self._uploader is None or not _is_decoded_here(kind):
            return lambda: self._in_order(name, self._decoded(stored, mine, dtype).view(shape))
        raw = self._uploader.begin(stored.file, stored.offset + mine.start, mine.stop - mine.start)
        return lambda: self._in_order(name, _decode(raw(), kind, dtype).view(shape))

    def _fetch_piece(self, piece: Piece, dtype: torch.dtype) -> Callable[[], Weight]:
        stored = self._file.tensors[piece.name]
        size, first = stored.num_bytes, 0
        if piece.index is not None:
            size //= piece.shape[0]
            first = piece.index * size
        kind, shape = stored.type.name, piece.own_shape
        if self._in_groups and kind in KINDS:
            packed = self._raw(stored, slice(first, first + size))
            return lambda: grouped(packed(), kind, shape)
        if self._uploader is None or not _is_decoded_here(kind):
            mine = slice(first, first + size)
            return lambda: self._decoded(stored, mine, dtype).view(shape)
        raw = self._uploader.begin(stored.file, stored.offset + first, size)
        return lambda: _decode(raw(), kind, dtype).view(shape)

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()

    def _raw(self, stored: GGUFTensor, mine: slice) -> Callable[[], Tensor]:
        """Bytes of a tensor on the device."""
        if self._uploader is None:
            return lambda: torch.from_numpy(self._copied(stored, mine))
        return self._uploader.begin(stored.file, stored.offset + mine.start, mine.stop - mine.start)

    def _decoded(self, stored: GGUFTensor, mine: slice, dtype: torch.dtype) -> Tensor:
        raw = self._copied(stored, mine)
        values = dequantize(raw, stored.type.name, stored.name, self.where, dtype)
        return values.to(self._uploader.device) if self._uploader else values

    def _copied(self, stored: GGUFTensor, mine: slice) -> np.ndarray:
        """Bytes of a tensor in memory of their own, all of it or some."""
        if mine == slice(0, stored.num_bytes):
            return self._file.copied(stored.name)
        offset, count = stored.offset + mine.start, mine.stop - mine.start
        return np.fromfile(stored.file, dtype=np.uint8, count=count, offset=offset)

    def _in_order(self, name: str, values: Weight) -> Weight:
        if not self._interleaves or name.split(".")[-2] not in ("q", "k"):
            return values
        mixer = self.spec.layers[0].mixer
        assert isinstance(mixer, GQASpec)
        order = halves_from_neighbours(torch.arange(values.shape[0]), mixer.head_dim)
        return values[order]


def halves_from_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from rotary pairs (2i, 2i + 1) to pairs (i, i + d/2)."""
    split = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape)


def dequantize(raw: np.ndarray, kind: str, name: str, where: str, dtype: torch.dtype) -> Tensor:
    """raw: uint8, all bytes of one tensor; ``kind``: its GGML type's name. Flat, in ``dtype``."""
    if _is_decoded_here(kind):
        return _decode(torch.from_numpy(raw), kind, dtype)
    from gguf import GGMLQuantizationType, quants

    try:
        values = quants.dequantize(raw, GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise ConfigError(f"{where}: {name} is of type {kind}, which cannot be read") from error
    return torch.from_numpy(values).to(dtype).view(-1)


def _is_decoded_here(kind: str) -> bool:
    return kind in _PLAIN or kind in KINDS


def _decode(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """raw: uint8, on any device; ``kind``: see ``_is_decoded_here``. Flat, in ``dtype``."""
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind]).to(dtype)
    blocks = raw.view(-1, KINDS[kind].num_bytes)
    out = torch.empty(len(blocks), KINDS[kind].size, dtype=dtype, device=raw.device)
    step = _VALUES_AT_A_TIME // KINDS[kind].size
    for begin in range(0, len(blocks), step):
        part = slice(begin, begin + step)
        out[part] = expanded(blocks[part], kind)
    return out.view(-1)


# Intermediate values are FP32: so many keep them under 50 MB, and near the cores' caches.
_VALUES_AT_A_TIME = 1 << 22
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
