"""Paged attention with FlashAttention-3 (Shah et al. 2024) where rows bring several tokens: an
optional package, tokenspeed-fa3, for Hopper. In a prototype on an H200 it took a prompt of 8,192
tokens at 573 TFLOP/s from blocks of 64, a Triton kernel like ours at 454."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention import AttentionGeometry, BatchColumns, Rope
from octavo.ops.registry import register
from octavo.ops.triton import launch
from octavo.ops.triton.attention import Layer, Step, TritonPagedAttention

PACKAGE = "flash_attn_3"  # what the wheel installs


def available(device: str, dtype: torch.dtype) -> bool:
    return (
        launch.available(device, dtype)
        and find_spec(PACKAGE) is not None
        and torch.cuda.get_device_capability()[0] == 9
    )


def load_forward() -> Callable[..., Any]:
    import_module(f"{PACKAGE}._C")  # registers the operators
    return torch.ops.flash_attn_3.fwd


@dataclass(slots=True)
class FA3Step(Step):
    """``rest_starts``: int32, first tokens of the rows after the decode rows, from 0."""

    rest_starts: Tensor


@register("paged_attention", "fa3", available, tolerance=8.0)
class FA3PagedAttention(TritonPagedAttention):
    """The Triton version but for one kernel, and entirely with softcap, sinks or a cache of 8 bits
    (the package is built without the first and wants queries in FP8 for the last). The cache is the
    same. ``forward``: the package's operator, loaded if not given."""

    def __init__(
        self, geometry: AttentionGeometry, forward: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(geometry)
        self._forward = forward or load_forward()

    def prepare(self, batch: BatchColumns, rope: Rope, dtype: torch.dtype) -> FA3Step:
        step = super().prepare(batch, rope, dtype)
        starts = batch.query_starts[batch.decode_rows :]
        if len(starts) > 1:
            starts = starts - batch.decode_rows
        return FA3Step(step.batch, step.rotations, step.by_token, step.workspace, starts)

    def attend_rest(self, qkv: Tensor, layer: Layer, out: Tensor, step: Step) -> None:
        assert isinstance(step, FA3Step)
        if self.geometry.softcap is not None or layer.sinks is not None or self.kind:
            super().attend_rest(qkv, layer, out, step)
            return
        batch, geometry = step.batch, self.geometry
        first, dim = batch.decode_rows, geometry.head_dim
        keys, values = layer.cache.transpose(1, 3).unbind(2)  # [block, offset, head, d] each
        self._forward(
            qkv[first:, : out.shape[1]].unflatten(1, (-1, dim)),
            keys,
            values,
            out=out[first:].unflatten(1, (-1, dim)),
            cu_seqlens_q=step.rest_starts,
            seqused_k=batch.seq_lens[first:],
            max_seqlen_q=len(qkv) - first,
            page_table=batch.block_tables[first:],
            softmax_scale=geometry.scale,
            is_causal=True,
            window_size_left=-1 if geometry.window is None else geometry.window - 1,
            window_size_right=0,
        )
