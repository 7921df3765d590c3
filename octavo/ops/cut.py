"""A part of a weight: some of its outputs, some of its inputs. Nothing is rounded.

Outputs of any kind of weight can be taken one by one (``weight[rows]``). Inputs have scales in
common: a part that begins within a group gets smaller groups where kernels know them, else the
group's other inputs come along and are fed zeros (``Selected``). So do the groups of GPTQ's
act-order, whose inputs lie all over the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from octavo.ops.joined import in_groups
from octavo.ops.weights import (
    Float8Weight,
    Outliers,
    Quantized,
    QuantizedWeight,
    Selected,
    TableWeight,
    Weight,
)

Range = tuple[int, int]  # first, and one after the last
SMALLEST_CUT = 32  # inputs of a group that is made by cutting: kernels' tiles are no smaller


def outputs_of(weight: Weight, ranges: Sequence[Range]) -> Weight:
    """These outputs, in order, in memory of their own."""
    if len(ranges) == 1:
        first, end = ranges[0]
        if (first, end) == (0, weight.shape[0]):
            return weight
        if isinstance(weight, Float8Weight) and weight.block[0] > 1 and not first % weight.block[0]:
            span = weight.block[0]
            scales = weight.scales[first // span : -(-end // span)].clone()
            return replace(weight, values=_bytes(weight.values, first, end), scales=scales)
        part = weight[first:end]
        return part.clone() if isinstance(part, Tensor) else part
    device = weight.device if isinstance(weight, Tensor) else _device_of(weight)
    rows = torch.cat([torch.arange(first, end, device=device) for first, end in ranges])
    return weight[rows]


def _bytes(values: Tensor, first: int, end: int) -> Tensor:
    """Rows of numbers of 8 bits, which torch does not index on every device."""
    return values.view(torch.uint8)[first:end].clone().view(values.dtype)


def _device_of(weight: Quantized) -> torch.device:
    return next(iter(weight.fields().values())).device


def inputs_of(weight: Weight, first: int, end: int) -> Weight | Selected:
    """The inputs ``first`` .. ``end`` - 1, in memory of their own."""
    if (first, end) == (0, weight.shape[1]):
        return weight
    if isinstance(weight, Tensor):
        return weight[:, first:end].contiguous()
    if isinstance(weight, QuantizedWeight) and weight.order is not None:
        return _of_order(weight, first, end)
    group = _group_of(weight)
    if group == 0 or first % group == 0:
        return _columns(weight, first, end)
    smaller = gcd(group, first)
    if smaller >= SMALLEST_CUT and not isinstance(weight, Float8Weight):
        return _columns(_in_groups(weight, smaller), first, end)
    begin = first - first % group
    places = torch.arange(begin, end, device=_device_of(weight)) - first
    places[places < 0] = end - first
    return Selected(_columns(weight, begin, end), places, end - first)


def _group_of(weight: Quantized) -> int:
    """Inputs that share a scale; 0: all do, or there is none."""
    if isinstance(weight, QuantizedWeight):
        return weight.group if weight.group < weight.shape[1] else 0
    if isinstance(weight, TableWeight):
        return weight.group if weight.scales is not None else 0
    return weight.block[1]


def _in_groups(weight: Quantized, group: int) -> Quantized:
    if isinstance(weight, QuantizedWeight):
        return in_groups(weight, group)
    assert isinstance(weight, TableWeight) and weight.scales is not None
    count = -(-weight.shape[1] // group)
    scales = weight.scales.repeat_interleave(weight.group // group, dim=1)[:, :count]
    return replace(weight, scales=scales, group=group)


def _columns(weight: Quantized, first: int, end: int) -> Quantized:
    """``first`` begins a group."""
    group = _group_of(weight)
    groups = slice(first // group, -(-end // group)) if group else slice(None)
    if isinstance(weight, QuantizedWeight):
        found = {name: getattr(weight, name) for name in ("scales", "minimums", "zeros")}
        cut: dict[str, Any] = {
            name: None if x is None else x[:, groups].contiguous() for name, x in found.items()
        }
        return replace(weight, codes=weight.codes[:, first:end].contiguous(), **cut)
    if isinstance(weight, TableWeight):
        scales = None if weight.scales is None else weight.scales[:, groups].contiguous()
        outliers = None if weight.outliers is None else _between(weight.outliers, first, end)
        codes = weight.codes[:, first:end].contiguous()
        return replace(weight, codes=codes, scales=scales, outliers=outliers)
    assert isinstance(weight, Float8Weight)
    raw = weight.values.view(torch.uint8)[:, first:end].contiguous()
    scales = weight.scales[:, groups].contiguous()
    return replace(weight, values=raw.view(weight.values.dtype), scales=scales)


def _between(outliers: Outliers, first: int, end: int) -> Outliers:
    kept = (outliers.columns >= first) & (outliers.columns < end)
    rows = outliers.rows()[kept]
    counts = torch.bincount(rows, minlength=len(outliers.starts) - 1)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    return Outliers(starts, (outliers.columns[kept] - first).int(), outliers.values[kept])


def _of_order(weight: QuantizedWeight, first: int, end: int) -> Selected:
    """Of a weight whose places hold inputs in an order of their own: the places of these inputs,
    those of each group filled up to a multiple of a smaller one, which then share its scale."""
    assert weight.order is not None
    small = gcd(weight.group, SMALLEST_CUT)
    inputs, zero = end - first, end - first
    chosen: list[Tensor] = []
    places: list[Tensor] = []
    of_groups: list[int] = []
    for group, order in enumerate(weight.order.split(weight.group)):
        mine = ((order >= first) & (order < end)).nonzero()[:, 0]
        missing = -len(mine) % small
        fill = mine.new_zeros(missing)
        chosen.append(torch.cat((mine, fill)) + group * weight.group)
        places.append(torch.cat((order[mine] - first, fill + zero)))
        of_groups += [group] * ((len(mine) + missing) // small)
    columns, groups = torch.cat(chosen), torch.tensor(of_groups, device=weight.order.device)
    found = {name: getattr(weight, name) for name in ("scales", "minimums", "zeros")}
    cut: dict[str, Any] = {name: None if x is None else x[:, groups] for name, x in found.items()}
    part = replace(weight, codes=weight.codes[:, columns], group=small, order=None, **cut)
    return Selected(part, torch.cat(places), inputs)
