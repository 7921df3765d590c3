"""Weights of a linear that are not plain tensors: what each kind holds, and the numbers it means.

Three kinds carry every format: codes on an even grid (``QuantizedWeight``: GPTQ, AWQ, most of GGUF,
INT8), codes into a table (``TableWeight``: NF4, FP4, MXFP4, GGUF's IQ4, SqueezeLLM), and FP8
(``Float8Weight``). Each has ``shape`` [out, in]; ``dense()``, FP32 (FP64 where its scales are);
``weight[rows]``, some of the outputs, by a slice or ids; ``to(device)``; ``fields()``, its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

LARGEST_GROUP = 65_536  # whose products add up in 32 bits
ZERO = 128  # of codes of 8 bits that are made here
BITS = (2, 3, 4, 8)
Self = TypeVar("Self", bound="_Kind")


@dataclass(frozen=True)
class _Kind:
    def fields(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: Self, device: str | torch.device) -> Self:
        return replace(self, **{name: value.to(device) for name, value in self.fields().items()})

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    def dense(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class QuantizedWeight(_Kind):
    """``(code - zero) * scale + minimum``, in groups of ``group`` inputs that share scale, zero and
    minimum; the last group may be shorter.

    codes: uint8 [out, in], below 2^bits. scales: FP16 or FP32 [out, groups]. minimums: of the
    scales' dtype [out, groups], or None. zeros: uint8 [out, groups], each group's own instead of
    ``zero``, or None. order: int64 [in]; the weight of input ``order[i]`` stands at place i (GPTQ's
    act-order), None: of input i. weight_only: the format leaves inputs as they are; else they are
    rounded to 8 bits as well (W8A8).

    Raises ValueError for other bits than 2, 3, 4 and 8, a group that is no multiple of 4 or above
    ``LARGEST_GROUP``, and for zeros beside minimums or another ``zero`` than 0.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    group: int
    zero: int = 0
    zeros: Tensor | None = None
    order: Tensor | None = None
    weight_only: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"codes have 2, 3, 4 or 8 bits, not {self.bits}")
        if self.group % 4 or not 0 < self.group <= LARGEST_GROUP:
            raise ValueError(
                f"a group has a multiple of 4 inputs, at most {LARGEST_GROUP}, not {self.group}"
            )
        if self.zeros is not None and (self.minimums is not None or self.zero):
            raise ValueError("zeros of groups exclude minimums and a common zero")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self) -> Tensor:
        dtype = torch.promote_types(self.scales.dtype, torch.float32)
        zeros: Any = self.zero
        if self.zeros is not None:
            zeros = self._per_input(self.zeros).to(dtype)
        values = (self.codes.to(dtype) - zeros) * self._per_input(self.scales).to(dtype)
        if self.minimums is not None:
            values = values + self._per_input(self.minimums)
        return values if self.order is None else _put_back(values, self.order)

    def __getitem__(self, index: Tensor | slice) -> QuantizedWeight:
        return _rows(self, index, ("codes", "scales", "minimums", "zeros"))

    def _per_input(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


@dataclass(frozen=True)
class Outliers:
    """Numbers apart from a matrix [out, in], by rows (CSR). starts: int32 [out + 1], where each
    row's begin; columns: int32 [n], ascending within a row; values: FP32 [n]."""

    starts: Tensor
    columns: Tensor
    values: Tensor

    def rows(self) -> Tensor:
        """int64 [n]: the row of each."""
        counts = self.starts.long().diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    def __getitem__(self, index: Tensor | slice) -> Outliers:
        starts, device = self.starts.long(), self.starts.device
        chosen = torch.arange(len(starts) - 1, device=device)[index]
        counts = starts.diff()[chosen]
        ends = counts.cumsum(0)
        inner = torch.arange(int(counts.sum()), device=device)
        places = inner + (starts[chosen] - (ends - counts)).repeat_interleave(counts)
        begins = torch.cat((ends.new_zeros(1), ends)).int()
        return Outliers(begins, self.columns[places], self.values[places])

    def to(self, device: str | torch.device) -> Outliers:
        return Outliers(self.starts.to(device), self.columns.to(device), self.values.to(device))


@dataclass(frozen=True)
class TableWeight(_Kind):
    """``table[code] * scale``, plus outliers.

    codes: uint8 [out, in], below 2^bits. table: FP32 [2^bits], or of each output [out, 2^bits].
    scales: FP32 [out, groups] of ``group`` inputs each, the last one may have fewer, or None.
    outliers: what is added at some places, or None. Raises ValueError for other bits than 2, 3, 4
    and 8 and a table of another size.
    """

    codes: Tensor
    table: Tensor
    scales: Tensor | None
    bits: int
    group: int = 0
    outliers: Outliers | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.table.shape[-1] != 1 << self.bits:
            raise ValueError(f"a table of {self.table.shape[-1]} numbers for {self.bits} bits")
        if self.scales is not None and self.group < 1:
            raise ValueError(f"scales of groups of {self.group} inputs")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dense(self) -> Tensor:
        values = _looked_up(self.table, self.codes)
        if self.scales is not None:
            scales = self.scales.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
            values = values * scales
        if self.outliers is not None:
            places = (self.outliers.rows(), self.outliers.columns.long())
            extra = self.outliers.values.to(values.dtype)
            values = values.index_put(places, extra, accumulate=True)
        return values

    def __getitem__(self, index: Tensor | slice) -> TableWeight:
        found = _rows(self, index, ("codes", "scales"))
        table = self.table if self.table.dim() == 1 else self.table[index]
        outliers = None if self.outliers is None else self.outliers[index]
        return replace(found, table=table, outliers=outliers)

    def to(self, device: str | torch.device) -> TableWeight:
        outliers = None if self.outliers is None else self.outliers.to(device)
        return replace(super().to(device), outliers=outliers)


@dataclass(frozen=True)
class Float8Weight(_Kind):
    """``value * scale``.

    values: float8_e4m3fn or float8_e5m2 [out, in]. scales: FP32 [ceil(out / block[0]),
    ceil(in / block[1])]: one of each block of outputs and inputs; 0 in ``block`` stands for all of
    them. input_scale: FP32 [], what inputs are divided by before they are rounded to FP8, or None:
    each token's own, its largest by the type's. weight_only: inputs are never rounded.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] = (0, 0)
    input_scale: Tensor | None = None
    weight_only: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dense(self) -> Tensor:
        dtype = torch.promote_types(self.scales.dtype, torch.float32)
        return self.values.to(dtype) * self._per_value(self.scales)

    def _per_value(self, scales: Tensor) -> Tensor:
        for axis, (span, size) in enumerate(zip(self.block, self.shape)):
            if span:
                scales = scales.repeat_interleave(span, dim=axis).narrow(axis, 0, size)
        return scales

    def by_channel(self) -> Float8Weight:
        """The same with a scale for each output. Raises ValueError where inputs have several."""
        if self.block[1]:
            raise ValueError("inputs have scales of their own")
        rows, scales = len(self.values), self.scales
        if self.block[0]:
            scales = scales.repeat_interleave(self.block[0], dim=0)[:rows]
        return replace(self, scales=scales.expand(rows, 1).contiguous(), block=(1, 0))

    def __getitem__(self, index: Tensor | slice) -> Float8Weight:
        """Outputs chosen at will get scales of their own rows."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        if self.block[0] == 0:
            return replace(self, values=values)
        scales = self.scales
        if self.block[0] > 1:
            scales = scales.repeat_interleave(self.block[0], dim=0)[: len(self.values)]
        return replace(self, values=values, scales=scales[index], block=(1, self.block[1]))


Quantized = QuantizedWeight | TableWeight | Float8Weight
Weight = Tensor | Quantized
KINDS = (QuantizedWeight, TableWeight, Float8Weight)


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
    return [replace(_in_groups(weight, group, dtype), bits=bits) for weight in weights]


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


def _in_groups(weight: QuantizedWeight, group: int, dtype: torch.dtype) -> QuantizedWeight:
    """In groups of that size, scales and minimums in ``dtype``."""
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


def _stacked(weights: Sequence[Self], names: Sequence[str]) -> Self:
    columns = {name: [getattr(weight, name) for weight in weights] for name in names}
    found = {name: None if v[0] is None else torch.cat(v) for name, v in columns.items()}
    return replace(weights[0], **found)


def _rows(weight: Self, index: Tensor | slice, names: Sequence[str]) -> Self:
    pairs = ((name, getattr(weight, name)) for name in names)
    return replace(weight, **{name: None if v is None else v[index] for name, v in pairs})


def _put_back(values: Tensor, order: Tensor) -> Tensor:
    """values: [out, in], of the inputs ``order``; in the order of inputs."""
    found = torch.empty_like(values)
    found[:, order] = values
    return found


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    if table.dim() == 1:
        return table[codes.int()]
    return table.gather(1, codes.long())
