"""The CPU kernels of csrc/ as a loaded library, where they have been built.

Called with addresses and sizes; ctypes releases the GIL for the time of a call that takes long. The
kernels run on torch's OpenMP threads, so torch must have been imported before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntFlag
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (brings the OpenMP runtime whose threads the kernels use)

Kernel = Callable[..., Any]
INTERFACE = 7  # OCTAVO_INTERFACE of csrc/octavo.h


class Features(IntFlag):
    """Instruction sets (csrc/octavo.h)."""

    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 4
    AVX512_VNNI = 8
    AMX = 16


Kernels = tuple[tuple[Features, str], ...]  # with what each needs of a CPU, the best one first


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("kernels" + suffix)
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                return None, f"not loaded ({error}), torch computes alone and slower"
            interface = getattr(library, "octavo_interface", None)
            if interface is None or interface() != INTERFACE:
                return None, (
                    "built from other sources, torch computes alone and slower: install octavo "
                    "again"
                )
            library.octavo_features.restype = ctypes.c_int64
            return library, ""
    return None, (
        "not built, torch computes alone and slower: install a C++ compiler (g++) and then octavo "
        "again"
    )


def load() -> ctypes.CDLL | None:
    """None where it was not built, or cannot be used here (``problem``)."""
    return _found()[0]


def problem() -> str:
    """Why there is no library; empty if there is one."""
    return _found()[1]


@cache
def features() -> Features:
    """What may be called on this CPU; none without the library."""
    library = load()
    return Features(0) if library is None else Features(library.octavo_features())


def preferred(kernels: Kernels) -> str | None:
    """The first of the kernels that runs on this CPU."""
    return next((name for needed, name in kernels if needed in features()), None)


@cache
def function(name: str, *types: type) -> Kernel:
    """The function of that name, whose arguments have these ctypes and which returns an int64, if
    anything. To be asked for where there is a library."""
    found: Kernel = _symbol(name)
    found.argtypes, found.restype = types, ctypes.c_int64  # type: ignore[attr-defined]
    return found


@cache
def brief_function(name: str, *types: type) -> Kernel:
    """The same for a function of some microseconds: it keeps the GIL. Another thread that took it
    meanwhile would hold it for hundreds."""
    library = load()
    assert library is not None
    found = ctypes.PyDLL(library._name)[name]
    found.argtypes, found.restype = types, ctypes.c_int64
    return found


@cache
def address(name: str) -> int:
    """Of a kernel, for ``calls.call``. To be asked for where ``features`` names its instruction
    set."""
    found = ctypes.cast(_symbol(name), ctypes.c_void_p).value
    assert found is not None
    return found


def _symbol(name: str) -> Any:
    library = load()
    assert library is not None
    return getattr(library, name)
