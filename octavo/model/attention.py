"""The attention part of a layer: qkv projection, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.spec import GQASpec
from octavo.ops.attention import AttentionGeometry, PagedAttention


def geometry_of(spec: GQASpec) -> AttentionGeometry:
    return AttentionGeometry(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        window=spec.window,
        qk_norm_eps=spec.qk_norm.eps if spec.qk_norm else None,
    )


class Attention:
    """``operation`` may be shared by all layers of one geometry; ``take_rows``: ops/rows.py."""

    def __init__(
        self,
        prefix: str,
        spec: GQASpec,
        hidden_size: int,
        operation: PagedAttention,
        make_linear: Any,
        take_rows: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.prefix = prefix
        self.spec = spec
        self.operation = operation
        self.take_rows = take_rows
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv: Linear = make_linear(
            ((f"{prefix}.q", width), (f"{prefix}.k", kv_width), (f"{prefix}.v", kv_width)),
            hidden_size,
            bias=spec.qkv_bias,
        )
        self.out: Linear = make_linear(
            ((f"{prefix}.o", hidden_size),), width, bias=spec.out_bias, epilogue="add"
        )
        self.qk_weight: Tensor | None = None

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.qkv.wanted()
        yield from self.out.wanted()
        if self.spec.qk_norm:
            yield f"{self.prefix}.q_norm.weight", (self.spec.head_dim,)
            yield f"{self.prefix}.k_norm.weight", (self.spec.head_dim,)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.qkv.load(tensors)
        self.out.load(tensors)
        if self.spec.qk_norm:
            query = tensors[f"{self.prefix}.q_norm.weight"].expand(self.spec.num_heads, -1)
            key = tensors[f"{self.prefix}.k_norm.weight"].expand(self.spec.num_kv_heads, -1)
            self.qk_weight = torch.cat((query, key))

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        cache: Tensor,
        state: Any,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """x, residual: [T, hidden]; ``state``: the step's. Returns residual + attention(x), of the
        given ``tokens`` (int64 [r]) or of all."""
        mixed = self.operation(self.qkv(x), cache, state, self.qk_weight)
        if tokens is not None:
            mixed, residual = self.take_rows(mixed, tokens), self.take_rows(residual, tokens)
        return self.out(mixed, residual)
