"""Paged attention for ``--deterministic``: what a token gets does not depend on its batch, nor on
how its prompt was cut, nor on whether it came alone.

All rows go the way of those that bring several tokens, with one choice of tiles: a token meets its
keys in tiles that start at multiples of their size, each by the same instructions. The price: a row
of one token takes a whole tile of queries, and its context is not split among programs.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from octavo.ops.attention import BatchColumns, Rope
from octavo.ops.registry import register
from octavo.ops.triton.attention import Layer, Step, TritonPagedAttention
from octavo.ops.triton.attention_configs import fixed_config
from octavo.ops.triton.launch import available


@register("paged_attention", "triton-fixed", available, tolerance=8.0, batch_invariant="at a price")
class FixedPagedAttention(TritonPagedAttention):
    """Not for angles that depend on the length of a context in the step that computes a token: they
    depend on how a prompt is cut."""

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> Step:
        batch = copy(batch)
        batch.decode_rows, batch.queries = 0, 1
        return super().prepare(batch, rope, dtype)

    def attend_rest(self, qkv: Tensor, layer: Layer, out: Tensor, step: Step) -> None:
        self.prefill(qkv, layer, out, step, fixed_config(self.geometry))
