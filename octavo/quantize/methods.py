"""How one layer's linears become numbers of the target format: to the nearest, or by what they meet
in a calibration text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from octavo.model.attention import Attention
from octavo.model.linear import Linear
from octavo.model.mlp import MLP
from octavo.quantize import awq
from octavo.quantize.gptq import gptq
from octavo.quantize.layers import LayerAtWork, Moments
from octavo.quantize.recipe import Recipe
from octavo.quantize.source import Source
from octavo.quantize.squeezellm import squeezellm
from octavo.quantize.target import Target

# Quantizes all linears of a layer.
Method = Callable[[LayerAtWork], None]


def method_of(recipe: Recipe, target: Target, source: Source) -> Method:
    if recipe.format in ("gptq", "w4a16"):
        return GPTQMethod(target, recipe.act_order)
    if recipe.format == "awq":
        return AWQMethod(target, source)
    if recipe.format == "squeezellm":
        return SqueezeLLMMethod(recipe.bits or 4, recipe.sparse)
    return NearestMethod(target)


@dataclass
class NearestMethod:
    """Each projection by itself: a scale may be of the whole of it."""

    target: Target

    def __call__(self, work: LayerAtWork) -> None:
        assert self.target.round is not None
        for linear in work.linears:
            for name, _ in linear.parts:
                work.put_part(name, self.target.round(work.tensors[f"{name}.weight"]))


@dataclass
class GPTQMethod:
    """Linears in the order in which they are computed, each by what it meets once those before it
    are quantized ("true sequential"). Those of the same input are solved as one."""

    target: Target
    act_order: bool

    def __call__(self, work: LayerAtWork) -> None:
        assert self.target.grid is not None
        for which in range(len(work.linears)):
            (moments,) = work.observe([which])
            weight = work.weight(which)
            work.put(
                which, gptq(weight, moments.hessian, self.target.grid, act_order=self.act_order)
            )


@dataclass
class SqueezeLLMMethod:
    bits: int
    sparse: bool

    def __call__(self, work: LayerAtWork) -> None:
        all_linears = range(len(work.linears))
        for which, moments in zip(all_linears, work.observe(all_linears)):
            importance = moments.hessian.diagonal()
            work.put(which, squeezellm(work.weight(which), importance, self.bits, self.sparse))


@dataclass
class AWQMethod:
    """Scales go into what makes a linear's inputs: a norm for q, k, v and for gate and up; v for o;
    up for down. Then ranges are clipped, but for q and k, whose products would feel it most."""

    target: Target
    source: Source

    def __call__(self, work: LayerAtWork) -> None:
        all_linears = list(range(len(work.linears)))
        moments = work.observe(all_linears)
        for which, linear in enumerate(work.linears):
            if (fold := folding(work, linear)) is not None:
                self._scale(work, which, moments[which], fold)
        for which in all_linears:
            self._round(work, which, moments[which].hessian)

    def _scale(self, work: LayerAtWork, which: int, moments: Moments, fold: Folding) -> None:
        assert self.target.grid is not None
        magnitude = fold.shared(moments.magnitude)
        weight = work.weight(which)
        scales = awq.find_scales(weight, moments.hessian, magnitude, self.target.grid)
        scales = fold.into(work, scales, self.source)
        work.set_weight(which, weight * scales)
        moments.hessian = awq.scaled_hessian(moments.hessian, scales)

    def _round(self, work: LayerAtWork, which: int, hessian: Tensor) -> None:
        grid = self.target.grid
        assert grid is not None
        for name, _ in work.linears[which].parts:
            weight = work.tensors[f"{name}.weight"]
            if name.rpartition(".")[2] not in ("q", "k"):
                weight = awq.clipped(weight, hessian, grid)
            work.put_part(name, grid.round(weight))


@dataclass
class Folding:
    """Where the scales of a linear's inputs can go. ``shared``: makes numbers of inputs equal that
    come from one number there, by their mean. ``into``: divides there by the scales; gives those
    that this amounts to."""

    shared: Callable[[Tensor], Tensor]
    into: Callable[[LayerAtWork, Tensor, Source], Tensor]


def folding(work: LayerAtWork, linear: Linear) -> Folding | None:
    """None where something stands between a linear and what makes its inputs."""
    layer, name = work.layer, linear.parts[0][0]
    prefix = name.rpartition(".")[0]
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, Attention) and linear is mixer.qkv:
        return _norm_folding(work, f"{prefix}.input_norm")
    if isinstance(mixer, Attention) and linear is mixer.out:
        return _value_folding(mixer, prefix)
    if isinstance(mlp, MLP) and linear is mlp.gate_up:
        return _norm_folding(work, f"{prefix}.post_norm")
    if isinstance(mlp, MLP) and linear is mlp.down and mlp.gated:
        return Folding(lambda x: x, _divider(f"{prefix}.up", lambda scales: scales))
    return None


def _norm_folding(work: LayerAtWork, norm: str) -> Folding | None:
    if f"{norm}.weight" not in work.tensors:
        return None

    def into(work: LayerAtWork, scales: Tensor, source: Source) -> Tensor:
        name = f"{norm}.weight"
        stored, scales = awq.fold(
            work.tensors[name], scales, lambda values: source.as_read(name, values)
        )
        work.change(name, stored)
        if (bias := f"{norm}.bias") in work.tensors:
            work.change(bias, source.as_read(bias, work.tensors[bias] / scales))
        return scales

    return Folding(lambda x: x, into)


def _value_folding(mixer: Attention, prefix: str) -> Folding:
    """A channel of v goes to all query heads of its group."""
    spec = mixer.spec
    heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)

    def shared(values: Tensor) -> Tensor:
        mean = values.view(heads).mean(dim=1, keepdim=True)
        return mean.expand(heads).reshape(-1)

    def of_outputs(scales: Tensor) -> Tensor:
        return scales.view(heads)[:, 0].flatten()

    return Folding(shared, _divider(f"{prefix}.v", of_outputs))


def _divider(
    name: str, of_outputs: Callable[[Tensor], Tensor]
) -> Callable[[LayerAtWork, Tensor, Source], Tensor]:
    """Divides the outputs of a linear that is quantized afterwards."""

    def into(work: LayerAtWork, scales: Tensor, source: Source) -> Tensor:
        own = of_outputs(scales)
        work.tensors[f"{name}.weight"] = work.tensors[f"{name}.weight"] / own[:, None]
        if (bias := f"{name}.bias") in work.tensors:
            work.change(bias, source.as_read(bias, work.tensors[bias] / own))
        return scales

    return into
