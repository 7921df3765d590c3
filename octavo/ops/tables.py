"""Rounding weights to codes into a table (NF4, FP4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register
from octavo.ops.weights import TableWeight

_VALUES_AT_A_TIME = 1 << 22  # intermediate ones have 4 bytes


@register("quantize_table", "torch", batch_invariant="yes")
def quantize_table(weight: Tensor, table: tuple[float, ...], group: int) -> TableWeight:
    """weight: [out, in]; ``table``: its largest magnitude is 1. Codes of the nearest numbers, of
    equally near ones the lower; FP32 scales, max |weight| of each group."""
    rows, size = weight.shape
    numbers = torch.tensor(table, device=weight.device)
    step = max(1, _VALUES_AT_A_TIME // size)
    parts = [_nearest(weight[at : at + step], numbers, group) for at in range(0, rows, step)]
    codes, scales = (torch.cat(found) for found in zip(*parts))
    return TableWeight(codes, numbers, scales, (len(table) - 1).bit_length(), group)


def _nearest(weight: Tensor, numbers: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [r, in], and scales, FP32 [r, groups]."""
    rows, size = weight.shape
    ascending, places = numbers.sort(stable=True)
    wide = F.pad(weight.float(), (0, -size % group)).view(rows, -1, group)
    scales = wide.abs().amax(dim=-1, keepdim=True)
    borders = (ascending[1:] + ascending[:-1]) / 2
    share = torch.where(scales > 0, wide / scales, 0)
    ranks = torch.zeros(share.shape, dtype=torch.uint8, device=weight.device)
    for border in borders:  # quicker than a search: each pass goes by vectors
        ranks += share > border
    codes = places.to(torch.uint8)[ranks.int()]
    return codes.flatten(1)[:, :size], scales[..., 0]
