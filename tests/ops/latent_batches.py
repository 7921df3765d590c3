"""Inputs for tests of latent attention, for the batches of attention_batches.py."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.mla import MLAGeometry
from tests.ops.attention_batches import Case, columns


def randn(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def inputs(
    geometry: MLAGeometry, tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """q and kv of ``tokens`` tokens."""
    q = randn(tokens, geometry.num_heads, geometry.query_dim, seed=1, device=device)
    kv = randn(tokens, geometry.cache_dim, seed=2, device=device)
    return q.to(dtype), kv.to(dtype)


def ups(geometry: MLAGeometry, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The up-projections, by which numbers keep their size."""
    heads, latent = geometry.num_heads, geometry.latent_dim
    key = randn(heads, geometry.nope_dim, latent, seed=3, device=device)
    value = randn(heads, latent, geometry.value_dim, seed=4, device=device)
    return (key * latent**-0.5).to(dtype), (value * latent**-0.5).to(dtype)


def latent_history(
    geometry: MLAGeometry, case: Case, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """[block, offset, latent + rope]: random where a row's past is, NaN everywhere else."""
    plain, size = case.plain, case.plain.block_size
    past = (plain.seq_lens - plain.query_starts.diff()).tolist()
    slots = columns([0] * len(past), past, plain.block_tables, size, 0).slot_mapping
    shape = (case.num_blocks * size, geometry.cache_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    known = randn(len(slots), geometry.cache_dim, seed=0, device=device)
    cache[slots.to(device)] = known.to(dtype)
    return cache.unflatten(0, (case.num_blocks, size))
