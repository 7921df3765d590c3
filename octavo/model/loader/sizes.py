"""What weights take in memory, from a checkpoint's headers alone: of a model, of each of its
layers, and how layers are divided among pipeline stages. Never imports torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.model.stages import Stage, divide
from octavo.model.structure import Group, Structure

if TYPE_CHECKING:
    from octavo.model.layer import Part

Shapes = Mapping[str, tuple[int, ...]]


class Stored(Protocol):
    """What counting asks of a ``source.WeightSource``."""

    def is_quantized(self, name: str) -> bool: ...

    def bytes_packed(self, shapes: Shapes, itemsize: int) -> int: ...


@dataclass(frozen=True)
class Computing:
    """What becomes of weights. ``itemsize``: bytes of a number that is computed with; ``device``:
    "cpu", "cuda"; ``packs``: a CPU's kernels take copies of dense matrices in an order of their
    own, so that a tied head is not the embedding itself."""

    itemsize: int
    device: str
    packs: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def wanted_by(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Our tensors that the parts are made of, and their shapes."""
    wanted: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, shape in part.wanted():
            if name in wanted:
                raise ValueError(f"two parts want {name}")
            wanted[name] = shape
    return wanted


def weight_bytes(structure: Structure, source: Stored, computing: Computing) -> tuple[int, int]:
    """What a rank's weights take in memory once they are packed: all, and the layers' matrices."""
    size = of_layers = 0
    for name, is_matrix, taken in _groups(structure, source, computing):
        size += taken
        if name.startswith("layers.") and is_matrix:
            of_layers += taken
    if structure.embedding is not None:
        size += _embedding_bytes(structure, structure.stage, source, computing)
    return size, of_layers


def divided(structure: Structure, source: Stored, computing: Computing, count: int) -> list[Stage]:
    """The ``count`` pipeline stages of a model, balanced by what their weights take: the same for
    every rank. ``structure``: of the whole model; the checkpoint is complete. Raises ConfigError
    for more stages than layers."""
    of_layers: Counter[int] = Counter()
    ends: Counter[str] = Counter()
    for name, _, taken in _groups(structure, source, computing):
        end, *rest = name.split(".")
        if end == "layers":
            of_layers[int(rest[0])] += taken
        else:
            ends[end] += taken
    first, last = ends["positions"] + ends["embed_in"], ends["head"] + ends["norm"]
    last += ends["embed_out"]
    if count > 1:
        first += _embedding_bytes(structure, Stage(0, 2, 0, 0), source, computing)
        if structure.spec.embedding.tied:
            last += _embedding_bytes(structure, Stage(1, 2, 0, 0), source, computing)
    sizes = [of_layers[index] for index in range(len(structure.spec.layers))]
    return divide(sizes, first, last, count)


def _groups(
    structure: Structure, source: Stored, computing: Computing
) -> Iterator[tuple[str, bool, int]]:
    """(one of its tensors, whether that is a matrix, bytes) of each weight: what is fused is one.
    Without the embedding's."""
    for group in structure.groups:
        shapes = group.kept
        name = next(iter(shapes))
        taken = group_bytes(group, shapes, source, computing)
        yield name, len(shapes[name]) > 1, taken * group.count


def group_bytes(group: Group, shapes: Shapes, source: Stored, computing: Computing) -> int:
    itemsize = computing.itemsize
    # Experts in FP32 are expanded on a GPU.
    if group.is_dense or (group.is_expert and not computing.on_cpu and itemsize == 4):
        return sum(map(math.prod, shapes.values())) * itemsize
    are_quantized = [source.is_quantized(name) for name in shapes] if len(shapes) > 1 else []
    if group.rounding is not None and not any(are_quantized or map(source.is_quantized, shapes)):
        return sum(group.rounding.bytes_of(*shape) for shape in shapes.values())
    if len(set(are_quantized)) <= 1:
        return source.bytes_packed(shapes, itemsize)
    return sum(source.bytes_packed({name: shapes[name]}, itemsize) for name in shapes)  # apart


def _embedding_bytes(
    structure: Structure, stage: Stage, source: Stored, computing: Computing
) -> int:
    """The embedding's weight in a stage that reads its rows, that multiplies with it (a tied head),
    or does both."""
    shape = structure.embedding
    assert shape is not None
    on_cpu, itemsize = computing.on_cpu, computing.itemsize
    is_quantized = source.is_quantized("embed.weight")
    dense = math.prod(shape) * itemsize
    packed = source.bytes_packed({"embed.weight": shape}, itemsize)
    if not (stage.is_last and structure.spec.embedding.tied):
        return packed if on_cpu else dense  # on a GPU rows are read from an expanded copy
    rounding = None if is_quantized else structure.head_rounding
    head = rounding.bytes_of(*shape) if rounding else packed
    if not stage.is_first or (is_quantized and on_cpu):  # rows are read from the head's
        return head
    if not (is_quantized or computing.packs or rounding):
        return dense  # the same tensor
    return dense + head
