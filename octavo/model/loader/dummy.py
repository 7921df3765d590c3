"""Random weights from a config.json alone: for benchmarks and tests of any shape."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from octavo.model.families.names import Names, Place
from octavo.model.loader.source import WHOLE, Share, StoredAs
from octavo.model.quantization import DENSE, Quantization
from octavo.model.spec import DecoderSpec
from octavo.ops.weights import QuantizedWeight, Weight
from octavo.quant.format import CheckpointFormat
from octavo.quant.gptq import GPTQ
from octavo.types import ConfigError

# Of formats whose codes may be any bits.
_RANDOM = {
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
_POOL = 1_000_003  # a prime: tiled rows of any width differ


class DummySource:
    """Seeded: matrices N(0, 1 / in), norms 1, biases small; a tensor of a name is the same for the
    same seed and device, whatever others a rank has.

    On a CPU numbers are cut from a pool of a million; a GPU draws each one, where it will lie.
    """

    shapes = None
    names: ClassVar[Names] = {}

    def __init__(
        self,
        path: Path,
        spec: DecoderSpec,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        quantization: Quantization = DENSE,
    ) -> None:
        self.quantization = quantization
        self.where = str(path)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)
        if device == "cpu":
            self._pool = torch.randn(_POOL, generator=self._generator)

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def place(self, name: str) -> Place:
        return Place(name)

    def count_groups(self) -> tuple[int, int]:
        return 0, 0

    def is_quantized(self, name: str) -> bool:
        return self._format_of(name) is not None

    def stored_as(self, name: str, shape: tuple[int, ...]) -> StoredAs:
        return {name: (shape,)}

    def is_needless(self, name: str) -> bool:
        return False

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        return sum(self._bytes_of(name, shape, itemsize) for name, shape in shapes.items())

    def _bytes_of(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        found = self._format_of(name) if len(shape) == 2 else None
        return found.bytes_of(*shape) if found else math.prod(shape) * itemsize

    def _format_of(self, name: str) -> CheckpointFormat | None:
        """Random weights are in the scheme that the config names."""
        scheme = self.quantization.scheme
        module = name.removesuffix(".weight")
        is_matrix = module != name and module.split(".")[-1] not in ("embed", "head", "router")
        return scheme.format_of(module) if scheme and is_matrix and "norm" not in module else None

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, share: Share = WHOLE
    ) -> Callable[[], Weight]:
        found = self._format_of(name) if len(shape) == 2 else None
        if found is not None:
            return partial(self._quantized, name, found, shape)
        return partial(self._make, name, shape, dtype)

    def _quantized(self, name: str, found: CheckpointFormat, shape: tuple[int, ...]) -> Weight:
        """Codes of random bits, scales of one size."""
        self._generator.manual_seed(self._seed_of(name))
        tensors = {}
        rows, inputs = shape
        for tensor in found.tensors():
            if tensor.optional:
                continue
            size = tensor.shape(rows, inputs)
            kind = next((kind for kind in ("F16", *tensor.kinds) if kind in tensor.kinds), "")
            if -1 in size or kind not in _RANDOM:
                raise ConfigError(
                    f"{self.where}: --load-format dummy: no random weights in {found.name}; "
                    "leave quantization_config out, or round them with --quantization"
                )
            tensors[tensor.suffix] = self._random(size, _RANDOM[kind], inputs)
        weight = found.read(tensors, rows, inputs)
        if isinstance(found, GPTQ) and found.symmetric and isinstance(weight, QuantizedWeight):
            return replace(weight, zero=1 << (found.bits - 1), zeros=None)  # random ones differ
        return weight

    def _random(self, size: tuple[int, ...], dtype: torch.dtype, inputs: int) -> Tensor:
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.full(size, 1 / (8 * math.sqrt(inputs)), dtype=dtype, device=self.device)
        count = (*size[:-1], size[-1] * dtype.itemsize) if size else (1,)
        top = 256 if not dtype.is_floating_point else 64  # below FP8's largest
        drawn = torch.empty(count, dtype=torch.uint8, device=self.device)
        return drawn.random_(0, top, generator=self._generator).view(dtype)

    def _seed_of(self, name: str) -> int:
        return (self._seed + zlib.crc32(name.encode())) % 2**64

    def close(self) -> None:
        pass

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight") or name.startswith("rope_factors"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.02
        if self.device != "cpu":
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            self._generator.manual_seed(self._seed_of(name))
            return empty.normal_(0.0, scale, generator=self._generator)
        count = math.prod(shape)
        pool = self._pool.roll(-self._seed_of(name) % _POOL).mul_(scale).to(dtype)
        return pool.repeat(-(-count // _POOL))[:count].view(shape).clone()
