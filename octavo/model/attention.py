"""The attention part of a layer: qkv projection, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.norm import Norm, SharedNorm
from octavo.model.rope import rotary_order
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import GQASpec
from octavo.model.states import AttentionStates, StateKey
from octavo.ops.attention import AttentionGeometry, PagedAttention
from octavo.ops.linear import Epilogue


def geometry_of(spec: GQASpec, cache_dtype: torch.dtype | None = None) -> AttentionGeometry:
    by_head = spec.qk_norm and spec.qk_norm_over == "head"
    return AttentionGeometry(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        window=spec.window,
        qk_norm_eps=spec.qk_norm.eps if spec.qk_norm and by_head else None,
        softcap=spec.softcap,
        own_scale=spec.scale,
        sinks=spec.sinks,
        cache_dtype=cache_dtype,
    )


class Attention:
    """``epilogue``: of the output projection, "add" or "none". ``ranks``: among which heads are
    divided; ``spec`` is then of this rank's heads, ``whole`` of all."""

    def __init__(
        self,
        prefix: str,
        spec: GQASpec,
        hidden_size: int,
        states: AttentionStates,
        make_linear: Any,
        ops: Mapping[str, Callable[..., Any]],
        epilogue: Epilogue,
        ranks: TensorParallel = ALONE,
    ) -> None:
        self.prefix = prefix
        self.whole = spec
        self.heads = heads = ranks.shard.heads(spec.num_heads, spec.num_kv_heads)
        spec = replace(spec, num_heads=heads.num_queries, num_kv_heads=heads.num_keys)
        self.spec = spec
        self.key = StateKey(geometry_of(spec, states.cache_dtype), spec.rope, spec.head_dim)
        self.operation: PagedAttention = states.use("paged_attention", self.key)
        self.widths = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        width, kv_width = (
            n * spec.head_dim for n in (self.whole.num_heads, self.whole.num_kv_heads)
        )
        shared = ranks.shard.size > 1
        queries, keys = (
            (first * spec.head_dim, end * spec.head_dim)
            for first, end in (heads.queries, heads.keys)
        )
        self.qkv: Linear = make_linear(
            ((f"{prefix}.q", width), (f"{prefix}.k", kv_width), (f"{prefix}.v", kv_width)),
            hidden_size,
            bias=spec.qkv_bias,
            rows=(queries, keys, keys) if shared else None,
        )
        self.out: Linear = make_linear(
            ((f"{prefix}.o", hidden_size),),
            width,
            bias=spec.out_bias,
            epilogue=epilogue,
            columns=queries if shared else None,
            ranks=ranks,
        )
        self.qk_weight: Tensor | None = None  # [heads + kv_heads, d], of a norm of each head
        self.sinks: Tensor | None = None  # FP32 [heads]
        self.kv_scales: Tensor | None = None  # FP32 [2, kv_heads], of a cache in FP8
        self.qk_norms: list[Norm | SharedNorm] = []  # of projections
        if spec.qk_norm and spec.qk_norm_over == "projection":
            self.qk_norms = [
                SharedNorm(f"{prefix}.{name}_norm", spec.qk_norm, size, own, ranks, copies)
                if shared
                else Norm(f"{prefix}.{name}_norm", spec.qk_norm, size, ops)
                for name, size, own, copies in (
                    ("q", width, queries, 1),
                    ("k", kv_width, keys, heads.copies),
                )
            ]

    @property
    def is_plain(self) -> bool:
        return not self.qk_norms

    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.out)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.qkv.wanted()
        yield from self.out.wanted()
        for norm in self.qk_norms:
            yield from norm.wanted()
        if self.spec.qk_norm and not self.qk_norms:
            yield f"{self.prefix}.q_norm.weight", (self.spec.head_dim,)
            yield f"{self.prefix}.k_norm.weight", (self.spec.head_dim,)
        if self.spec.sinks:
            yield f"{self.prefix}.sinks.weight", (self.whole.num_heads,)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield from self.qkv.cuts()
        yield from self.out.cuts()

    def load(self, tensors: Mapping[str, Any]) -> None:
        tensors = self._in_rotary_order(tensors)
        self.qkv.load(tensors)
        self.out.load(tensors)
        for norm in self.qk_norms:
            norm.load(tensors)
        if self.spec.qk_norm and not self.qk_norms:
            query = tensors[f"{self.prefix}.q_norm.weight"].expand(self.spec.num_heads, -1)
            key = tensors[f"{self.prefix}.k_norm.weight"].expand(self.spec.num_kv_heads, -1)
            self.qk_weight = torch.cat((query, key))
        if self.spec.sinks:
            first, end = self.heads.queries
            self.sinks = tensors[f"{self.prefix}.sinks.weight"][first:end].float()

    def _in_rotary_order(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """With q and k moved within each head so that what turns together is a kernel's pair.
        Scores stay the same: q and k move alike."""
        rope, dim = self.spec.rope, self.spec.head_dim
        if rope is None or rope.dim in (None, dim):
            return tensors
        order = rotary_order(dim, rope.dim or dim)
        moved = dict(tensors)
        for name in tensors:
            if name.split(".")[-2] in ("q", "k", "q_norm", "k_norm"):
                rows = torch.arange(tensors[name].shape[0]).view(-1, dim)[:, order].flatten()
                moved[name] = tensors[name][rows]
        return moved

    def __call__(self, x: Tensor, cache: Tensor, state: Any) -> Tensor:
        """x: [T, hidden]; ``state``: the step's for ``key``. Returns [T, heads * d]."""
        qkv = self.qkv(x)
        if self.qk_norms:
            width, kv_width = self.widths
            query, key, value = qkv.split((width, kv_width, kv_width), dim=1)
            query_norm, key_norm = self.qk_norms
            qkv = torch.cat((query_norm(query), key_norm(key), value), dim=1)
        return self.operation(qkv, cache, state, self.qk_weight, self.sinks, self.kv_scales)
