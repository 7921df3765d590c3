"""How experts are chosen, in numbers. Never imports torch: a model's spec says it so, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Routing:
    """How ``top_k`` experts are chosen from a token's logits, and weighed.

    ``score``: softmax over all experts, or each logit's sigmoid. ``renormalize``: the chosen ones'
    scores are divided by their sum. ``scale``: multiplies the weights.
    ``groups``, ``groups_kept``: the experts lie in so many groups of equal size, of which the best
    are kept and the others' experts are never chosen; ``group_score``: a group is worth its largest
    score, or the sum of its two largest (DeepSeek-V2, https://arxiv.org/abs/2405.04434, and V3,
    https://arxiv.org/abs/2412.19437). Raises ValueError where there are too few groups or experts.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        if self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.groups} groups")
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"{self.groups_kept} groups kept, of {self.groups}")
        size = self.num_experts // self.groups
        if not 1 <= self.top_k <= size * self.groups_kept:
            raise ValueError(
                f"{self.top_k} experts a token, of {self.groups_kept} groups of {size} experts"
            )
        if self.group_score == "top2" and size < 2:
            raise ValueError("a group of one expert has no two scores: use group_score max")
