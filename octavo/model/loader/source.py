"""Where weights come from: what every kind of checkpoint offers to the loader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from octavo.model.families.names import HARMLESS, Names, Place, place_of
from octavo.model.linear import Weight
from octavo.model.loader.experts import Piece
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

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """What our tensor ``name`` of that shape is put together from if it is an expert's; () if
        it is none's."""

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
    pieces = {name: source.expert_pieces(name, shape) for name, shape in wanted.items()}
    shapes = {piece.name: piece.shape for found in pieces.values() for piece in found}
    others = [name for name in wanted if not pieces[name]]
    for name in sorted(others, key=lambda name: place_of(name, source.names)):
        stored, (rows, *rest) = source.place(name), wanted[name]
        if stored.name in shapes:
            firsts[name] = shapes[stored.name][0]
        shapes[stored.name] = (firsts.get(name, 0) + rows, *rest)
    for name in others:
        stored = source.place(name)
        if stored.transposed and name not in firsts:
            shapes[stored.name] = shapes[stored.name][::-1]
    missing = [name for name in shapes if name not in source.shapes]
    if missing:
        raise ConfigError(f"{source.where}: tensors are missing: {_listed(_by_expert(missing))}")
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
            f"{source.where}: tensors this architecture does not use: {_listed(_by_expert(unused))}"
        )
    return firsts


def _unused(source: WeightSource, used: Mapping[str, object]) -> Iterator[str]:
    tied = source.place("head.weight").name if source.spec.embedding.tied else None
    count = len(source.spec.layers)
    drafts = tuple(f"model.layers.{count + i}." for i in range(source.spec.draft_layers))
    for name in source.shapes or ():
        needless = name == tied or _HARMLESS.fullmatch(name) or name.startswith(drafts)
        if name not in used and not needless:
            yield name


def _by_expert(names: list[str]) -> list[str]:
    """The names with those that differ in their expert alone as one: ``experts.{0-2,7}.up``."""
    experts: dict[str, list[int]] = {}
    for name in names:
        found = re.search(r"(?<=\.experts\.)\d+(?=\.)", name)
        key = name[: found.start()] + "{}" + name[found.end() :] if found else name
        experts.setdefault(key, []).extend([int(found[0])] if found else [])
    return [key.replace("{}", _ranges(sorted(those))) for key, those in experts.items()]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 7] -> "{0-2,7}"; one number alone as such."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{{{shown}}}" if len(numbers) > 1 else shown


def _listed(names: list[str], separator: str = ", ", most: int = 4) -> str:
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")
