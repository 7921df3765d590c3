"""The CPU kernels of csrc/ as a loaded library, where they have been built.

Called with addresses and sizes; ctypes releases the GIL for the time of a call. The kernels run on
torch's OpenMP threads, so torch must have been imported before.
"""

from __future__ import annotations

import ctypes
from enum import IntFlag
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # noqa: F401  (brings the OpenMP runtime whose threads the kernels use)


class Features(IntFlag):
    """Instruction sets (csrc/octavo.h)."""

    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 4


@cache
def load() -> ctypes.CDLL | None:
    """None where no compiler was found when octavo was installed, or the build is of no use."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("kernels" + suffix)
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                return None
            library.octavo_features.restype = ctypes.c_int64
            return library
    return None


@cache
def features() -> Features:
    """What may be called on this CPU; none without the library."""
    library = load()
    return Features(0) if library is None else Features(library.octavo_features())


def function(name: str, *types: type) -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    """The kernel of that name, whose arguments have these ctypes and which returns nothing."""
    library = load()
    if library is None:
        return None
    found = getattr(library, name)
    found.argtypes, found.restype = types, None
    return found
