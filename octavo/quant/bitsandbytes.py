"""Checkpoints quantized by bitsandbytes: NF4 and FP4 with scales of blocks, and LLM.int8.

Layout: https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, QuantState); the
papers are https://arxiv.org/abs/2305.14314 (QLoRA) and https://arxiv.org/abs/2208.07339 (LLM.int8).
Blocks of 4-bit codes run over the matrix row after row, and may end within one. Their scales may be
quantized themselves: map[code] * scale of 256 of them + offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd, inf
from typing import TYPE_CHECKING, Any

from octavo.quant.fields import Fields, named_by
from octavo.quant.format import CheckpointFormat, Scheme, StoredTensor, numbers
from octavo.quant.grid import check_finite, check_group

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import QuantizedWeight, TableWeight

KINDS = ("nf4", "fp4")
BLOCK = 64  # bitsandbytes' own, in what is written
# What codes stand for. NF4: QLoRA, appendix E. FP4: a sign, two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_FP4, *(0.0 - number for number in _FP4)),
}
# By bnb_4bit_quant_storage: safetensors' name of the type, and its bytes.
_STORAGE = {
    "uint8": ("U8", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
}
_LEVELS = 127
_LARGEST_BLOCK = 1 << 31  # far beyond bitsandbytes' 4,096: places are counted in 64 bits
_SHOWN = 120  # characters of what a file says, in an error


@dataclass(frozen=True)
class FourBit:
    """``kind``: nf4 or fp4. ``storage``: the type that bytes are kept as."""

    kind: str
    storage: str = "uint8"
    name = "bitsandbytes"

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self) -> tuple[StoredTensor, ...]:
        kind, size = _STORAGE[self.storage]
        return (
            numbers(self._state, kinds=("U8",)),
            StoredTensor("weight", (("both", 2 * size), ("one", 1)), kinds=(kind,)),
            numbers("weight.absmax", kinds=("F32", "U8")),
            numbers("weight.quant_map", kinds=("F32",)),
            numbers("weight.nested_absmax", kinds=("F32",), optional=True),
            numbers("weight.nested_quant_map", kinds=("F32",), optional=True),
        )

    def check(self, out_features: int, in_features: int) -> None:
        """Holds any."""

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> TableWeight:
        import torch

        from octavo.ops.weights import TableWeight

        count = out_features * in_features
        state = self._read_state(tensors[self._state], (out_features, in_features))
        table = tensors["weight.quant_map"].flatten()
        if len(table) != 16:
            raise ValueError(f"weight.quant_map has {len(table)} numbers, not 16")
        check_finite(table, "weight.quant_map")
        stored = tensors["weight"].contiguous().view(torch.uint8).flatten()
        codes = torch.stack((stored >> 4, stored & 15), dim=1).flatten()[:count]
        block = state["blocksize"]
        scales = self._scales(tensors, state, ceil(count / block))
        group = block_group(block, in_features)
        starts = torch.arange(0, count, group, device=scales.device)
        scales = scales[starts // block].view(out_features, -1)
        return TableWeight(codes.view(out_features, -1), table, scales, 4, group)

    def _read_state(self, stored: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
        """What the JSON text says, whose bytes are numbers of a tensor."""
        try:
            state = json.loads(bytes(stored.flatten().tolist()))
            found = {key: state[key] for key in ("quant_type", "shape", "blocksize")}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{self._state} cannot be read: {_shown(error)}") from None
        if found["quant_type"] != self.kind or found["shape"] != list(shape):
            raise ValueError(
                f"{self._state} says {_shown(found['quant_type'])} of {_shown(found['shape'])}, "
                f"not {self.kind!r} of {list(shape)}"
            )
        for key in ("blocksize", *(["nested_blocksize"] if "nested_blocksize" in state else [])):
            if type(state[key]) is not int or not 1 <= state[key] <= _LARGEST_BLOCK:
                raise ValueError(f"{self._state} has a {key} of {_shown(state[key])}")
        return dict(state)

    def _scales(self, tensors: Mapping[str, Any], state: dict[str, Any], count: int) -> Tensor:
        """FP32 [count], of each block."""
        import torch

        scales: Tensor = tensors["weight.absmax"].flatten()
        if len(scales) != count:
            raise ValueError(f"weight.absmax has {len(scales)} numbers for {count} blocks")
        if scales.dtype == torch.uint8:
            if "nested_blocksize" not in state or "weight.nested_absmax" not in tensors:
                raise ValueError("weight.absmax is quantized, but nothing says by which scales")
            scales = _dequantized(scales, tensors, state)
        check_finite(scales, "weight.absmax")
        return scales.float()

    def bytes_of(self, out_features: int, in_features: int) -> int:
        groups = ceil(in_features / block_group(BLOCK, in_features))
        return out_features * (ceil(in_features / 2) + 4 * groups)

    def write(self, weight: TableWeight) -> dict[str, Tensor]:
        """The inverse of ``read``, with scales as they are, in blocks of ``BLOCK``. Raises
        ValueError for a weight that the format cannot hold."""
        import torch

        outputs, inputs = weight.shape
        group = block_group(BLOCK, inputs)
        table = torch.tensor(TABLES[self.kind], device=weight.codes.device)
        if not torch.equal(weight.table, table) or weight.outliers is not None:
            raise ValueError(f"only codes of the table of {self.kind} can be written")
        if weight.scales is None or weight.group != group:
            raise ValueError(f"groups of {weight.group} inputs, not {group}")
        flat = weight.scales.flatten()
        scales = flat[:: BLOCK // group]
        if not torch.equal(scales.repeat_interleave(BLOCK // group)[: len(flat)], flat):
            raise ValueError(f"scales that differ within a block of {BLOCK}")
        codes = torch.nn.functional.pad(weight.codes.flatten(), (0, outputs * inputs % 2))
        state = {
            "quant_type": self.kind,
            "blocksize": BLOCK,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {
            "weight": (codes[0::2] << 4 | codes[1::2])[:, None],
            "weight.absmax": scales.contiguous(),
            "weight.quant_map": table,
            self._state: text.to(table.device),
        }


def _dequantized(codes: Tensor, tensors: Mapping[str, Any], state: dict[str, Any]) -> Tensor:
    """Scales that are quantized in blocks themselves: FP32, the product rounded before the sum."""
    import torch

    table = tensors["weight.nested_quant_map"].flatten()
    outer = tensors["weight.nested_absmax"].flatten()
    block, offset = state["nested_blocksize"], state.get("nested_offset")
    if len(table) != 256 or len(outer) != ceil(len(codes) / block):
        raise ValueError(
            f"weight.nested_quant_map and nested_absmax have {len(table)} and {len(outer)} "
            f"numbers, not 256 and {ceil(len(codes) / block)}"
        )
    if not isinstance(offset, int | float) or not abs(offset) < inf:
        raise ValueError(f"nested_offset is {_shown(offset)}, not a finite number")
    places = torch.arange(len(codes), device=codes.device) // block
    product: Tensor = table[codes.long()] * outer[places]
    return product + torch.tensor(float(offset), device=codes.device)


def _shown(value: object) -> str:
    """In an error of one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def block_group(block: int, inputs: int) -> int:
    """Inputs that share a scale where blocks run over the flattened matrix: a block, or what both
    its borders and those of rows fall on."""
    return gcd(block, inputs)


@dataclass(frozen=True)
class EightBit:
    """LLM.int8: signed codes, and the largest magnitude of each output, which 127 stands for."""

    name = "bitsandbytes"

    def tensors(self) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor("SCB", (("out", 1),), kinds=("F32", "F16", "BF16")),
            StoredTensor("weight", (("out", 1), ("in", 1)), kinds=("I8",)),
            numbers("weight_format", kinds=("U8",), optional=True),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_group(0, in_features)

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> QuantizedWeight:
        import torch

        from octavo.ops.weights import ZERO, QuantizedWeight

        if "weight_format" in tensors and bool(tensors["weight_format"].any()):
            found = tensors["weight_format"].flatten().tolist()
            raise ValueError(f"weight_format is {found}, a GPU's own order of codes: only 0, rows")
        largest = tensors["SCB"].float()
        check_finite(largest, "SCB")
        codes = tensors["weight"].contiguous().view(torch.uint8) ^ ZERO
        scales = (largest / torch.tensor(float(_LEVELS), device=largest.device))[:, None]
        return QuantizedWeight(codes, scales, None, 8, in_features, ZERO)

    def bytes_of(self, out_features: int, in_features: int) -> int:
        return out_features * (in_features + 4)

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight that the format cannot hold, also
        where no number / 127 is a scale."""
        import torch

        from octavo.ops.weights import ZERO

        plain = weight.minimums is None and weight.zeros is None and weight.order is None
        if not plain or (weight.bits, weight.zero) != (8, ZERO) or weight.group < weight.shape[1]:
            raise ValueError("only codes of 8 bits with one scale for each output can be written")
        scales, levels = weight.scales[:, 0].float(), torch.tensor(float(_LEVELS))
        middle = scales * levels
        up, down = torch.tensor(float("inf")), torch.tensor(float("-inf"))
        largest = middle
        for other in (torch.nextafter(middle, up), torch.nextafter(middle, down)):
            largest = torch.where(largest / levels == scales, largest, other)
        if not torch.equal(largest / levels, scales):
            raise ValueError("scales that are no number / 127")
        return {
            "weight": (weight.codes ^ ZERO).view(torch.int8),
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }


def config(format: FourBit | EightBit, skipped: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``skipped``: modules that are dense."""
    is_four = isinstance(format, FourBit)
    values: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": is_four,
        "load_in_8bit": not is_four,
        "llm_int8_skip_modules": list(skipped),
    }
    if isinstance(format, FourBit):
        values |= {
            "bnb_4bit_quant_type": format.kind,
            "bnb_4bit_quant_storage": format.storage,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    return values


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    is_four = fields.boolean("load_in_4bit", "_load_in_4bit") is True
    is_eight = fields.boolean("load_in_8bit", "_load_in_8bit") is True
    if is_four == is_eight:
        raise fields.error("load_in_4bit", is_four, "true, or load_in_8bit, one of them")
    format: CheckpointFormat = EightBit()
    if is_four:
        kind = fields.choice("bnb_4bit_quant_type", allowed=KINDS, default="fp4")
        storage = fields.choice("bnb_4bit_quant_storage", allowed=[*_STORAGE], default="uint8")
        format = FourBit(kind, storage)
    skipped = fields.names("llm_int8_skip_modules")
    is_skipped = named_by(skipped, fields, "llm_int8_skip_modules")

    def format_of(module: str) -> CheckpointFormat | None:
        return None if is_skipped(module) else format

    return Scheme("bitsandbytes", format_of)
