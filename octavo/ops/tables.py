"""Rounding weights to codes into a table (NF4, FP4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register
from octavo.ops.weights import TableWeight


@register("quantize_table", "torch", batch_invariant="yes")
def quantize_table(weight: Tensor, table: tuple[float, ...], group: int) -> TableWeight:
    """weight: [out, in]; ``table``: its largest magnitude is 1. Codes of the nearest numbers, of
    equally near ones the lower; FP32 scales, max |weight| of each group."""
    rows, size = weight.shape
    numbers = torch.tensor(table, device=weight.device)
    ascending, places = numbers.sort(stable=True)
    wide = F.pad(weight.float(), (0, -size % group)).view(rows, -1, group)
    scales = wide.abs().amax(dim=-1, keepdim=True)
    borders = (ascending[1:] + ascending[:-1]) / 2
    share = torch.where(scales > 0, wide / scales, 0)
    codes = places[torch.bucketize(share, borders)].to(torch.uint8)
    codes = codes.flatten(1)[:, :size].contiguous()
    bits = (len(table) - 1).bit_length()
    return TableWeight(codes, numbers, scales[..., 0].contiguous(), bits, group)
