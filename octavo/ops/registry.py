"""Operations and their versions. One is chosen per operation at start-up and printed; nothing
falls back inside a step.

The first version registered for an operation is its definition: plain torch that is obviously
right, which documents the operation, tests the other versions and runs where none of them can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch

_DEFINITIONS = (
    "octavo.ops.norm",
    "octavo.ops.activation",
    "octavo.ops.add",
    "octavo.ops.linear",
    "octavo.ops.quantized",
    "octavo.ops.weight_only",
    "octavo.ops.float8",
    "octavo.ops.tables",
    "octavo.ops.rows",
    "octavo.ops.attention",
    "octavo.ops.mla",
    "octavo.ops.moe",
)
# Imported where the device is used: importing Triton takes a third of a second.
_BY_DEVICE: dict[str, tuple[str, ...]] = {
    "cpu": (
        "octavo.ops.cpu.norm",
        "octavo.ops.cpu.linear",
        "octavo.ops.cpu.attention",
        "octavo.ops.cpu.mla",
        "octavo.ops.native.norm",
        "octavo.ops.native.pointwise",
        "octavo.ops.native.linear",
        "octavo.ops.native.expanded",
        "octavo.ops.native.rows",
        "octavo.ops.native.attention",
        "octavo.ops.cpu.moe",
    ),
    "cuda": (
        "octavo.ops.triton.norm",
        "octavo.ops.triton.linear",
        "octavo.ops.triton.fixed_linear",
        "octavo.ops.triton.weight_only",
        "octavo.ops.triton.float8",
        "octavo.ops.triton.int8",
        "octavo.ops.triton.embedding",
        "octavo.ops.triton.blocks",
        "octavo.ops.triton.attention",
        "octavo.ops.triton.fixed_attention",
        "octavo.ops.fa3",
        "octavo.ops.triton.latent_attention",
        "octavo.ops.triton.moe_route",
        "octavo.ops.triton.moe",
    ),
}
_ORDER = (*_DEFINITIONS, *(module for modules in _BY_DEVICE.values() for module in modules))
# Whether a row's result is the same bits whatever the rest of the batch and the row's place in it:
# "no", "yes", or "at a price", which only --deterministic pays.
Invariance = Literal["no", "yes", "at a price"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Version:
    """``tolerance``: largest error against the definition in FP64, relative to the largest value,
    in units of the dtype's epsilon."""

    op: str
    name: str
    call: Callable[..., Any]
    available: Callable[[str, torch.dtype], bool]
    tolerance: float
    batch_invariant: Invariance


_versions: dict[str, list[Version]] = {}


def register(
    op: str,
    name: str,
    available: Callable[[str, torch.dtype], bool] = lambda device, dtype: True,
    tolerance: float = 4.0,
    batch_invariant: Invariance = "no",
) -> Callable[[F], F]:
    """Adds a function or class as a version of ``op``; the last one available is preferred, in the
    order of the modules above, whichever was imported first."""

    def add(call: F) -> F:
        version = Version(op, name, call, available, tolerance, batch_invariant)
        found = _versions.setdefault(op, [])
        found.append(version)
        found.sort(key=_rank)
        return call

    return add


def _rank(version: Version) -> int:
    module = version.call.__module__
    return _ORDER.index(module) if module in _ORDER else len(_ORDER)


def versions(op: str, device: str = "cpu") -> list[Version]:
    """The versions of an operation that exist where ``device`` ("cpu", "cuda") is used, its
    definition first. Whether one runs there is its ``available``."""
    modules = _BY_DEVICE[device]
    if device == "cuda" and find_spec("triton") is None:
        modules = ()
    for module in (*_DEFINITIONS, *modules):
        import_module(module)
    return _versions[op]


def operations() -> list[str]:
    for module in _DEFINITIONS:
        import_module(module)
    return list(_versions)


def runnable(
    op: str, device: str, dtype: torch.dtype, deterministic: bool = False
) -> list[Version]:
    """The versions that run on ``device`` ("cpu", "cuda") with ``dtype``, the preferred one last.
    ``deterministic``: those that are batch-invariant, which may be none."""
    other = "no" if deterministic else "at a price"
    found = [v for v in versions(op, device) if v.batch_invariant != other]
    return [v for v in found if v.available(device, dtype)]


def select(op: str, device: str, dtype: torch.dtype) -> Version:
    """The preferred version that runs on ``device`` ("cpu", "cuda") with ``dtype``."""
    return runnable(op, device, dtype)[-1]
