"""Safetensors checkpoints (one file, shards with an index, several files without one), and files
of other kinds whose tensors lie in them as plain bytes (``pickled``).

Headers are read here (format: https://github.com/huggingface/safetensors), so that a fault is told
before memory is taken. For a CPU data is memory-mapped; to a GPU ``loader.upload`` brings it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoint.mapped import forget_read
from octavo.model.families.family import Family
from octavo.model.families.names import Place, find
from octavo.model.loader.experts import Piece, StoredExperts
from octavo.model.loader.shards import (
    Headers,
    Stored,
    check_apart,
    check_place,
    check_size,
    read_checkpoint,
    same_bytes,
)
from octavo.model.loader.upload import Uploader
from octavo.model.spec import DecoderSpec
from octavo.types import ConfigError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_SINGLE, _PATTERN = "model.safetensors", "*.safetensors"


class SafetensorsSource:
    def __init__(
        self,
        path: Path,
        spec: DecoderSpec,
        family: Family,
        stored: Headers,
        uploader: Uploader | None = None,
    ) -> None:
        """``stored``: where each tensor's bytes are, in files of any kind that keeps them as they
        are. ``uploader``: to the device that is not the CPU."""
        self.where = str(path)
        self.spec = spec
        self.names = family.hf_names
        self._stored = stored
        self._base = family.base
        self._bare = not any(name.startswith(family.base) for name in self._stored)
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self.dtype = _commonest(self._stored)
        left_out = family.base if self._bare else ""
        self._experts = StoredExperts(spec, family.experts, self._stored, left_out)
        self._uploader = uploader
        self._maps: dict[Path, mmap.mmap] = {}
        self._check_tied()

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        return self._experts.pieces(name, shape)

    def place(self, name: str) -> Place:
        place = find(name, self.names)
        return replace(place, name=place.name.removeprefix(self._base)) if self._bare else place

    def count_groups(self) -> tuple[int, int]:
        return 0, 0

    def keeps_groups(self, name: str) -> bool:
        return False

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
        return sum(map(math.prod, shapes.values())) * dtype.itemsize

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0
    ) -> Callable[[], Tensor]:
        if pieces := self.expert_pieces(name, shape):
            return self._fetch_expert(name, pieces, dtype)
        place = self.place(name)
        tensor = self._stored[place.name]
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

    def _fetch_expert(
        self, name: str, pieces: Sequence[Piece], dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        calls = [self._fetch_raw(self._stored[piece.name], piece) for piece in pieces]
        return lambda: self._experts.joined(name, [call() for call in calls], dtype)

    def _fetch_raw(self, tensor: Stored, piece: Piece) -> Callable[[], Tensor]:
        """The piece's numbers as they are stored, in memory of its own."""
        kind = _kind(tensor, piece.name, {"U8": torch.uint8} if piece.packed else _DTYPES)
        if piece.index is not None:
            tensor = _rows(tensor, piece.index, (1, *piece.own_shape))
        if self._uploader is None:
            return lambda: self._copied(tensor, lambda x: x.view(kind).view(piece.own_shape), kind)
        raw = self._uploader.begin(tensor.file, tensor.offset, tensor.num_bytes)
        return lambda: raw().view(kind).view(piece.own_shape)

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


def _commonest(tensors: Mapping[str, Stored]) -> torch.dtype | None:
    """By bytes: norms are often kept in FP32 beside 16-bit matrices."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return _DTYPES.get(sizes.most_common(1)[0][0]) if sizes else None


def read_safetensors(directory: Path) -> dict[str, Stored]:
    """Every stored tensor by name; {} where there is no safetensors file. Raises ConfigError for a
    truncated or damaged file, and as ``read_checkpoint`` does."""
    return read_checkpoint(directory, _SINGLE, _PATTERN, _read_header)


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise ConfigError(
                    f"{file}: truncated: the header needs {length + 8} bytes, the file has {size}"
                )
            header = json.loads(stream.read(length), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            check_place(file, name, entry["dtype"], entry["shape"], entry["data_offsets"])
            tensors[name] = Stored(
                file, entry["dtype"], tuple(entry["shape"]), 8 + length + low, high - low
            )
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a safetensors file: damaged header ({error})") from error
    for name, stored in tensors.items():
        check_size(name, stored)
    check_apart(file, tensors)
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    if end > size:
        raise ConfigError(
            f"{file}: truncated: {size} bytes, its tensors need {end}; download it again"
        )
    return tensors


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is in it twice")
    return found
