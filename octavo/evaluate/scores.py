"""What logits say of a text, and how two models' differ.

Log-probabilities are FP64: rounding them to FP32 shows as a divergence of its own, 1e-6 nats and
more, which 8-bit weights come near.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """logits: [r, vocab]. FP64 [r, vocab], in nats."""
    return logits.to(torch.float64).log_softmax(dim=-1)


def negative_log_likelihoods(log_probs: Tensor, targets: Tensor) -> Tensor:
    """log_probs: [r, vocab]; targets: int64 [r]. [r], in nats."""
    return -log_probs.gather(1, targets[:, None])[:, 0]


def divergences(other: Tensor, log_probs: Tensor) -> Tensor:
    """KL(other || log_probs) of each row over the whole vocabulary, [r], in nats: what one loses
    who expects the second distribution and meets the first (Kullback & Leibler 1951). Both are
    logarithms, [r, vocab]. 0 exactly for equal rows; a sum just below 0 is rounding, and 0."""
    found = (other.exp() * (other - log_probs)).sum(dim=-1)
    return found.clamp_(min=0)


def agreements(other: Tensor, log_probs: Tensor) -> Tensor:
    """Whether both rows have the same largest: bool [r]."""
    return other.argmax(dim=-1) == log_probs.argmax(dim=-1)
