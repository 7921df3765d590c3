"""The checkpoint that is to be quantized: its weights by our names, and the tensors that are passed
on as they are.

A GGUF file is read as what it stands for, and passed on under the names that the family has in
safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.model.decoder import Model
from octavo.model.facts import is_gguf, read_config
from octavo.model.families.catalogue import family_of
from octavo.model.families.names import Place, find
from octavo.model.layer import Part
from octavo.model.loader.headers import read_safetensors
from octavo.model.loader.load import open_source
from octavo.model.loader.pickled import read_pickled
from octavo.model.loader.shards import Headers
from octavo.model.loader.source import WHOLE, Share, check_complete
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE = 64 << 20


@dataclass(frozen=True)
class Passed:
    """A tensor that is passed on: ``chunks`` gives its bytes. ``dtype``: in safetensors' names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterator[bytes]


class Source:
    """``config``: in the words of a config.json. Raises ConfigError, in one line, for a checkpoint
    that cannot be quantized."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.is_gguf = is_gguf(path)
        self.config: dict[str, Any] = read_config(path)
        if not self.is_gguf and read_scheme(self.config, path, str(path)) is not None:
            raise ConfigError(
                f"{path}: is quantized already: quantize the original, whose weights are whole "
                "(only a GGUF file's are expanded first)"
            )
        # Of a GGUF file, FP32 asks for expanded weights.
        settings = ModelConfig(model=str(path), dtype="float32")
        self._source = open_source(path, settings, device)
        self.spec = self._source.spec
        self.dtype = self._source.dtype or torch.bfloat16
        self._family = family_of(self.config, str(path))
        self._stored: Headers = {} if self.is_gguf else _headers(path)
        self._shares: dict[str, Share] = {}
        self._wanted: dict[str, tuple[int, ...]] = {}

    def check(self, model: Model) -> None:
        """That everything the model needs is there."""
        self._wanted = {name: shape for part in model.parts() for name, shape in part.wanted()}
        self._shares = check_complete(self._source, self._wanted)
        if self.is_gguf:
            self._check_names()
        kinds = {kind for kind in (t.dtype for t in self._stored.values()) if kind not in DTYPES}
        if kinds:
            raise ConfigError(
                f"{self.path}: holds tensors in {', '.join(sorted(kinds))}; weights in "
                f"{', '.join(DTYPES)} can be quantized"
            )

    def _check_names(self) -> None:
        """Raises ConfigError where a GGUF file holds what is kept in another way elsewhere: experts
        stacked, divisors of rotary frequencies."""
        for name in self._wanted:
            try:
                self.place(name)
            except KeyError:
                raise ConfigError(
                    f"{self.path}: {name} has no place of its own in a safetensors checkpoint; "
                    "quantize the model's safetensors checkpoint, or to a gguf-… format"
                ) from None

    def fetch(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Our tensor of that name, dense, on the device."""
        share = self._shares.get(name, WHOLE)
        found = self._source.fetch(name, self._wanted[name], dtype, share)()
        return found if isinstance(found, Tensor) else found.dense().to(dtype)

    def fetch_part(self, part: Part, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {name: self.fetch(name, dtype) for name, _ in part.wanted()}

    def place(self, name: str) -> Place:
        """Where our tensor lies in the checkpoint that is written, suffix included."""
        return find(name, self._family.hf_names) if self.is_gguf else self._source.place(name)

    def first(self, name: str) -> int:
        """Which of its stored tensor's outputs is our tensor's first."""
        return self._shares.get(name, WHOLE).first

    def passed(self, replaced: Mapping[str, object]) -> Iterator[Passed]:
        """All tensors but those called ``replaced``."""
        if self.is_gguf:
            yield from self._renamed(replaced)
            return
        for name, stored in self._stored.items():
            if name not in replaced:
                chunks = _pieces(stored.file, stored.offset, stored.num_bytes)
                yield Passed(name, stored.dtype, stored.shape, chunks)

    def _renamed(self, replaced: Mapping[str, object]) -> Iterator[Passed]:
        kind = next(key for key, dtype in DTYPES.items() if dtype == self.dtype)
        for name in self._wanted:
            place = self.place(name)
            if place.name not in replaced:
                values = self.as_stored(name, self.fetch(name))
                yield Passed(place.name, kind, tuple(values.shape), iter([raw_bytes(values)]))

    def as_stored(self, name: str, values: Tensor) -> Tensor:
        """Our tensor as the checkpoint that is written has it: its dtype, what it leaves out."""
        place = self.place(name)
        dtype = self.dtype
        if not self.is_gguf:
            dtype = DTYPES[self._stored[place.name].dtype]
        values = (values.float() - place.plus).to(dtype)
        return values.T.contiguous() if place.transposed and values.dim() == 2 else values

    def as_read(self, name: str, values: Tensor) -> Tensor:
        """What is read of our tensor once it is stored: FP32."""
        return self.as_stored(name, values).float() + self.place(name).plus

    def close(self) -> None:
        self._source.close()


def _headers(path: Path) -> Headers:
    found: Headers = read_safetensors(path)
    return found or read_pickled(path)


def _pieces(file: Path, offset: int, num_bytes: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(offset)
        while num_bytes:
            piece = stream.read(min(num_bytes, _PIECE))
            if not piece:
                raise ConfigError(f"{file}: ends too early; was it changed meanwhile?")
            num_bytes -= len(piece)
            yield piece


def raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
