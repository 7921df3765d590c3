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
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.checkpoint.mapped import forget
from octavo.model.families.family import Family
from octavo.model.loader.shards import Headers, Stored, check_size, read_checkpoint
from octavo.model.loader.source import translate
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
        self._names = family.hf_names
        self._stored = stored
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}
        self.dtype = _commonest(self._stored)
        self._uploader = uploader
        self._maps: dict[Path, mmap.mmap] = {}

    def stored_name(self, name: str) -> str:
        return translate(name, self._names)

    def count_groups(self) -> tuple[int, int]:
        return 0, 0

    def keeps_groups(self, name: str) -> bool:
        return False

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
        return sum(map(math.prod, shapes.values())) * dtype.itemsize

    def fetch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        stored = self._stored[self.stored_name(name)]
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{stored.file}: {self.stored_name(name)} is {stored.dtype}; "
                f"this version reads {', '.join(_DTYPES)}"
            )
        kind = _DTYPES[stored.dtype]
        if self._uploader is None:
            return lambda: self._copied(stored, dtype).view(shape)
        raw = self._uploader.begin(stored.file, stored.offset, stored.num_bytes)
        return lambda: raw().view(kind).view(shape).to(dtype)

    def close(self) -> None:
        self._maps.clear()
        if self._uploader is not None:
            self._uploader.close()

    def _copied(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Flat, in memory of its own; the file's pages no longer count as this process's."""
        data = self._maps.get(stored.file)
        if data is None:
            with stored.file.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[stored.file] = data
        kind, count = _DTYPES[stored.dtype], math.prod(stored.shape)
        values = torch.frombuffer(data, dtype=kind, count=count, offset=stored.offset)
        copy = values.to(dtype, copy=True)
        del values
        forget(data, stored.offset, stored.num_bytes)
        return copy


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
            tensors[name] = Stored(
                file, entry["dtype"], tuple(entry["shape"]), 8 + length + low, high - low
            )
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a safetensors file: damaged header ({error})") from error
    for name, stored in tensors.items():
        check_size(name, stored)
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
