"""Linears on weights of any kind that are expanded, a panel at a time, where they are multiplied
(csrc/linear_expanded.h): codes stay as small as they are, and inputs are not rounded."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.ops.joined import joined
from octavo.ops.linear import Epilogue
from octavo.ops.native import calls
from octavo.ops.native.library import Features, Kernels, function, preferred
from octavo.ops.native.linear import HALF, PANEL, Lookup, Packed, by_lane
from octavo.ops.registry import register
from octavo.ops.weights import (
    Float8Weight,
    Outliers,
    Quantized,
    QuantizedWeight,
    TableWeight,
    Weight,
)

EXPANDED: dict[torch.dtype, Kernels] = {
    torch.float32: (
        (Features.AVX512, "octavo_linear_expanded_f32_avx512"),
        (Features.AVX2, "octavo_linear_expanded_f32_avx2"),
    ),
    torch.bfloat16: (
        (Features.AMX, "octavo_linear_expanded_bf16_amx"),
        (Features.AVX512_BF16, "octavo_linear_expanded_bf16_avx512bf16"),
    ),
}
_TABLE, _TABLES, _BYTES, _E4M3, _E5M2 = range(1, 6)  # csrc/octavo.h
_BLOCK = 32  # inputs
_E4M3_UNIT = 256.0  # its numbers are expanded 2^8 too small


class _Outliers(Structure):
    """OctavoOutliers of csrc/octavo.h."""

    _fields_ = tuple((name, c_void_p) for name in ("starts", "columns", "lanes", "values"))


class _Rows(Structure):
    """OctavoExpandedRows."""

    _fields_ = tuple((n, c_void_p) for n in ("codes", "scales", "minimums", "zeros", "tables"))


@dataclass(frozen=True)
class _Coded:
    """What the kernels take of a weight of any kind, [out, in]: codes, uint8; ``coding``; what
    groups of inputs have, [out, groups] each or None; the table of all outputs or one of each.
    ``group``: 0 where there are no scales. ``is_narrow``: BF16 holds what codes stand for."""

    codes: Tensor
    coding: int
    bits: int
    group: int = 0
    scales: Tensor | None = None
    minimums: Tensor | None = None
    zeros: Tensor | None = None
    table: Tensor | None = None
    tables: Tensor | None = None
    zero: int = 0
    is_narrow: bool = True
    order: Tensor | None = None
    outliers: Outliers | None = None

    @property
    def is_scaled_alone(self) -> bool:
        """Whether scales are all that follows the codes' numbers."""
        return self.zeros is None and self.minimums is None

    @property
    def is_exact(self) -> bool:
        """And BF16 holds those."""
        return self.is_narrow and self.is_scaled_alone

    def rows(self, part: slice) -> dict[str, Tensor]:
        """Of some outputs, in memory as they are packed from."""
        names = ("codes", "scales", "minimums", "zeros", "tables")
        found = {name: getattr(self, name) for name in names}
        return {name: v[part].contiguous() for name, v in found.items() if v is not None}


def _coded(weight: Quantized) -> _Coded:
    if isinstance(weight, QuantizedWeight):
        return _of_grid(weight)
    if isinstance(weight, TableWeight):
        return _of_table(weight)
    return _of_float8(weight)


def _of_grid(weight: QuantizedWeight) -> _Coded:
    names = ("codes", "bits", "group", "scales", "minimums", "zeros", "zero", "order")
    found = _Coded(coding=_BYTES, **{name: getattr(weight, name) for name in names})
    if weight.bits == 8:
        return found
    return replace(found, coding=_TABLE, table=torch.arange(1 << weight.bits) - float(weight.zero))


def _of_table(weight: TableWeight) -> _Coded:
    if weight.bits == 8:
        raise ValueError("tables of 256 numbers cannot be expanded: they take 2, 3 or 4 bits")
    scales = None if weight.scales is None else _halved(weight.scales.float())
    group = 0 if scales is None else weight.group
    table = weight.table.float()
    found = _Coded(
        *(weight.codes, _TABLE, weight.bits, group, scales),
        table=table,
        is_narrow=False,
        outliers=weight.outliers,
    )
    return found if table.dim() == 1 else replace(found, coding=_TABLES, table=None, tables=table)


def _halved(scales: Tensor) -> Tensor:
    """In FP16 where that holds the same numbers, as those of GGUF and most of MXFP4."""
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales) else scales


def _of_float8(weight: Float8Weight) -> _Coded:
    outputs, inputs = weight.shape
    span, group = weight.block
    scales = weight.scales.float()
    scales = scales.repeat_interleave(span or outputs, dim=0)[:outputs]
    codes, coding = weight.values.view(torch.uint8), _E5M2
    if weight.values.dtype == torch.float8_e4m3fn:
        coding, scales = _E4M3, scales * _E4M3_UNIT
        if bool(((codes & 127) == 127).any()):
            raise ValueError("some FP8 weights are no numbers (NaN)")
    return _Coded(codes, coding, 8, group or inputs, scales)


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and preferred(EXPANDED.get(dtype, ())) is not None


@register("weight_only_linear", "native", _available, tolerance=2.0, batch_invariant="yes")
class NativeWeightOnlyLinear(Packed):
    """Sums and ``logits`` are in FP32. With inputs in BF16 what is multiplied is BF16, too: what
    codes stand for (exactly, but for tables of other numbers: NF4's, those of each output, which
    are kept in BF16), where their scales can multiply sums. Where they cannot, it is the scaled
    weight, rounded as a dense one would be: with AMX, minimums, zeros, or groups that are no
    multiple of 32 inputs. One scale of all inputs always multiplies the sum, but a table's."""

    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        """As the definition; weights of one kind (``ops/joined.py``), which are copied. Raises
        ValueError for others, dense ones among them, groups that are no multiple of 4, and NaN in
        E4M3."""
        kernel = preferred(EXPANDED.get(dtype, ()))
        assert kernel is not None, "not available"
        weight = joined(weights)
        if isinstance(weight, Tensor):
            raise ValueError("a dense weight has nothing to expand")
        coded, (total, inputs) = _coded(weight), weight.shape
        halves = epilogue == "silu_mul"
        sizes = [total // 2] * 2 if halves else [total]
        super().__init__(sizes, inputs, bias, epilogue, dtype, kernel)
        if coded.scales is not None and coded.is_exact and coded.group >= inputs:
            self._lane_scales = by_lane(coded.scales[:, 0], self._outputs, halves)
            self._linear.lane_scales = self._lane_scales.data_ptr()
            coded = replace(coded, scales=None, group=0)
        if coded.group % 4:
            raise ValueError(f"a group of weights to expand has {coded.group} inputs, not 4 n")
        self._describe(coded)
        self._allocate()
        pack = function("octavo_linear_pack_expanded", *(c_void_p,) * 3)
        for index, place in enumerate(self._places):
            rows = coded.rows(slice(index * sizes[0], (index + 1) * sizes[0]))
            given = _Rows(**{name: tensor.data_ptr() for name, tensor in rows.items()})
            pack(self._at, addressof(given), addressof(place))

    def _describe(self, coded: _Coded) -> None:
        linear, scales = self._linear, coded.scales
        linear.coding, linear.bits, linear.group = coded.coding, coded.bits, coded.group
        linear.zero = coded.zero
        linear.has_minimums = coded.minimums is not None
        linear.has_zeros = coded.zeros is not None
        linear.wide_scales = scales is not None and scales.dtype == torch.float32
        # Not in tiles of AMX, which hold sums of all inputs.
        if self._kernel.endswith("bf16_avx512bf16") and coded.is_scaled_alone:
            linear.scales_sums = coded.group > 0 and coded.group % _BLOCK == 0
        self._set_order(coded.order)
        if coded.table is not None:
            self._table = coded.table.float().contiguous()
            linear.table = self._table.data_ptr()
        if coded.outliers is not None:
            self._outliers = self._by_panel(coded.outliers)
            pointers = {name: v.data_ptr() for name, v in self._outliers.items()}
            self._outliers_at = _Outliers(**pointers)
            linear.outliers = addressof(self._outliers_at)

    def _by_panel(self, outliers: Outliers) -> dict[str, Tensor]:
        """In the order of panels, ascending by column within one."""
        rows, columns = outliers.rows(), outliers.columns.long()
        if len(self._places) == 2:  # a panel has lanes of both
            half = self._places[0].rows
            panels = rows % half // HALF
            lanes = rows % half % HALF + rows // half * HALF
        else:
            panels, lanes = rows // PANEL, rows % PANEL
        order = (panels * self._inputs + columns).argsort(stable=True)
        counts = torch.bincount(panels, minlength=-(-len(outliers.starts) // PANEL) + 1)
        return {
            "starts": torch.cat((counts.new_zeros(1), counts.cumsum(0))),
            "columns": columns[order].int(),
            "lanes": lanes[order].int(),
            "values": outliers.values[order].float().contiguous(),
        }

    def rows(self, ids: Tensor) -> Tensor:
        """As the definition."""
        ids = ids.contiguous()
        y, rows = calls.empty(len(ids), self._inputs, self._dtype), calls.rows_of(ids)
        arguments: Any = Lookup(self._at, ids.data_ptr(), y.data_ptr(), addressof(rows))
        calls.call("octavo_linear_lookup_expanded", arguments, self, rows)
        return y
