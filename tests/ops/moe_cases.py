"""Routings and experts that tests of both kinds of machine share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.ops import moe
from octavo.ops.moe import Activation
from octavo.ops.routing import Routing

QWEN3 = Routing(128, 8)
MIXTRAL = Routing(8, 2)
DEEPSEEK_V2 = Routing(160, 6, renormalize=False, scale=16.0, groups=8, groups_kept=3)
DEEPSEEK_V3 = Routing(
    256, 8, score="sigmoid", scale=2.5, groups=8, groups_kept=4, group_score="top2"
)
ROUTINGS = {
    "qwen3": (QWEN3, False),
    "mixtral": (MIXTRAL, False),
    "qwen2": (Routing(60, 4, renormalize=False), False),
    "one": (Routing(5, 1, score="sigmoid", renormalize=False), False),
    "all": (Routing(6, 6), False),
    "deepseek-v2": (DEEPSEEK_V2, False),
    "deepseek-v3": (DEEPSEEK_V3, True),
    "deepseek-v3-small": (
        replace(DEEPSEEK_V3, num_experts=15, top_k=4, groups=5, groups_kept=2),
        True,
    ),
    "ungrouped-correction": (Routing(24, 3, score="sigmoid", scale=0.5), True),
}


@dataclass
class Weights:
    """``biases``: gate_up's and down's, or none."""

    gate_up: Tensor
    down: Tensor
    activation: Activation
    biases: tuple[Tensor, Tensor] | tuple[()]

    @classmethod
    def random(
        cls,
        experts: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        activation: Activation = "silu_mul",
        bias: bool = False,
        device: str = "cpu",
        scale: float = 1.0,
    ) -> Weights:
        """Gate and up are normal with deviation ``scale`` for normal x: 4 passes the clamp."""
        generator = torch.Generator(device).manual_seed(5)

        def normal(*shape: int, deviation: float) -> Tensor:
            values = torch.empty(shape, dtype=dtype, device=device)
            return values.normal_(0, deviation, generator=generator)

        biases = ()
        if bias:
            biases = (
                normal(experts, 2 * inner, deviation=1.0),
                normal(experts, hidden, deviation=1.0),
            )
        gate_up = normal(experts, 2 * inner, hidden, deviation=scale * hidden**-0.5)
        return cls(
            gate_up, normal(experts, hidden, inner, deviation=inner**-0.5), activation, biases
        )

    def made(self, call):
        return call(self.gate_up, self.down, self.activation, *self.biases)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
        """FP64, nothing rounded between; expert by expert, so that FP64 weights fit anywhere."""
        y = torch.zeros_like(x, dtype=torch.float64) if other is None else other.double()
        for expert in range(len(self.down)):
            one = [self.gate_up, self.down, *self.biases]
            gate_up, down, *biases = (w[expert : expert + 1].double() for w in one)
            tokens = (ids == expert).any(-1).nonzero()[:, 0]
            if not len(tokens):
                continue
            only = torch.where(ids[tokens] == expert, 0, -1)
            apply = moe.experts(gate_up, down, self.activation, *biases)
            y[tokens] += apply(x[tokens].double(), only, weights[tokens].double())
        return y


def random_choice(
    tokens: int, experts: int, top_k: int, kind: str = "random", device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """ids int32 and weights FP32, [tokens, top_k]. ``kind``: "random"; "skewed": expert 0 for
    every token, the last expert for none; "holes": a third of the ids are -1, and all of every
    fourth token's."""
    generator = torch.Generator().manual_seed(tokens)
    usable = experts - 1 if kind == "skewed" else experts
    scores = torch.rand(tokens, usable, generator=generator)
    if kind == "skewed":
        scores[:, 0] = 2
    ids = scores.topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    if kind == "holes":
        ids[torch.rand(tokens, top_k, generator=generator) < 0.33] = -1
        ids[::4] = -1
    return ids.to(device), weights.to(device)
