"""Writes a checkpoint as safetensors files of a bounded size, with their index, tensor by tensor.

Format: https://github.com/huggingface/safetensors. A header stands before the data and is known
only when a file is full: data is written to a file of its own first, then copied behind its header.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from octavo.quantize.source import raw_bytes

LARGEST_SHARD = 5 * 10**9
_HELD = 1 << 20
INDEX = "model.safetensors.index.json"
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class CheckpointWriter:
    """Into ``directory``, which is there. ``finish`` makes the files; what is not finished leaves
    files of other names."""

    def __init__(self, directory: Path, largest: int = LARGEST_SHARD) -> None:
        self.directory = directory
        self.num_bytes = 0
        self._largest = largest
        self._shards: list[tuple[Path, list[str]]] = []
        self._entries: dict[str, dict[str, Any]] = {}
        self._data: BinaryIO | None = None
        self._names: set[str] = set()
        self._odd: list[tuple[str, str, tuple[int, ...], bytes]] = []  # of no multiple of 8 bytes

    def add(self, name: str, tensor: Tensor) -> None:
        kind, shape = _KINDS[tensor.dtype], tuple(tensor.shape)
        self.add_raw(name, kind, shape, [raw_bytes(tensor)], tensor.numel() * tensor.itemsize)

    def add_raw(
        self, name: str, kind: str, shape: tuple[int, ...], chunks: Iterable[bytes], size: int
    ) -> None:
        """``kind``: in safetensors' names; ``size``: bytes of all chunks."""
        if name in self._names:
            raise ValueError(f"{name} is written twice")
        self._names.add(name)
        if size % 8 and size < _HELD:  # last, so that all others lie at multiples of 8
            self._odd.append((name, kind, shape, b"".join(chunks)))
            return
        self._append(name, kind, shape, chunks, size)

    def _append(
        self, name: str, kind: str, shape: tuple[int, ...], chunks: Iterable[bytes], size: int
    ) -> None:
        if self._data is not None and self._data.tell() + size > self._largest:
            self._close_shard()
        if self._data is None:
            self._data = self._path("data").open("wb")
        begin = self._data.tell()
        for chunk in chunks:
            self._data.write(chunk)
        end = self._data.tell()
        if end - begin != size:
            raise ValueError(f"{name}: {end - begin} bytes, not {size}")
        self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        self.num_bytes += size

    def finish(self) -> list[Path]:
        """The files that hold tensors, under their last names."""
        for name, kind, shape, data in sorted(self._odd, key=lambda odd: -_alignment(len(odd[3]))):
            self._append(name, kind, shape, [data], len(data))
        if self._data is not None:
            self._close_shard()
        count = len(self._shards)
        files: list[Path] = []
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            file = "model.safetensors" if count == 1 else _shard_name(number, count)
            path.rename(self.directory / file)
            files.append(self.directory / file)
            places |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
            (self.directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        return files

    def _path(self, kind: str) -> Path:
        return self.directory / f"unfinished-{len(self._shards) + 1}.{kind}"

    def _close_shard(self) -> None:
        assert self._data is not None
        self._data.close()
        header = header_bytes(self._entries)
        target, data = self._path("safetensors"), self._path("data")
        with target.open("wb") as file, data.open("rb") as source:
            file.write(header)
            shutil.copyfileobj(source, file, 16 << 20)
            file.flush()
            os.fsync(file.fileno())
        data.unlink()
        self._shards.append((target, list(self._entries)))
        self._entries, self._data = {}, None


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """The length of the header, and the header, filled up with spaces to a multiple of 8."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _alignment(size: int) -> int:
    """The largest power of 2 that divides it."""
    return size & -size


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"
