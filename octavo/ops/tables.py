"""Tables of numbers that codes of four bits stand for, and rounding weights to one.

NF4: the QLoRA paper's appendix E (https://arxiv.org/abs/2305.14314). FP4 as bitsandbytes has it:
E2M1 with its own subnormals, the largest 1. E2M1: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import register
from octavo.ops.weights import TableWeight

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
FP4 = (*_FP4, *(-value for value in _FP4))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))


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
