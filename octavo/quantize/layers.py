"""A model that is quantized layer by layer: one layer's weights are in memory at a time, and the
hidden states of the calibration text between layers.

What a linear meets is seen by standing in front of its ``apply``. Layers after a quantized one meet
what it gives, as GPTQ wants it: their weights make up for its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.evaluate.reading import Reader
from octavo.model.decoder import Model
from octavo.model.layer import Layer
from octavo.model.linear import Linear
from octavo.model.loader.load import kept_dtype
from octavo.ops.weights import Quantized


class Moments:
    """Of the inputs of a linear. ``hessian``: the sum of x xT, FP32 [in, in]; ``magnitude``: of
    |x|, FP32 [in]."""

    def __init__(self, inputs: int, device: str) -> None:
        self.hessian = torch.zeros(inputs, inputs, device=device)
        self.magnitude = torch.zeros(inputs, device=device)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """x: [T, in]."""
        wide = x.float()
        self.hessian.addmm_(wide.T, wide)
        self.magnitude += wide.abs().sum(dim=0)
        self.count += len(x)

    def mean(self) -> Moments:
        """By token instead of summed, in place."""
        self.hessian /= self.count
        self.magnitude /= self.count
        return self


class Calibration:
    """Hidden states of the calibration text, chunk by chunk, at the layer that is under work."""

    def __init__(self, model: Model, chunks: Sequence[list[int]]) -> None:
        """``model``: whose embedding and states are loaded. ``chunks``: of one length."""
        reader = Reader(model, len(chunks[0]))
        batch = reader.batch(chunks[0])
        self._caches = model.allocate_cache(len(reader.blocks), batch.block_size)
        self._states = model.layer_states(batch)  # positions are alike in all chunks
        ids = [torch.tensor(chunk, device=model.device) for chunk in chunks]
        self.hidden = [model.embedding(chunk, batch.positions) for chunk in ids]

    def run(self, index: int, layer: Layer) -> Iterator[Tensor]:
        """What the layer makes of each chunk."""
        for hidden in self.hidden:  # a layer may write over what it gets
            yield layer(hidden.clone(), self._caches[index], self._states[index])

    def observe(self, index: int, layer: Layer, linears: Sequence[Linear]) -> list[Moments]:
        """What those of the layer's linears meet."""
        moments = [Moments(linear.in_features, str(self.hidden[0].device)) for linear in linears]
        with watched(linears, [one.add for one in moments]):
            for _ in self.run(index, layer):
                pass
        return [one.mean() for one in moments]

    def advance(self, index: int, layer: Layer) -> None:
        self.hidden = list(self.run(index, layer))


@contextmanager
def watched(
    linears: Sequence[Linear], watchers: Sequence[Callable[[Tensor], None]]
) -> Iterator[None]:
    """Each watcher sees the inputs of its linear."""
    before = [linear.apply for linear in linears]
    for linear, watcher in zip(linears, watchers):
        linear.apply = _seen(linear.apply, watcher)
    try:
        yield
    finally:
        for linear, apply in zip(linears, before):
            linear.apply = apply


def _seen(apply: Callable[..., Tensor], watcher: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    def call(x: Tensor, other: Tensor | None = None) -> Tensor:
        watcher(x)
        return apply(x, other)

    return call


@dataclass
class LayerAtWork:
    """A layer with its tensors, FP32 by our names, as they change. ``quantized``: the weights of
    projections, by our name of the projection; ``changed``: names of other tensors that are no
    longer the checkpoint's."""

    index: int
    layer: Layer
    tensors: dict[str, Tensor]
    linears: list[Linear]
    calibration: Calibration | None
    dtype: torch.dtype
    quantized: dict[str, Quantized] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def weight(self, which: int) -> Tensor:
        """Of a linear: [out, in]."""
        names = [f"{name}.weight" for name, _ in self.linears[which].parts]
        return torch.cat([self.tensors[name] for name in names])

    def set_weight(self, which: int, weight: Tensor) -> None:
        parts = self.linears[which].parts
        first = 0
        for name, size in parts:
            self.tensors[f"{name}.weight"] = weight[first : first + size]
            first += size

    def put(self, which: int, weight: Quantized) -> None:
        """A linear's quantized weight, the rows of its parts one after the other: the layer
        computes with it from now on."""
        first = 0
        for name, size in self.linears[which].parts:
            self.put_part(name, weight[first : first + size])
            first += size

    def put_part(self, name: str, weight: Quantized) -> None:
        self.quantized[name] = weight
        if self.calibration is not None:
            self.tensors[f"{name}.weight"] = weight.dense().float()

    def change(self, name: str, values: Tensor) -> None:
        """A tensor that stays dense."""
        self.tensors[name] = values
        self.changed.add(name)

    def observe(self, which: Sequence[int]) -> list[Moments]:
        assert self.calibration is not None, "the method was to need no calibration"
        self.load()
        chosen = [self.linears[one] for one in which]
        return self.calibration.observe(self.index, self.layer, chosen)

    def load(self) -> None:
        load_layer(self.layer, self.tensors, self.dtype)

    def finish(self) -> None:
        if self.calibration is not None:
            self.load()
            self.calibration.advance(self.index, self.layer)


def load_layer(layer: Layer, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    part, *_ = layer.parts()
    part.load({name: tensors[name].to(kept_dtype(name, dtype)) for name, _ in part.wanted()})


def quantizable(layer: Layer) -> list[Linear]:
    """All linears but those that are never rounded (a router's)."""
    return [linear for linear in layer.linears() if linear.exact is None]
