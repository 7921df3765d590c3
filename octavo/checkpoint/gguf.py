"""GGUF files: metadata, tensor table and raw tensor bytes, bounds-checked and memory-mapped.

The layout is the GGUF specification, versions 2 and 3, little-endian. The ``gguf`` package is
imported only when the tensor table is asked for (sizes of the quantized types), so that a
tokenizer or a configuration can be read from a file's header in milliseconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.checkpoint.mapped import forget_read
from octavo.checkpoint.split import parts_of
from octavo.types import ConfigError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
MAX_NAME_BYTES = 65_535  # of a metadata key, by the specification; tensors' are shorter

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# Value type of the specification -> its little-endian numpy form.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """An entry of the tensor table. ``shape`` is row-major, ``offset`` is from the start of
    ``file``, which is another part where the model is split."""

    file: Path
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def whole_number(metadata: Mapping[str, Any], key: str, where: str | Path, default: int) -> int:
    """An integer of a file's metadata. Raises ConfigError for a value of another type."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {key} is a {type(value).__name__}, not an integer")
    return value


class GGUFFile:
    """A GGUF file opened for reading; of a split model the first part, which stands for all.

    ``metadata``: key -> int, float, bool, str, list[str], or numpy array for an array of numbers.
    Raises ConfigError, naming the file and the numbers, when it is not a readable GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                start = file.read(len(MAGIC))
            if start != MAGIC:
                raise ConfigError(
                    f"{self.path}: not a GGUF file (begins with {start!r}, not {MAGIC!r})"
                )
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        header = _Header(self.path, self._bytes.data, size)
        version = header.u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "a big-endian file" if swapped in VERSIONS else f"GGUF version {version}"
            raise ConfigError(
                f"{self.path}: {what} is not supported (little-endian versions 2 and 3 are); "
                "convert the model again with a current converter"
            )
        self._num_tensors = header.u64("the tensor count")
        num_pairs = header.u64("the metadata count")
        self.metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            key = header.name(f"metadata key {index} of {num_pairs}")
            self.metadata[key] = header.value(header.u32(key), key)
        self._header = header
        self._tensors_at = header.position

    def _integer(self, key: str, default: int) -> int:
        return whole_number(self.metadata, key, self.path, default)

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The tensor table, in file order, of all parts. Raises ConfigError if a tensor ends beyond
        its file, or a part is absent or another model's."""
        found: dict[str, GGUFTensor] = {}
        for part in self._parts.values():
            for name, tensor in part._own_tensors().items():
                if name in found:
                    raise ConfigError(
                        f"{self.path}: {name} is in both {found[name].file.name} and "
                        f"{tensor.file.name}; fetch the parts again"
                    )
                found[name] = tensor
        total = self._integer("split.tensors.count", len(found))
        if total != len(found):
            raise ConfigError(
                f"{self.path}: its {len(self._parts)} parts hold {len(found)} tensors, the model "
                f"has {total}; fetch the parts again"
            )
        return found

    @cached_property
    def _parts(self) -> dict[Path, GGUFFile]:
        """This file and, of a split model, the others."""
        count = self._integer("split.count", 1)
        if count <= 1:
            return {self.path: self}
        paths = parts_of(self.path)
        if len(paths) != count or self._integer("split.no", 0) != 0:
            raise ConfigError(
                f"{self.path}: one of {count} parts of a split model; name the first, which is "
                f"called NAME-00001-of-{count:05}.gguf"
            )
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ConfigError(
                f"{self.path}: {len(absent)} of {count} parts are absent: {', '.join(absent[:4])}"
            )
        parts = {self.path: self, **{path: GGUFFile(path) for path in paths[1:]}}
        for place, (path, part) in enumerate(parts.items()):
            said = part.metadata.get("split.no"), part.metadata.get("split.count")
            if said != (place, count):
                raise ConfigError(
                    f"{path}: says it is part {said[0]} of {said[1]} (from 0), its name says "
                    f"{place} of {count}; fetch the parts again"
                )
        return parts

    def _own_tensors(self) -> dict[str, GGUFTensor]:
        header = self._header
        header.position = self._tensors_at
        entries = []
        for index in range(self._num_tensors):
            name = header.name(f"tensor name {index} of {self._num_tensors}")
            rank = header.u32(name)
            if rank > MAX_DIMENSIONS:
                raise ConfigError(f"{self.path}: tensor {name} has {rank} dimensions (at most 4)")
            shape = tuple(header.u64(name) for _ in range(rank))[::-1]
            entries.append((name, shape, header.u32(name), header.u64(name)))
        alignment = self._integer("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(
                f"{self.path}: general.alignment is {alignment}; it must be a power of two"
            )
        data_start = -(-header.position // alignment) * alignment
        return {
            name: self._tensor(name, shape, kind, data_start + offset)
            for name, shape, kind, offset in entries
        }

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, begin: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise ConfigError(
                f"{self.path}: tensor {name} has type {type_id}, which this version of the gguf "
                "package does not know; try `pip install -U gguf`"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise ConfigError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} values, no multiple of the "
                f"{kind.name} block of {block}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if begin + num_bytes > self._header.size:
            raise ConfigError(
                f"{self.path}: truncated: tensor {name} ends at byte {begin + num_bytes:,}, the "
                f"file has {self._header.size:,}; fetch it again"
            )
        return GGUFTensor(self.path, name, kind, shape, begin, num_bytes)

    def raw(self, name: str) -> np.ndarray:
        """Stored bytes of a tensor: uint8 [num_bytes], a read-only view of the mapped file."""
        tensor = self.tensors[name]
        data = self._parts[tensor.file]._bytes
        return data[tensor.offset : tensor.offset + tensor.num_bytes]

    def copied(self, name: str) -> np.ndarray:
        """The same in memory of its own; the file's pages no longer count as this process's."""
        tensor, found = self.tensors[name], np.array(self.raw(name))
        data = self._parts[tensor.file]._bytes
        forget_read(data._mmap, tensor.offset, tensor.num_bytes)  # type: ignore[attr-defined]
        return found


class _Header:
    """A cursor over the header. Every read is checked against the file's end."""

    def __init__(self, path: Path, view: memoryview, size: int) -> None:
        self.path = path
        self.view = view
        self.size = size
        self.position = len(MAGIC)

    def take(self, num_bytes: int, what: str) -> int:
        """Advances by ``num_bytes`` and returns where they begin."""
        begin = self.position
        if begin + num_bytes > self.size:
            raise ConfigError(
                f"{self.path}: truncated: {what} needs {num_bytes:,} bytes at byte {begin:,}, the "
                f"file has {self.size:,}; fetch it again"
            )
        self.position = begin + num_bytes
        return begin

    def u32(self, what: str) -> int:
        return int(_u32(self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_u64(self.view, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        begin = self.take(length, what)
        return str(self.view[begin : self.position], "utf-8", "replace")

    def name(self, what: str) -> str:
        """One that may be shown: raises ConfigError for what no converter writes."""
        found = self.string(what)
        if not found.isprintable() or len(found) > MAX_NAME_BYTES:
            raise ConfigError(f"{self.path}: damaged: {what} is {found[:40]!r}; fetch it again")
        return found

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key, depth)
        dtype = self.number_type(kind, key)
        begin = self.take(dtype.itemsize, key)
        return np.frombuffer(self.view, dtype, 1, begin)[0].item()

    def array(self, key: str, depth: int) -> Any:
        kind = self.u32(key)
        count = self.u64(key)
        if kind == _STRING:
            return self.strings(count, key)
        if kind == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise ConfigError(f"{self.path}: {key} nests arrays more than {depth} deep")
            return [self.value(kind, key, depth + 1) for _ in range(count)]
        dtype = self.number_type(kind, key)
        begin = self.take(count * dtype.itemsize, key)
        return np.frombuffer(self.view, dtype, count, begin)

    def strings(self, count: int, key: str) -> list[str]:
        """The vocabulary's path: one tight loop (100,000 strings in about 40 ms)."""
        view, size, position = self.view, self.size, self.position
        found: list[str] = []
        append = found.append
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + _u64(view, position)[0]
                if position > size:
                    break
                append(str(view[begin:position], "utf-8"))
        except struct.error:
            position = size + 1
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.path}: entry {len(found)} of {key} is not UTF-8 ({error.reason})"
            ) from None
        if position > size:
            raise ConfigError(
                f"{self.path}: truncated: {key} has {count:,} entries, the file ({size:,} bytes) "
                f"ends in entry {len(found):,}; fetch it again"
            )
        self.position = position
        return found

    def number_type(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise ConfigError(
                f"{self.path}: {key} has value type {kind}, which GGUF does not define"
            )
        return _NUMBERS[kind]
