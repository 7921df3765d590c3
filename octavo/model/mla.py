"""The multi-head latent attention part of a layer (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

The cache holds a token's latent and its one rotated key; the up-projections of keys and values are
absorbed into the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.norm import Norm
from octavo.model.spec import MLASpec
from octavo.model.states import AttentionStates, StateKey
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
    """``epilogue``: of the output projection, "add" or "none"."""

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
    ) -> None:
        self.prefix = prefix
        self.spec = spec
        geometry = latent_geometry_of(spec)
        self.key = StateKey(geometry, spec.rope, spec.rope_dim)
        self.operation: PagedLatentAttention = states.use("paged_latent_attention", self.key)
        query_width = spec.num_heads * geometry.query_dim
        first = (f"{prefix}.q", query_width)
        self.query_norm: Norm | None = None
        self.query_up: Linear | None = None
        if spec.query_rank is not None:
            first = (f"{prefix}.q_down", spec.query_rank)
            self.query_norm = Norm(f"{prefix}.q_down_norm", spec.norm, spec.query_rank, ops)
            self.query_up = make_linear(((f"{prefix}.q_up", query_width),), spec.query_rank)
        self.widths = (first[1], spec.latent_dim, spec.rope_dim)
        self.down: Linear = make_linear(
            (first, (f"{prefix}.kv_down", geometry.cache_dim)), hidden_size
        )
        self.latent_norm = Norm(f"{prefix}.kv_down_norm", spec.norm, spec.latent_dim, ops)
        self.out: Linear = make_linear(
            ((f"{prefix}.o", hidden_size),), spec.num_heads * spec.value_dim, epilogue=epilogue
        )
        self.key_up: Tensor  # [heads, nope, latent]
        self.value_up: Tensor  # [heads, latent, value]

    def linears(self) -> tuple[Linear, ...]:
        return (self.down, *((self.query_up,) if self.query_up else ()), self.out)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self._parts():
            yield from part.wanted()
        rows = self.spec.num_heads * (self.spec.nope_dim + self.spec.value_dim)
        yield f"{self.prefix}.kv_up.weight", (rows, self.spec.latent_dim)

    def load(self, tensors: Mapping[str, Any]) -> None:
        for part in self._parts():
            part.load(tensors)
        spec, stored = self.spec, tensors[f"{self.prefix}.kv_up.weight"]
        up = dense(stored, self.down.versions.dtype).view(spec.num_heads, -1, spec.latent_dim)
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
