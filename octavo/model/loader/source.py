"""Where weights come from: what every kind of checkpoint offers to the loader. Never imports torch
at module level."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.model.families.names import HARMLESS, Names, Place, place_of
from octavo.model.loader.experts import Piece
from octavo.model.spec import DecoderSpec
from octavo.types import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.model.quantization import Quantization
    from octavo.ops.weights import Weight

_HARMLESS = re.compile("|".join(HARMLESS))
# Stored names -> the shapes that each may have; -1 is any length.
StoredAs = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Share:
    """Of a stored tensor: outputs from ``first`` on. ``parts``: the outputs of all parameters that
    lie in it, in order; () where there is no other."""

    first: int = 0
    parts: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Of the stored tensor; 0: no more than the parameter's."""
        return sum(self.parts)


WHOLE = Share()


class WeightSource(Protocol):
    """``where`` names the checkpoint in errors. ``shapes``: stored name -> shape, None when the
    source makes what is asked for. ``dtype``: what most of the dense weights are stored in, None
    when nothing says so. ``quantization``: how the model is to keep its weights."""

    @property
    def where(self) -> str: ...

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None: ...

    @property
    def dtype(self) -> torch.dtype | None: ...

    @property
    def quantization(self) -> Quantization: ...

    @property
    def names(self) -> Names:
        """Where the checkpoint keeps our parameters."""

    def expert_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """What our tensor ``name`` of that shape is put together from if it is an expert's; () if
        it is none's."""

    def place(self, name: str) -> Place:
        """Where our tensor ``name`` (``layers.3.q.weight``) lies, suffix included."""

    def count_groups(self) -> tuple[int, int]:
        """How many of the stored matrices come in their groups, and how many could have, had their
        type been another: (0, 0) where none is asked to."""

    def is_quantized(self, name: str) -> bool:
        """Whether our tensor ``name`` comes as a quantized weight."""

    def stored_as(self, name: str, shape: tuple[int, ...]) -> StoredAs:
        """Which tensors hold the stored ``name`` of that shape: itself, or, where it is the weight
        of a quantized projection, those of its format. Raises ConfigError for a matrix that the
        format cannot hold."""

    def is_needless(self, name: str) -> bool:
        """Whether a stored tensor that nothing wants may be left out all the same."""

    def bytes_packed(self, shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """What our tensors of these names and shapes take, fused into one linear's weight.
        ``itemsize``: of a number where they are dense."""

    def fetch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, share: Share = WHOLE
    ) -> Callable[[], Weight]:
        """Starts to bring our tensor ``name`` to the device. ``share``: which of the outputs of
        what is stored are its. The call returned gives it, converted, in memory of its own."""

    def close(self) -> None:
        """Gives back what fetching needed."""


def check_complete(source: WeightSource, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Share]:
    """Every parameter is there once, with its shape, and nothing is left over. ``wanted``: ours.
    Parameters that share a stored tensor must fill it. Returns what of it is whose."""
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
    shares = _shares(source, wanted, others, firsts)
    for name in others:
        stored = source.place(name)
        if stored.transposed and name not in firsts:
            shapes[stored.name] = shapes[stored.name][::-1]
    _check_stored(source, shapes)
    return shares


def _shares(
    source: WeightSource,
    wanted: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    firsts: Mapping[str, int],
) -> dict[str, Share]:
    """Of those that share a stored tensor. ``firsts``: where in it those begin that are not the
    first."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(source.place(name).name, []).append(name)
    shares: dict[str, Share] = {}
    for sharing in parts.values():
        if len(sharing) > 1:
            ordered = sorted(sharing, key=lambda name: firsts.get(name, 0))
            rows = tuple(wanted[name][0] for name in ordered)
            shares |= {name: Share(firsts.get(name, 0), rows) for name in sharing}
    return shares


def _check_stored(source: WeightSource, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """``wanted``: stored names and the shapes of what they hold."""
    assert source.shapes is not None
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, shape in wanted.items():
        shapes |= source.stored_as(name, shape)
    missing = [name for name in shapes if name not in source.shapes]
    if missing:
        raise ConfigError(f"{source.where}: tensors are missing: {_listed(_by_expert(missing))}")
    wrong = [
        f"{name} is {list(source.shapes[name])}, the config says "
        + " or ".join(str(list(shape)) for shape in allowed)
        for name, allowed in shapes.items()
        if not any(_fits(source.shapes[name], shape) for shape in allowed)
    ]
    if wrong:
        raise ConfigError(f"{source.where}: wrong shapes: {_listed(wrong, '; ')}")
    unused = list(_unused(source, shapes))
    if unused:
        raise ConfigError(
            f"{source.where}: tensors this architecture does not use: {_listed(_by_expert(unused))}"
        )


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    sizes = zip(found, shape)
    return len(found) == len(shape) and all(size in (-1, real) for real, size in sizes)


def _unused(source: WeightSource, used: Mapping[str, object]) -> Iterator[str]:
    tied = source.place("head.weight").name if source.spec.embedding.tied else None
    count = len(source.spec.layers)
    drafts = tuple(f"model.layers.{count + i}." for i in range(source.spec.draft_layers))
    for name in source.shapes or ():
        needless = name == tied or _HARMLESS.fullmatch(name) or name.startswith(drafts)
        if name not in used and not needless and not source.is_needless(name):
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
