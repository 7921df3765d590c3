"""What an evaluation found, as plain numbers. Never imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Bytes in memory once weights are packed for multiplying. ``linear_weights``: how many numbers
    the matrices of the layers stand for. ``other_bytes``: embedding, head and norms."""

    linear_bytes: int
    linear_weights: int
    other_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.linear_bytes / self.linear_weights


@dataclass(frozen=True)
class Scored:
    """A model on a text. ``nll``: mean negative log-likelihood of a token, in nats."""

    model: str
    dtype: str
    device: str
    quantization: str | None
    sizes: Sizes
    nll: float
    perplexity: float


@dataclass(frozen=True)
class Comparison:
    """A model against another one. ``kl_…``: of KL(other || model) over tokens, in nats.
    ``top1_agreement``: share of tokens after which both think the same token likeliest.
    ``perplexity_ratio``: the model's by the other's."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity_ratio: float


@dataclass(frozen=True)
class Report:
    """``num_tokens``: that were scored, all but the first of each chunk."""

    text: str
    chunk: int
    num_tokens: int
    model: Scored
    against: Scored | None
    comparison: Comparison | None

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("model", "against"):
            if (scored := getattr(self, name)) is not None:
                found[name]["sizes"]["bits_per_weight"] = scored.sizes.bits_per_weight
        return found
