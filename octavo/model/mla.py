"""The multi-head latent attention part of a layer (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

The cache holds a token's latent and its one rotated key; the up-projections of keys and values are
absorbed into the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.norm import Norm
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import MLASpec
from octavo.model.stages import Range
from octavo.model.states import AttentionStates, StateKey
from octavo.ops.cut import outputs_of
from octavo.ops.linear import Epilogue
from octavo.ops.mla import MLAGeometry, PagedLatentAttention
from octavo.ops.weights import dense


def latent_geometry_of(spec: MLASpec) -> MLAGeometry:
    return MLAGeometry(
        spec.num_heads,
        spec.latent_dim,
        spec.rope_dim,
        spec.nope_dim,
        spec.value_dim,
        spec.scale,
        spec.interleaved,
    )


class LatentAttention:
    """``epilogue``: of the output projection, "add" or "none". ``ranks``: among which heads are
    divided, while each keeps the latents; ``spec`` is then of this rank's heads."""

    is_plain = False  # it cuts and joins what its projections give

    def __init__(
        self,
        prefix: str,
        spec: MLASpec,
        hidden_size: int,
        states: AttentionStates,
        make_linear: Any,
        ops: Mapping[str, Callable[..., Any]],
        epilogue: Epilogue,
        ranks: TensorParallel = ALONE,
    ) -> None:
        self.prefix = prefix
        self.whole = spec
        self.heads = ranks.shard.heads(spec.num_heads, spec.num_heads)
        self.spec = spec = replace(spec, num_heads=self.heads.num_queries)
        geometry = latent_geometry_of(spec)
        self.key = StateKey(geometry, spec.rope, spec.rope_dim)
        self.operation: PagedLatentAttention = states.use("paged_latent_attention", self.key)
        shared = ranks.shard.size > 1
        query_width = self.whole.num_heads * geometry.query_dim
        queries, values = (self._columns(dim) for dim in (geometry.query_dim, spec.value_dim))
        first, own = (f"{prefix}.q", query_width), queries
        self.query_norm: Norm | None = None
        self.query_up: Linear | None = None
        if spec.query_rank is not None:
            first, own = (f"{prefix}.q_down", spec.query_rank), (0, spec.query_rank)
            self.query_norm = Norm(f"{prefix}.q_down_norm", spec.norm, spec.query_rank, ops)
            self.query_up = make_linear(
                ((f"{prefix}.q_up", query_width),),
                spec.query_rank,
                rows=(queries,) if shared else None,
            )
        self.widths = (own[1] - own[0], spec.latent_dim, spec.rope_dim)
        self.down: Linear = make_linear(
            (first, (f"{prefix}.kv_down", geometry.cache_dim)),
            hidden_size,
            rows=(own, (0, geometry.cache_dim)) if shared else None,
        )
        self.latent_norm = Norm(f"{prefix}.kv_down_norm", spec.norm, spec.latent_dim, ops)
        self.out: Linear = make_linear(
            ((f"{prefix}.o", hidden_size),),
            self.whole.num_heads * spec.value_dim,
            epilogue=epilogue,
            columns=values if shared else None,
            ranks=ranks,
        )
        self.key_up: Tensor  # [heads, nope, latent]
        self.value_up: Tensor  # [heads, latent, value]

    def linears(self) -> tuple[Linear, ...]:
        return (self.down, *((self.query_up,) if self.query_up else ()), self.out)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self._parts():
            yield from part.wanted()
        rows = self.whole.num_heads * (self.spec.nope_dim + self.spec.value_dim)
        yield f"{self.prefix}.kv_up.weight", (rows, self.spec.latent_dim)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        for linear in self.linears():
            yield from linear.cuts()
        if self.spec.num_heads < self.whole.num_heads:
            up = self._columns(self.spec.nope_dim + self.spec.value_dim)
            yield f"{self.prefix}.kv_up.weight", Cut((up,))

    def _columns(self, dim: int) -> Range:
        """Of this rank's heads of ``dim`` numbers each."""
        first, end = self.heads.queries
        return first * dim, end * dim

    def load(self, tensors: Mapping[str, Any]) -> None:
        for part in self._parts():
            part.load(tensors)
        spec, stored = self.spec, tensors[f"{self.prefix}.kv_up.weight"]
        own = outputs_of(stored, (self._columns(spec.nope_dim + spec.value_dim),))
        up = dense(own, self.down.versions.dtype).view(spec.num_heads, -1, spec.latent_dim)
        self.key_up, values = up.split((spec.nope_dim, spec.value_dim), dim=1)  # views
        self.value_up = values.transpose(1, 2)

    def _parts(self) -> Iterator[Linear | Norm]:
        yield from self.linears()
        yield self.latent_norm
        if self.query_norm:
            yield self.query_norm

    def __call__(self, x: Tensor, cache: Tensor, state: Any) -> Tensor:
        """x: [T, hidden]; ``state``: the step's for ``key``. Returns [T, heads * value]."""
        first, latent, shared = self.down(x).split(self.widths, dim=1)
        if self.query_norm and self.query_up:
            first = self.query_up(self.query_norm(first))
        kv = torch.cat((self.latent_norm(latent), shared), dim=1)
        query = first.reshape(len(x), self.spec.num_heads, -1)
        return self.operation(query, kv, cache, state, self.key_up, self.value_up)
