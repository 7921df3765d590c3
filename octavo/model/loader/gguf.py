"""GGUF checkpoints: tensors are kept in the groups they are stored in, or dequantized while
loading: the types of ``gguf_groups`` in torch, where the weights will lie (a GPU gets the stored
bytes), the others by the ``gguf`` package.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.gguf import GGUFFile, GGUFTensor
from octavo.model.families.family import Family
from octavo.model.families.names import Place, find
from octavo.model.loader.experts import Piece, StoredExperts
from octavo.model.loader.gguf_groups import KINDS, bytes_per_value, expanded, grouped
from octavo.model.loader.source import WHOLE, Share, StoredAs
from octavo.model.loader.upload import Uploader
from octavo.model.quantization import DENSE, Quantization
from octavo.model.spec import DecoderSpec, GQASpec
from octavo.ops.weights import Weight
from octavo.types import ConfigError


class GGUFSource:
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
        self.quantization = quantization
        self.where = str(file.path)
        self.spec = spec
        self.names = family.gguf_names
        self._interleaves = family.gguf_interleaves
        self._file = file
        self.shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        self.dtype = _commonest(file)
        self._experts = StoredExperts(spec, family.gguf_experts, self.shapes)
        self._uploader = uploader
        self._in_groups = quantization.keeps_groups

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        return self._experts.pieces(name, shape)

    def place(self, name: str) -> Place:
        return find(name, self.names)

    def count_groups(self) -> tuple[int, int]:
        matrices = [t.type.name in KINDS for t in self._file.tensors.values() if len(t.shape) == 2]
        return (sum(matrices), len(matrices)) if self._in_groups else (0, 0)

    def is_quantized(self, name: str) -> bool:
        return self._in_groups and self._kinds_of(name, (0, 0)) <= set(KINDS)

    def stored_as(self, name: str, shape: tuple[int, ...]) -> StoredAs:
        return {name: (shape,)}

    def is_needless(self, name: str) -> bool:
        return False

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
        size: float = dtype.itemsize
        kinds = set().union(*(self._kinds_of(name, shape) for name, shape in shapes.items()))
        if self._in_groups and kinds and kinds <= set(KINDS):
            size = bytes_per_value(kinds)
        return int(sum(map(math.prod, shapes.values())) * size)

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

    def _kinds_of(self, name: str, shape: tuple[int, ...]) -> set[str]:
        """The GGML types of what our tensor ``name`` comes from."""
        pieces = self.expert_pieces(name, shape)
        names = [piece.name for piece in pieces] or [self.place(name).name]
        return {self._file.tensors[stored].type.name for stored in names}

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


def _commonest(file: GGUFFile) -> torch.dtype | None:
    """What the matrices are stored in, by bytes: FP16, BF16 and FP32 as such; None for quantized
    types, whose values are of no dtype."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    return _PLAIN.get(sizes.most_common(1)[0][0]) if sizes else None


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
