"""The KV caches of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages are taken from the system when first written (NumPy asks calloc,
    torch.zeros writes them all): gigabytes are there at once. They start a cache line, which
    calloc's do not: a kernel's vector should lie in one."""
    size = math.prod(shape) * dtype.itemsize
    found = torch.from_numpy(np.zeros(size + CACHE_LINE, dtype=np.uint8))
    start = -found.data_ptr() % CACHE_LINE
    return found[start : start + size].view(dtype).view(shape)


def allocate(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """One cache per layer. Zeros: masked places are multiplied by 0, so must be finite."""
    if device == "cpu":
        return [zeros_on_demand(shape, dtype) for shape in shapes]
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def alike(caches: Sequence[Tensor]) -> list[list[Tensor]]:
    """The caches by the size of their blocks: layers may differ in heads, or in kind."""
    found: dict[int, list[Tensor]] = {}
    for cache in caches:
        found.setdefault(cache.nbytes // len(cache), []).append(cache)
    return list(found.values())
