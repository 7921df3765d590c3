"""What weights take in memory, from a checkpoint's headers alone: of a model, of each of its
layers, and how layers are divided among pipeline stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from octavo.model.decoder import Model
from octavo.model.layer import Part
from octavo.model.loader.source import WeightSource
from octavo.model.stages import Stage, divide

Shapes = Mapping[str, tuple[int, ...]]


def wanted_by(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Our tensors that the parts are made of, and their shapes."""
    wanted: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, shape in part.wanted():
            if name in wanted:
                raise ValueError(f"two parts want {name}")
            wanted[name] = shape
    return wanted


def weight_bytes(
    model: Model, source: WeightSource, wanted: Shapes, dtype: torch.dtype
) -> tuple[int, int]:
    """What the weights take in memory once they are packed: all, and the layers' matrices.
    ``wanted``: the shapes of what this rank keeps."""
    size = of_layers = 0
    for name, taken in _groups(model, source, wanted, dtype):
        size += taken
        if name.startswith("layers.") and len(wanted[name]) > 1:
            of_layers += taken
    if "embed.weight" in wanted:
        size += _embedding_bytes(model, source, wanted["embed.weight"], dtype, model.stage)
    return size, of_layers


def divided(model: Model, source: WeightSource, dtype: torch.dtype, count: int) -> list[Stage]:
    """The ``count`` pipeline stages of a model, balanced by what their weights take: the same for
    every rank. ``model``: whole, with nothing loaded; the checkpoint is complete. Raises
    ConfigError for more stages than layers."""
    wanted = wanted_by(model.parts())
    of_layers: Counter[int] = Counter()
    ends: Counter[str] = Counter()
    for name, taken in _groups(model, source, wanted, dtype):
        end, *rest = name.split(".")
        if end == "layers":
            of_layers[int(rest[0])] += taken
        else:
            ends[end] += taken
    first, last = ends["positions"] + ends["embed_in"], ends["head"] + ends["norm"]
    last += ends["embed_out"]
    if count > 1:
        shape = wanted["embed.weight"]
        first += _embedding_bytes(model, source, shape, dtype, Stage(0, 2, 0, 0))
        if model.spec.embedding.tied:
            last += _embedding_bytes(model, source, shape, dtype, Stage(1, 2, 0, 0))
    sizes = [of_layers[index] for index in range(len(model.spec.layers))]
    return divide(sizes, first, last, count)


def _groups(
    model: Model, source: WeightSource, wanted: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, int]]:
    """(one of its tensors, bytes) of each weight: what is fused is one. Without the embedding's."""
    linears = [*(x for layer in model.layers for x in layer.linears()), *model.embedding.linears()]
    groups = [([f"{name}.weight" for name, _ in x.parts], x.is_rounded) for x in linears]
    fused = {name for names, _ in groups for name in names}
    for name in sorted(set(wanted) - fused - {"embed.weight"}):
        is_expert = ".experts." in name and len(wanted[name]) == 2
        groups.append(([name], is_expert and model.rounding is not None))
    expanded = _expanded(model, wanted)
    for names, is_rounded in groups:
        shapes = {name: wanted[name] for name in names}
        if expanded.issuperset(names):
            taken = sum(map(math.prod, shapes.values())) * dtype.itemsize
        elif is_rounded and not any(map(source.is_quantized, names)):
            assert model.rounding is not None
            taken = sum(model.rounding.bytes_of(*shape) for shape in shapes.values())
        elif len({source.is_quantized(name) for name in names}) == 1:
            taken = source.bytes_packed(shapes, dtype)
        else:  # packed apart
            taken = sum(source.bytes_packed({name: shapes[name]}, dtype) for name in names)
        yield names[0], taken


def _embedding_bytes(
    model: Model, source: WeightSource, shape: tuple[int, ...], dtype: torch.dtype, stage: Stage
) -> int:
    """The embedding's weight in a stage that reads its rows, that multiplies with it (a tied head),
    or does both."""
    on_cpu = model.device == "cpu"
    is_quantized = source.is_quantized("embed.weight")
    dense = math.prod(shape) * dtype.itemsize
    packed = source.bytes_packed({"embed.weight": shape}, dtype)
    if not (stage.is_last and model.spec.embedding.tied):
        return packed if on_cpu else dense  # on a GPU rows are read from an expanded copy
    rounding = None if is_quantized else model.embedding.head.rounding
    head = rounding.bytes_of(*shape) if rounding else packed
    if not stage.is_first or (is_quantized and on_cpu):  # rows are read from the head's
        return head
    packs = on_cpu and model.implementations["linear"] == "native"
    if not (is_quantized or packs or rounding):
        return dense  # the same tensor
    return dense + head


def _expanded(model: Model, wanted: Shapes) -> set[str]:
    """Those of ``wanted`` that are dense in memory however they are stored: of routers, what latent
    attention absorbs, and a GPU's experts in FP32."""
    linears = (linear for layer in model.layers for linear in layer.linears())
    exact = [linear for linear in linears if linear.exact is not None]
    found = {f"{name}.weight" for linear in exact for name, _ in linear.parts}
    in_fp32 = model.device != "cpu" and model.dtype == torch.float32
    for name in wanted:
        if name.endswith(".kv_up.weight") or (in_fp32 and ".experts." in name):
            found.add(name)
    return found
