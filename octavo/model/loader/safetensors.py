"""Safetensors checkpoints (one file, shards with an index, several files without one), and files
of other kinds whose tensors lie in them as plain bytes (``pickled``).

Their headers are read by ``loader.headers``. For a CPU data is memory-mapped; to a GPU
``loader.upload`` brings it.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoint.mapped import forget_read
from octavo.model.families.family import Family
from octavo.model.families.names import Place
from octavo.model.loader.experts import Piece
from octavo.model.loader.headers import StoredHeaders
from octavo.model.loader.shards import Headers, Stored, same_bytes
from octavo.model.loader.source import WHOLE, Share
from octavo.model.loader.upload import Uploader
from octavo.model.quantization import DENSE, Quantization
from octavo.model.spec import DecoderSpec
from octavo.ops.weights import Weight
from octavo.types import ConfigError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
# Beside them, of quantized projections.
_CODES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Scales of what attention gets or keeps, which a cache of other numbers does without.
_KV_SCALE = re.compile(
    r".*\.(attn|self_attn|attention|[a-z]+_proj)\.([qkv]_scale|kv_scale|(prob_)?output_scale)"
)


class SafetensorsSource(StoredHeaders):
    def __init__(
        self,
        path: Path,
        spec: DecoderSpec,
        family: Family,
        stored: Headers,
        uploader: Uploader | None = None,
        quantization: Quantization = DENSE,
    ) -> None:
        """``stored``: where each tensor's bytes are, in files of any kind that keeps them as they
        are. ``uploader``: to the device that is not the CPU."""
        super().__init__(path, spec, family, stored, quantization.scheme)
        self.quantization = quantization
        self.dtype = None if self.commonest is None else _DTYPES[self.commonest]
        self._uploader = uploader
        self._maps: dict[Path, mmap.mmap] = {}
        self._check_tied()

    def is_needless(self, name: str) -> bool:
        """Scales of the KV cache (``loader.kv_scales``), and biases, which AutoGPTQ gives every
        projection: zeros, where the model has none."""
        tensor = self._stored[name]
        if _KV_SCALE.fullmatch(name):
            return True
        if not self._projections.is_spare(name):
            return False
        return not self._copied(tensor, lambda values: values, torch.uint8).any()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A stored tensor of floating point numbers, on the CPU."""
        tensor = self._stored[name]
        kind = _kind(tensor, name, _DTYPES)
        return self._copied(tensor, lambda x: x.view(kind).view(tensor.shape), dtype)

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, share: Share = WHOLE
    ) -> Callable[[], Weight]:
        if pieces := self.expert_pieces(name, shape):
            return self._fetch_expert(name, pieces, dtype)
        place = self.place(name)
        if self._projections.format_of(place.name):
            return self._fetch_quantized(place, shape, share)
        tensor, first = self._stored[place.name], share.first
        kind = _kind(tensor, place.name, _DTYPES)
        turned = place.transposed and len(shape) == 2  # of which all is read
        if not turned:
            tensor = _rows(tensor, first, shape)

        def ours(values: Tensor) -> Tensor:
            values = values.view(kind).view(tensor.shape)
            if turned:
                values = values[:, first : first + shape[0]].t()
            return values.float() + place.plus if place.plus else values

        if self._uploader is None:
            return lambda: self._copied(tensor, ours, dtype)
        raw = self._uploader.begin(tensor.file, tensor.offset, tensor.num_bytes)
        return lambda: ours(raw()).to(dtype).contiguous()

    def _fetch_quantized(
        self, place: Place, shape: tuple[int, ...], share: Share = WHOLE
    ) -> Callable[[], Weight]:
        """All of a stored projection is read, though some outputs be wanted."""
        if place.transposed:
            raise ConfigError(
                f"{self.where}: {place.name}: this family keeps its matrices transposed, which is "
                "not read from quantized checkpoints"
            )
        whole = (share.rows or shape[0], shape[1])
        calls = {
            suffix: self._fetch_raw(tensor, _kind(tensor, f"{place.name} ({suffix})", _ALL))
            for suffix, tensor in self._projections.tensors_of(place.name).items()
        }

        def weight() -> Weight:
            found = self._projections.weight(place.name, calls, whole, share.parts)
            if whole[0] == shape[0]:
                return found
            return found[share.first : share.first + shape[0]]

        return weight

    def _fetch_expert(
        self, name: str, pieces: Sequence[Piece], dtype: torch.dtype
    ) -> Callable[[], Weight]:
        calls = [self._fetch_piece(piece) for piece in pieces]
        return lambda: self._experts.joined(name, [call() for call in calls], dtype)

    def _fetch_piece(self, piece: Piece) -> Callable[[], Weight]:
        """Its numbers as they are stored, in memory of its own."""
        if piece.index is None and self._projections.format_of(piece.name):
            return self._fetch_quantized(Place(piece.name), piece.shape)
        tensor = self._stored[piece.name]
        kind = _kind(tensor, piece.name, {"U8": torch.uint8} if piece.packed else _DTYPES)
        if piece.index is not None:
            tensor = _rows(tensor, piece.index, (1, *piece.own_shape))
            tensor = replace(tensor, shape=piece.own_shape)
        return self._fetch_raw(tensor, kind)

    def _fetch_raw(self, tensor: Stored, kind: torch.dtype) -> Callable[[], Tensor]:
        """In memory of its own."""
        if self._uploader is None:
            return lambda: self._copied(tensor, lambda x: x.view(kind).view(tensor.shape), kind)
        raw = self._uploader.begin(tensor.file, tensor.offset, tensor.num_bytes)
        return lambda: raw().view(kind).view(tensor.shape)

    def _check_tied(self) -> None:
        """Raises ConfigError where the config ties the head to an embedding that differs from it:
        transformers would not tie them then, other loaders leave the head out."""
        names = [self.place(f"{part}.weight").name for part in ("head", "embed")]
        if not self.spec.embedding.tied or not all(name in self._stored for name in names):
            return
        if not same_bytes(*(self._stored[name] for name in names)):
            raise ConfigError(
                f"{self.where}: tie_word_embeddings holds, but {names[0]} differs from {names[1]}; "
                "use it with --hf-overrides.tie_word_embeddings false, or remove it from the file"
            )

    def close(self) -> None:
        self._maps.clear()
        if self._uploader is not None:
            self._uploader.close()

    def _copied(
        self, tensor: Stored, ours: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """``ours`` of the stored bytes, in memory of its own; the file's pages no longer count as
        this process's."""
        if (
            not tensor.num_bytes
        ):  # no buffer can be made of nothing: outliers of which there are none
            return ours(torch.empty(0, dtype=torch.uint8)).to(dtype)
        data = self._maps.get(tensor.file)
        if data is None:
            with tensor.file.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[tensor.file] = data
        values = torch.frombuffer(
            data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset
        )
        copy = ours(values).to(dtype, copy=True, memory_format=torch.contiguous_format)
        del values
        forget_read(data, tensor.offset, tensor.num_bytes)
        return copy


_ALL = {**_DTYPES, **_CODES}


def _kind(tensor: Stored, name: str, kinds: Mapping[str, torch.dtype]) -> torch.dtype:
    if tensor.dtype not in kinds:
        raise ConfigError(
            f"{tensor.file}: {name} is {tensor.dtype}; this version reads {', '.join(kinds)}"
        )
    return kinds[tensor.dtype]


def _rows(tensor: Stored, first: int, shape: tuple[int, ...]) -> Stored:
    """``shape[0]`` of its rows, from ``first`` on."""
    row = tensor.num_bytes // tensor.shape[0]
    offset, num_bytes = tensor.offset + first * row, shape[0] * row
    return replace(tensor, shape=shape, offset=offset, num_bytes=num_bytes)
