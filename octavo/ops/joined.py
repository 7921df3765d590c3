"""Several weights as one whose outputs follow one another: what can be, without rounding any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from octavo.ops.weights import (
    ZERO,
    Float8Weight,
    Outliers,
    QuantizedWeight,
    TableWeight,
    Weight,
)

Kind = TypeVar("Kind", QuantizedWeight, TableWeight)


def alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """The same weights in one kind that can hold them all: the most bits, the smallest group, FP32
    scales where one has them, minimums where one has them. Codes of 8 bits are moved to the zero
    ``ZERO`` where they fit. Where zeros differ all the same, or minimums stand beside some, each
    becomes a zero of its groups, or part of the minimums, in FP32, which rounds none of a scale of
    18 bits or fewer (GGUF's).

    Raises ValueError where groups cannot be cut into the smallest, and where orders differ."""
    if len(weights) == 1:
        return [_moved(weights[0])] if _is_movable(weights) else list(weights)
    if not same_order(weights):
        raise ValueError("weights whose inputs have different orders")
    if _is_movable(weights):
        weights = [_moved(weight) for weight in weights]
    own = any(weight.zeros is not None for weight in weights)
    apart = own or len({weight.zero for weight in weights}) > 1
    with_minimums = any(weight.minimums is not None for weight in weights)
    if apart and own and not with_minimums:
        weights = [replace(weight, zeros=_zeros(weight), zero=0) for weight in weights]
    elif apart:
        weights = [_zero_in_minimums(weight) for weight in weights]
    elif with_minimums:
        weights = [_with_minimums(weight) for weight in weights]
    group, bits = min(weight.group for weight in weights), max(weight.bits for weight in weights)
    dtype = torch.float16
    for weight in weights:
        dtype = torch.promote_types(dtype, weight.scales.dtype)
    return [replace(in_groups(weight, group, dtype), bits=bits) for weight in weights]


def _zeros(weight: QuantizedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, weight.zero, dtype=torch.uint8)


def _with_minimums(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.minimums is not None:
        return weight
    return replace(weight, minimums=torch.zeros_like(weight.scales))


def _zero_in_minimums(weight: QuantizedWeight) -> QuantizedWeight:
    scales = weight.scales.float()
    low = -scales * _zeros(weight).float()
    if weight.minimums is not None:
        low = low + weight.minimums
    return replace(weight, scales=scales, minimums=low, zeros=None, zero=0)


def in_groups(
    weight: QuantizedWeight, group: int, dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """In groups of that size, scales and minimums in ``dtype``. Raises ValueError where the
    weight's are no multiple of it."""
    dtype = dtype or weight.scales.dtype
    if weight.group % group:
        raise ValueError(f"groups of {weight.group} inputs cannot be cut into {group}")
    count, times = -(-weight.shape[1] // group), weight.group // group

    def cut(values: Tensor) -> Tensor:
        return values if times == 1 else values.repeat_interleave(times, dim=1)[:, :count]

    return replace(
        weight,
        scales=cut(weight.scales.to(dtype)),
        minimums=None if weight.minimums is None else cut(weight.minimums.to(dtype)),
        zeros=None if weight.zeros is None else cut(weight.zeros),
        group=group,
    )


def fit_together(weights: Sequence[Weight]) -> bool:
    """Whether ``joined`` can make one of them without rounding any."""
    first = weights[0]
    if len(weights) == 1:
        return True
    if any(type(weight) is not type(first) for weight in weights):
        return False
    if isinstance(first, QuantizedWeight):
        affine = cast(list[QuantizedWeight], list(weights))
        group = min(weight.group for weight in affine)
        return same_order(affine) and not any(weight.group % group for weight in affine)
    if isinstance(first, Float8Weight):
        float8 = cast(list[Float8Weight], list(weights))
        scaled = {weight.input_scale is None for weight in float8}
        return len(scaled) == 1 and len({_kind_of(weight) for weight in float8}) == 1
    if isinstance(first, TableWeight):
        tables = cast(list[TableWeight], list(weights))
        return len({(w.bits, w.group, w.scales is None) for w in tables}) == 1
    return True


def _kind_of(weight: Float8Weight) -> tuple[torch.dtype, int, bool]:
    return weight.values.dtype, weight.block[1], weight.weight_only


def same_order(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether their inputs stand in the same order."""
    first = weights[0].order
    if first is None:
        return all(weight.order is None for weight in weights)
    return all(w.order is not None and torch.equal(w.order, first) for w in weights)


def _is_movable(weights: Sequence[QuantizedWeight]) -> bool:
    is_wide = max(weight.bits for weight in weights) == 8
    return is_wide and all(weight.zeros is None and _fits(weight) for weight in weights)


def _fits(weight: QuantizedWeight) -> bool:
    """Whether the codes can be moved so that their zero is ``ZERO``."""
    if weight.zero == ZERO:
        return True
    low, high = (int(code) + ZERO - weight.zero for code in torch.aminmax(weight.codes))
    return low >= 0 and high <= 255


def _moved(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.zero == ZERO:
        return weight
    codes = weight.codes + (ZERO - weight.zero)  # both in 8 bits, which wrap
    return replace(weight, codes=codes, bits=8, zero=ZERO)


def joined(weights: Sequence[Weight]) -> Weight:
    """One weight whose outputs are those of all, in order. Raises ValueError where they are of
    kinds that no one weight can hold: of different classes, groups, orders or types of FP8."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(type(weight) is not type(first) for weight in weights):
        raise ValueError(f"weights of different kinds: {[type(w).__name__ for w in weights]}")
    if isinstance(first, Tensor):
        return torch.cat(cast(list[Tensor], list(weights)))
    if isinstance(first, QuantizedWeight):
        affine = alike(cast(list[QuantizedWeight], list(weights)))
        return _stacked(affine, ("codes", "scales", "minimums", "zeros"))
    if isinstance(first, Float8Weight):
        return _joined_float8(cast(list[Float8Weight], list(weights)))
    return _joined_tables(cast(list[TableWeight], list(weights)))


def _joined_tables(weights: list[TableWeight]) -> TableWeight:
    first = weights[0]
    kinds = {(w.bits, w.group, w.scales is None) for w in weights}
    if len(kinds) > 1:
        raise ValueError(f"tables of different kinds (bits, group, no scales): {sorted(kinds)}")
    if any(w.table.dim() == 2 or not torch.equal(w.table, first.table) for w in weights):
        weights = [replace(w, table=w.table.expand(len(w.codes), -1)) for w in weights]
        table = torch.cat([w.table for w in weights])
    else:
        table = first.table
    outliers = None
    if any(w.outliers is not None for w in weights):
        outliers = _joined_outliers(weights)
    found = _stacked(weights, ("codes", "scales"))
    return replace(found, table=table, outliers=outliers)


def _joined_outliers(weights: list[TableWeight]) -> Outliers:
    device = weights[0].codes.device
    none = torch.zeros(0, device=device)
    found = [
        w.outliers
        or Outliers(torch.zeros(len(w.codes) + 1, dtype=torch.int32).to(device), none.int(), none)
        for w in weights
    ]
    counts = torch.cat([one.starts.long().diff() for one in found])
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    columns = torch.cat([one.columns for one in found])
    return Outliers(starts, columns, torch.cat([one.values for one in found]))


def _joined_float8(weights: list[Float8Weight]) -> Float8Weight:
    first = weights[0]
    kinds = {_kind_of(weight) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"FP8 weights of different kinds: {sorted(kinds, key=str)}")
    spans = {w.block[0] for w in weights}
    if spans != {first.block[0]} or first.block[0] in (0, 1):
        weights = [w if w.block[0] == 1 else _by_row(w) for w in weights]
    elif any(len(w.values) % first.block[0] for w in weights[:-1]):
        weights = [_by_row(w) for w in weights]  # a block would begin within another weight's
    scales = [w.input_scale for w in weights if w.input_scale is not None]
    if scales and len(scales) < len(weights):
        raise ValueError("some of the FP8 weights have input scales, others not")
    values = torch.cat([w.values.view(torch.uint8) for w in weights]).view(first.values.dtype)
    return replace(
        weights[0],
        values=values,
        scales=torch.cat([w.scales for w in weights]),
        input_scale=torch.stack([s.reshape(()) for s in scales]).amax() if scales else None,
    )


def _by_row(weight: Float8Weight) -> Float8Weight:
    rows, span = len(weight.values), weight.block[0]
    if span:
        scales = weight.scales.repeat_interleave(span, dim=0)[:rows]
    else:
        scales = weight.scales.expand(rows, -1)
    return replace(weight, scales=scales.contiguous(), block=(1, weight.block[1]))


def _stacked(weights: Sequence[Kind], names: Sequence[str]) -> Kind:
    columns = {name: [getattr(weight, name) for weight in weights] for name in names}
    found: dict[str, Any] = {
        name: None if v[0] is None else torch.cat(v) for name, v in columns.items()
    }
    return replace(weights[0], **found)
