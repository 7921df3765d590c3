"""A layer: what is around its mixer and its MLP, and which part does which spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from octavo.model.attention import Attention
from octavo.model.linear import Linear
from octavo.model.mla import LatentAttention
from octavo.model.mlp import MLP
from octavo.model.moe import MoE
from octavo.model.norm import Norm
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import (
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MLASpec,
    MoESpec,
    ResidualSpec,
)
from octavo.model.states import AttentionStates, StateKey
from octavo.ops.linear import Epilogue

Operations = Mapping[str, Callable[..., Any]]  # the chosen versions by name


class Part(Protocol):
    """A piece of the decoder that is loaded at one go."""

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(our tensor name, stored shape) of what it needs from the checkpoint."""

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Takes its tensors, in the model's dtype, whole."""


class Mixer(Part, Protocol):
    """What lets tokens see each other: attention of any kind. ``operation`` gives the cache's
    shape; ``key``: which of the step's states it wants."""

    @property
    def key(self) -> StateKey: ...

    @property
    def operation(self) -> Any: ...

    @property
    def is_plain(self) -> bool:
        """Whether it calls operations and nothing else of torch between them."""

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """(our tensor name, what of it is kept) of those of which this rank keeps some."""

    def linears(self) -> tuple[Linear, ...]: ...

    def __call__(self, x: Tensor, cache: Tensor, state: Any) -> Tensor:
        """x: [T, hidden]. What ``out`` takes, [T, n]; writes keys and values into ``cache``."""

    def out(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, n] -> [T, hidden], added to ``residual`` if given, which may be written over."""


class FeedForward(Part, Protocol):
    """What takes each token by itself."""

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """As a mixer's, of its experts too."""

    def linears(self) -> tuple[Linear, ...]: ...

    def experts(self) -> Sequence[Part]:
        """What is loaded after it, one part at a time."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden]. [T, hidden], added to ``residual`` if given, which may be written over.
        ``slots``: int64 [T], negative for padding, of which anything may come; None: there is
        none."""


class Residual:
    """x -> outer(x + scale * after(f(before(x)))), in two steps: ``enter`` is before(x), ``leave``
    the rest. Where nothing stands between ``f`` and the sum, ``f`` adds (``epilogue``)."""

    def __init__(
        self,
        prefix: str,
        names: tuple[str, str, str],
        spec: ResidualSpec,
        size: int,
        ops: Operations,
    ) -> None:
        found = [
            Norm(f"{prefix}.{name}", norm, size, ops) if norm else None
            for name, norm in zip(names, (spec.before, spec.after, spec.outer))
        ]
        self.before, self.after, self.outer = found
        self.norms: list[Norm] = [norm for norm in found if norm]
        self.scale = spec.scale
        self.add = ops.get("add_scaled")
        self.epilogue: Epilogue = "add" if spec.is_plain else "none"

    def enter(self, x: Tensor) -> Tensor:
        return self.before(x) if self.before else x

    def leave(self, x: Tensor, function: Callable[..., Tensor], inner: Tensor) -> Tensor:
        """``function``: f, of ``inner``; x, which may be written over: the residual."""
        if self.epilogue == "add":
            x = function(inner, x)
        else:
            y = function(inner)
            assert self.add is not None
            x = self.add(x, self.after(y) if self.after else y, self.scale)
        return self.outer(x) if self.outer else x


class Layer:
    """Mixer and MLP with the residuals around them. Our names of the norms: ``input_norm`` before
    the mixer and ``post_norm`` before the MLP (Llama's names), ``mixer_norm`` and ``mlp_norm`` of
    what they give, ``mixer_outer_norm`` and ``mlp_outer_norm`` after the sum."""

    def __init__(
        self,
        prefix: str,
        spec: LayerSpec,
        hidden_size: int,
        states: AttentionStates,
        make_linear: Any,
        ops: Operations,
        ranks: TensorParallel = ALONE,
    ) -> None:
        """``ranks``: that share the layer."""
        names = ("input_norm", "mixer_norm", "mixer_outer_norm")
        self._around_mixer = Residual(prefix, names, spec.around_mixer, hidden_size, ops)
        names = ("post_norm", "mlp_norm", "mlp_outer_norm")
        self._around_mlp = Residual(prefix, names, spec.around_mlp, hidden_size, ops)
        of_mixer, of_mlp = self._around_mixer.epilogue, self._around_mlp.epilogue
        self.mixer: Mixer = make_mixer(
            prefix, spec.mixer, hidden_size, states, make_linear, ops, of_mixer, ranks
        )
        self.mlp: FeedForward = make_mlp(
            prefix, spec.mlp, hidden_size, make_linear, ops, of_mlp, ranks
        )
        self._take_rows = ops["take_rows"]
        self.norms = [*self._around_mixer.norms, *self._around_mlp.norms]

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in (self.mixer, self.mlp, *self.norms):
            yield from part.wanted()

    def load(self, tensors: Mapping[str, Any]) -> None:
        for part in (self.mixer, self.mlp, *self.norms):
            part.load(tensors)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield from self.mixer.cuts()
        yield from self.mlp.cuts()

    def linears(self) -> tuple[Linear, ...]:
        return (*self.mixer.linears(), *self.mlp.linears())

    @property
    def is_plain(self) -> bool:
        """Whether it calls operations and nothing else of torch between them."""
        return self.mixer.is_plain

    def parts(self) -> list[Part]:
        """What is loaded at one go each."""
        return [self, *self.mlp.experts()]

    def __call__(
        self,
        x: Tensor,
        cache: Tensor,
        state: Any,
        tokens: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """x: [T, hidden]. ``tokens``: int64 [r], those that are wanted; every token's keys and
        values go into the cache all the same. ``slots``: see ``FeedForward``."""
        mixed = self.mixer(self._around_mixer.enter(x), cache, state)
        if tokens is not None:
            mixed, x = self._take_rows(mixed, tokens), self._take_rows(x, tokens)
            slots = None if slots is None else slots[tokens]
        x = self._around_mixer.leave(x, self.mixer.out, mixed)
        mlp = self.mlp if slots is None else partial(self.mlp, slots=slots)
        return self._around_mlp.leave(x, mlp, self._around_mlp.enter(x))


def make_mixer(
    prefix: str,
    spec: MixerSpec,
    hidden_size: int,
    states: AttentionStates,
    make_linear: Any,
    ops: Operations,
    epilogue: Epilogue,
    ranks: TensorParallel,
) -> Mixer:
    if isinstance(spec, MLASpec):
        return LatentAttention(prefix, spec, hidden_size, states, make_linear, ops, epilogue, ranks)
    return Attention(prefix, spec, hidden_size, states, make_linear, ops, epilogue, ranks)


def make_mlp(
    prefix: str,
    spec: FeedForwardSpec,
    hidden_size: int,
    make_linear: Any,
    ops: Operations,
    epilogue: Epilogue,
    ranks: TensorParallel,
) -> FeedForward:
    if isinstance(spec, MoESpec):
        return MoE(prefix, spec, hidden_size, make_linear, ops, epilogue, ranks)
    return MLP(prefix, spec, hidden_size, make_linear, ops.get("activate"), epilogue, ranks)
