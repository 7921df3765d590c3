"""How quantized weights lie in a GPU's memory: one layout for a row and for many rows.

Codes are packed into words of 16 bits. The ``fields`` of a word belong to as many planes of
``width`` consecutive inputs: field f of word j of a chunk is the code of input ``chunk start +
f * width + j``. So a tile of words becomes tiles of consecutive inputs for the tensor cores, one a
field, with a mask and a shift for two codes at a time, and a thread of a GEMV reads eight words at
once, of equal planes. A plane lies in one group, so that a tile has one scale a row.

3 bits are two words of 2 bits and one of 1 bit, whose fields together cover 16 planes. FP8 stays as
it is: a word is a value, with one field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.joined import joined
from octavo.ops.weights import (
    Float8Weight,
    Outliers,
    Quantized,
    QuantizedWeight,
    TableWeight,
    Weight,
)

NO_SHIFT, ZEROS, MINIMUMS = 0, 1, 2
NO_TABLE, SHARED_TABLE, ROW_TABLE = 0, 1, 2
WIDTHS = (64, 32, 16)  # of planes; tensor cores take 16 inputs at the least
FLOAT8_WIDTH = 128
PADDING = 1.05  # what a wider plane may cost in bytes of padding


@dataclass(frozen=True)
class Layout:
    """What kernels know when they are compiled.

    bits: of a code, 0 for FP8. inputs: columns of the weight, without padding. group: inputs that
    share a scale, 0 for all. groups: scales of an output. row_block: outputs that share them. zero:
    of all codes. shift: what else belongs to a group: its own zero, or a minimum.
    """

    bits: int
    inputs: int
    width: int
    group: int = 0
    groups: int = 1
    row_block: int = 1
    zero: int = 0
    shift: int = NO_SHIFT
    table: int = NO_TABLE

    @property
    def fields(self) -> int:
        """Planes of a chunk."""
        return {0: 1, 2: 8, 3: 16, 4: 4, 8: 2}[self.bits]

    @property
    def chunks(self) -> int:
        return -(-self.inputs // (self.fields * self.width))

    @property
    def columns(self) -> int:
        """Words of a plane of all chunks."""
        return self.chunks * self.width

    @property
    def row_words(self) -> int:
        if self.bits == 0:
            return self.inputs
        return self.columns * (3 if self.bits == 3 else 1)


@dataclass(frozen=True)
class Packed:
    """words: int16 [out, row_words], or FP8 [out, in]. scales: [out / row_block, groups], or None.
    shifts: uint8 zeros or minimums like the scales, or None. table: FP32 [2^bits] or [out, 2^bits],
    or None. gather: int32 [inputs], where each input is found in x, -1 for none (zero); None: where
    it is. outliers: in columns of the packed inputs."""

    layout: Layout
    words: Tensor
    scales: Tensor | None
    shifts: Tensor | None
    table: Tensor | None
    gather: Tensor | None
    outliers: Outliers | None

    @property
    def rows(self) -> int:
        return len(self.words)

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("words", "scales", "shifts", "table")}
        return {name: value for name, value in named.items() if value is not None}


def pack(weight: Quantized) -> Packed:
    """On the weight's device."""
    if isinstance(weight, Float8Weight):
        return _pack_float8(weight)
    if isinstance(weight, TableWeight):
        return _pack_table(weight)
    return _pack_even(weight)


def together(weights: Sequence[Weight]) -> list[Weight]:
    """Neighbours that one kind can hold become one weight."""
    found: list[Weight] = []
    for weight in weights:
        if found:
            try:
                found[-1] = joined([found[-1], weight])
                continue
            except ValueError:
                pass
        found.append(weight)
    return found


def _pack_even(weight: QuantizedWeight) -> Packed:
    places = _places(weight.shape[1], weight.group)
    codes = _rearranged(weight.codes, places)
    gather = _gather(weight.order, places, codes.device)
    shifts, shift = weight.zeros, ZEROS
    if weight.minimums is not None:
        shifts, shift = weight.minimums, MINIMUMS
    if shifts is None:
        shift = NO_SHIFT
    group, groups = _padded_group(weight.group, places), weight.scales.shape[1]
    if groups == 1:
        group = 0
    width = _width(weight.bits, codes.shape[1], group)
    layout = Layout(weight.bits, codes.shape[1], width, group, groups, 1, weight.zero, shift)
    if group == 0 and shift != NO_SHIFT:
        layout = replace(layout, group=layout.chunks * layout.fields * width)
    words = _words(codes, layout)
    shifts = None if shifts is None else shifts.contiguous()
    return Packed(layout, words, weight.scales.contiguous(), shifts, None, gather, None)


def _pack_table(weight: TableWeight) -> Packed:
    group = weight.group if weight.scales is not None else 0
    places = _places(weight.shape[1], group)
    codes = _rearranged(weight.codes, places)
    groups = 1 if weight.scales is None else weight.scales.shape[1]
    group = 0 if groups == 1 else _padded_group(group, places)
    table = SHARED_TABLE if weight.table.dim() == 1 else ROW_TABLE
    width = _width(weight.bits, codes.shape[1], group, True)
    layout = Layout(weight.bits, codes.shape[1], width, group, groups, table=table)
    scales = None if weight.scales is None else weight.scales.contiguous()
    words, entries = _words(codes, layout), weight.table.float().contiguous()
    gather = _gather(None, places, weight.table.device)
    outliers = _moved_outliers(weight.outliers, places)
    return Packed(layout, words, scales, None, entries, gather, outliers)


def _pack_float8(weight: Float8Weight) -> Packed:
    rows, inputs = weight.shape
    span, group = weight.block
    places = _places(inputs, group)
    values = weight.values
    if not has_float8(values):
        table = torch.arange(256, dtype=torch.uint8, device=values.device).view(values.dtype)
        return _float8_table(weight, table.float(), places)
    if places is not None:
        values = _rearranged(values.view(torch.uint8), places).view(values.dtype)
    groups = weight.scales.shape[1]
    group = 0 if groups == 1 else _padded_group(group, places)
    width = min(FLOAT8_WIDTH, group & -group) if group else FLOAT8_WIDTH
    layout = Layout(0, values.shape[1], width, group, groups, span or rows)
    scales = weight.scales.contiguous()
    gather = _gather(None, places, values.device)
    return Packed(layout, values.contiguous(), scales, None, None, gather, None)


def has_float8(values: Tensor) -> bool:
    """Whether kernels can read that type where the values are."""
    if values.dtype == torch.float8_e5m2 or not values.is_cuda:
        return True
    return torch.cuda.get_device_capability(values.device) >= (8, 9)


def _float8_table(weight: Float8Weight, table: Tensor, places: Tensor | None) -> Packed:
    """FP8 as codes of 8 bits into a table of its 256 numbers."""
    codes = _rearranged(weight.values.view(torch.uint8), places)
    span, group = weight.block
    groups = weight.scales.shape[1]
    group = 0 if groups == 1 else _padded_group(group, places)
    width = _width(8, codes.shape[1], group, True)
    rows, inputs = codes.shape
    layout = Layout(8, inputs, width, group, groups, span or rows, table=SHARED_TABLE)
    gather = _gather(None, places, codes.device)
    scales = weight.scales.contiguous()
    return Packed(layout, _words(codes, layout), scales, None, table, gather, None)


def _places(inputs: int, group: int) -> Tensor | None:
    """Where inputs go so that each group takes a multiple of 16 of them, and all a multiple of 8:
    int64, -1 for padding; None where they can stay."""
    group = group if 0 < group < inputs else inputs
    if group % 16 == 0 or (group == inputs and inputs % 8 == 0):
        return None
    padded, count = -(-group // 16) * 16, -(-inputs // group)
    places = torch.full((count, padded), -1)
    places[:, :group] = torch.arange(count * group).view(count, group)
    places = places.flatten()
    return torch.where(places < inputs, places, -1)


def _padded_group(group: int, places: Tensor | None) -> int:
    return group if places is None else -(-group // 16) * 16


def _rearranged(codes: Tensor, places: Tensor | None) -> Tensor:
    if places is None:
        return codes
    places = places.to(codes.device)
    return codes[:, places.clamp_min(0)].masked_fill(places < 0, 0)


def _moved_outliers(outliers: Outliers | None, places: Tensor | None) -> Outliers | None:
    if outliers is None or places is None:
        return outliers
    present = (places >= 0).nonzero()[:, 0]
    found = torch.empty(len(present), dtype=torch.int32)
    found[places[present]] = present.int()
    columns = found.to(outliers.columns.device)[outliers.columns.long()]
    return replace(outliers, columns=columns)


def _gather(order: Tensor | None, places: Tensor | None, device: torch.device) -> Tensor | None:
    if places is None:
        return None if order is None else order.int()
    if order is None:
        return places.int().to(device)
    places = places.to(order.device)
    return torch.where(places < 0, -1, order[places.clamp_min(0)]).int()


def _width(bits: int, inputs: int, group: int, has_table: bool = False) -> int:
    """The widest plane that lies within a group and costs little padding."""
    widths = WIDTHS[1:] if bits == 3 or has_table else WIDTHS  # less is in flight
    fits = [width for width in widths if group % width == 0]
    size = {width: Layout(bits, inputs, width).columns for width in fits}
    least = min(size.values())
    return next(width for width in fits if size[width] <= PADDING * least)


def _words(codes: Tensor, layout: Layout) -> Tensor:
    """codes: uint8 [out, in]. int16 [out, row_words]."""
    rows, inputs = codes.shape
    padded = layout.chunks * layout.fields * layout.width
    planes = F.pad(codes, (0, padded - inputs)).view(rows, layout.chunks, -1, layout.width)
    if layout.bits != 3:
        return _joined_fields(planes, layout.bits).view(rows, -1)
    low = planes & 3
    parts = (*(_joined_fields(half, 2) for half in low.chunk(2, dim=2)),)
    return torch.stack((*parts, _joined_fields(planes >> 2, 1)), dim=2).view(rows, -1)


def _joined_fields(planes: Tensor, bits: int) -> Tensor:
    """planes: uint8 [out, chunks, fields, width]. int16 [out, chunks, width]."""
    words = planes[:, :, 0].to(torch.int16)  # of 16 bits from the start: a GPU holds few copies
    for field in range(1, planes.shape[2]):
        words |= planes[:, :, field].to(torch.int16).bitwise_left_shift_(bits * field)
    return words
