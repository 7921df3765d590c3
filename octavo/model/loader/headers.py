"""What the headers of a checkpoint say of its tensors: which there are, and what each of ours takes
once it is packed. Never imports torch.

Safetensors' format: https://github.com/huggingface/safetensors. Headers are read before anything
else, so that a fault is told before memory is taken.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path

from octavo.checkpoint.gguf import GGUFFile
from octavo.model.families.family import Family
from octavo.model.families.names import Place, find
from octavo.model.loader.experts import Piece, StoredExperts
from octavo.model.loader.gguf_kinds import KINDS, bytes_per_value
from octavo.model.loader.projections import StoredProjections
from octavo.model.loader.shards import (
    Headers,
    Stored,
    check_apart,
    check_place,
    check_size,
    read_checkpoint,
)
from octavo.model.loader.source import StoredAs
from octavo.model.spec import DecoderSpec
from octavo.quant.scheme import Scheme
from octavo.types import ConfigError

FLOATS = ("F32", "F16", "BF16", "F64")
_SINGLE, _PATTERN = "model.safetensors", "*.safetensors"


class StoredHeaders:
    """Of a safetensors checkpoint. ``commonest``: the type of most of its dense numbers, by bytes;
    None where it has none."""

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec,
        family: Family,
        stored: Headers,
        scheme: Scheme | None = None,
    ) -> None:
        """``stored``: where each tensor's bytes are, in files of any kind that keeps them as they
        are; none at all: there is but a config.json, and weights would be stored as it says."""
        self.where = str(path)
        self.spec = spec
        self.names = family.hf_names
        self._stored = stored
        self._base = family.base
        self._places: dict[str, Place] = {}
        self._bare = not any(name.startswith(family.base) for name in self._stored)
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self.commonest = _commonest(self._stored)
        left_out = family.base if self._bare else ""
        self._projections = StoredProjections(scheme, self._stored, self.where, left_out)
        self._experts = StoredExperts(spec, family.experts, self._stored, left_out)

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        return self._experts.pieces(name, shape)

    def form_of(self, name: str, shape: tuple[int, ...]) -> Hashable:
        """What tells how our tensor is stored: those with the same take the same memory."""
        return tuple(map(self._projections.format_of, self._names_of(name, shape)))

    def place(self, name: str) -> Place:
        if name not in self._places:
            place = find(name, self.names)
            bare = place.name.removeprefix(self._base) if self._bare else place.name
            self._places[name] = replace(place, name=bare)
        return self._places[name]

    def count_groups(self) -> tuple[int, int]:
        return 0, 0

    def is_quantized(self, name: str) -> bool:
        names = self._names_of(name, (0, 0))
        return all(self._projections.format_of(stored) for stored in names)

    def stored_as(self, name: str, shape: tuple[int, ...]) -> StoredAs:
        return self._projections.stored_as(name, shape)

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        return sum(self._bytes_of(name, shape, itemsize) for name, shape in shapes.items())

    def _bytes_of(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        """Parts of a stored projection take their share of it."""
        names = self._names_of(name, shape)
        if len(shape) == 2 and all(map(self._projections.format_of, names)):
            return self._projections.bytes_of(names[0], shape)
        return math.prod(shape) * itemsize

    def _names_of(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Of the stored tensors that our tensor ``name`` would come from, were it dense."""
        pieces = self.expert_pieces(name, shape)
        return [piece.name for piece in pieces] or [self.place(name).name]


class GGUFHeaders:
    """Of a GGUF file. ``in_groups``: quantized matrices are kept as they are stored, where the
    kernels know their type. ``commonest``: as ``StoredHeaders``, None for quantized types."""

    def __init__(
        self, file: GGUFFile, spec: DecoderSpec, family: Family, in_groups: bool = False
    ) -> None:
        self.where = str(file.path)
        self.spec = spec
        self.names = family.gguf_names
        self._file = file
        self.shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        self._experts = StoredExperts(spec, family.gguf_experts, self.shapes)
        self._in_groups = in_groups

    @property
    def commonest(self) -> str | None:
        sizes: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            sizes[tensor.type.name] += tensor.num_bytes
        found = sizes.most_common(1)[0][0] if sizes else None
        return found if found in FLOATS[:3] else None

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

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        size: float = itemsize
        kinds = set().union(*(self._kinds_of(name, shape) for name, shape in shapes.items()))
        if self._in_groups and kinds and kinds <= set(KINDS):
            size = bytes_per_value(kinds)
        return int(sum(map(math.prod, shapes.values())) * size)

    def form_of(self, name: str, shape: tuple[int, ...]) -> Hashable:
        """As ``StoredHeaders.form_of``."""
        return frozenset(self._kinds_of(name, shape))

    def _kinds_of(self, name: str, shape: tuple[int, ...]) -> set[str]:
        """The GGML types of what our tensor ``name`` comes from."""
        pieces = self.expert_pieces(name, shape)
        names = [piece.name for piece in pieces] or [self.place(name).name]
        return {self._file.tensors[stored].type.name for stored in names}


def _commonest(tensors: Mapping[str, Stored]) -> str | None:
    """Of what is dense, by bytes: norms are often kept in FP32 beside 16-bit matrices."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else None


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
