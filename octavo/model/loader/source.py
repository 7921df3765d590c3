"""Where weights come from: what every kind of checkpoint offers to the loader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from octavo.model.families.names import HARMLESS, Names, Place, place_of
from octavo.model.linear import Weight
from octavo.model.spec import DecoderSpec
from octavo.types import ConfigError

_HARMLESS = re.compile("|".join(HARMLESS))


class WeightSource(Protocol):
    """``where`` names the checkpoint in errors. ``shapes``: stored name -> shape, None when the
    source makes what is asked for. ``dtype``: what most of the weights are stored in, None when
    nothing says so."""

    @property
    def where(self) -> str: ...

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def names(self) -> Names:
        """Where the checkpoint keeps our parameters."""

    def place(self, name: str) -> Place:
        """Where our tensor ``name`` (``layers.3.q.weight``) lies, suffix included."""

    def count_groups(self) -> tuple[int, int]:
        """How many of the stored matrices come as ``QuantizedWeight``, and how many could have, had
        their type been another: (0, 0) where none is asked to."""

    def keeps_groups(self, name: str) -> bool:
        """Whether our tensor ``name`` comes as a ``QuantizedWeight``."""

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
        """What our tensors of these names and shapes take, fused into one linear's weight."""

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0
    ) -> Callable[[], Weight]:
        """Starts to bring our tensor ``name`` to the device: what is stored from output ``first``
        on. The call returned gives it, converted, in memory of its own."""

    def close(self) -> None:
        """Gives back what fetching needed."""


def check_complete(source: WeightSource, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Every parameter is there once, with its shape, and nothing is left over. ``wanted``: ours.
    Parameters that share a stored tensor must fill it. Returns where in it those begin that are not
    the first, counted in outputs."""
    if source.shapes is None:
        return {}
    firsts: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(wanted, key=lambda name: place_of(name, source.names)):
        stored, (rows, *rest) = source.place(name), wanted[name]
        if stored.name in shapes:
            firsts[name] = shapes[stored.name][0]
        shapes[stored.name] = (firsts.get(name, 0) + rows, *rest)
    for name in wanted.keys() - firsts.keys():
        stored = source.place(name)
        if stored.transposed:
            shapes[stored.name] = shapes[stored.name][::-1]
    missing = [name for name in shapes if name not in source.shapes]
    if missing:
        raise ConfigError(f"{source.where}: tensors are missing: {_listed(missing)}")
    wrong = [
        f"{name} is {list(source.shapes[name])}, the config says {list(shape)}"
        for name, shape in shapes.items()
        if tuple(source.shapes[name]) != tuple(shape)
    ]
    if wrong:
        raise ConfigError(f"{source.where}: wrong shapes: {_listed(wrong, '; ')}")
    unused = list(_unused(source, shapes))
    if unused:
        raise ConfigError(
            f"{source.where}: tensors this architecture does not use: {_listed(unused)}"
        )
    return firsts


def _unused(source: WeightSource, used: Mapping[str, object]) -> Iterator[str]:
    tied = source.place("head.weight").name if source.spec.embedding.tied else None
    for name in source.shapes or ():
        if name not in used and name != tied and not _HARMLESS.fullmatch(name):
            yield name


def _listed(names: list[str], separator: str = ", ", most: int = 4) -> str:
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")
