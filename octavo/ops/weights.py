"""Weights of a linear that are not plain tensors: what each kind holds, and the numbers it means.

Three kinds carry every format: codes on an even grid (``QuantizedWeight``: GPTQ, AWQ, most of GGUF,
INT8), codes into a table (``TableWeight``: NF4, FP4, MXFP4, GGUF's IQ4, SqueezeLLM), and FP8
(``Float8Weight``). Each has ``shape`` [out, in]; ``dense()``, FP32 (FP64 where its scales are);
``weight[rows]``, some of the outputs, by a slice or ids; ``to(device)``; ``fields()``, its tensors.
A rank's share of the inputs may be a ``Selected`` one of these (``ops.cut``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

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


@dataclass(frozen=True)
class Selected:
    """A weight [out, P] whose place i multiplies input ``places[i]``; ``inputs``: how many there
    are. places: int64 [P]; ``inputs`` itself stands for a zero."""

    weight: QuantizedWeight | TableWeight | Float8Weight
    places: Tensor
    inputs: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weight.shape[0], self.inputs))

    def fields(self) -> dict[str, Tensor]:
        return {**self.weight.fields(), "places": self.places}

    def dense(self) -> Tensor:
        """FP32 [out, inputs]."""
        values = self.weight.dense()
        found = values.new_zeros(values.shape[0], self.inputs + 1)
        return found.index_add_(1, self.places, values)[:, : self.inputs]

    def __getitem__(self, index: Tensor | slice) -> Selected:
        return replace(self, weight=self.weight[index])

    def to(self, device: str | torch.device) -> Selected:
        return replace(self, weight=self.weight.to(device), places=self.places.to(device))

    def taken(self, x: Tensor) -> Tensor:
        """x: [T, inputs]. What the weight multiplies, [T, P]."""
        return torch.cat((x, x.new_zeros(len(x), 1)), dim=1).index_select(1, self.places)


Quantized = QuantizedWeight | TableWeight | Float8Weight
Weight = Tensor | Quantized


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


def dense(weight: Weight | Selected, dtype: torch.dtype) -> Tensor:
    """In ``dtype``, expanded where it is quantized: some outputs at a time, since FP32 of all of a
    vocabulary's would take several times the memory of what comes out."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    rows, inputs = weight.shape
    device = next(iter(weight.fields().values())).device
    found = torch.empty(rows, inputs, dtype=dtype, device=device)
    step = max(1, _VALUES_AT_A_TIME // max(inputs, 1))
    for at in range(0, rows, step):
        found[at : at + step] = weight[at : at + step].dense()
    return found


_VALUES_AT_A_TIME = 1 << 22  # intermediate ones have 4 or 8 bytes
