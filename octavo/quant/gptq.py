"""GPTQ checkpoints, of AutoGPTQ and GPTQModel: codes of 2, 3, 4 or 8 bits in groups of inputs.

Layout: https://github.com/AutoGPTQ/AutoGPTQ (nn_modules/qlinear), the paper is
https://arxiv.org/abs/2210.17323. A weight is (code - zero) * scale. Zeros are stored minus one in
"v1", as they are in "v2".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from octavo.quant.fields import Fields, pattern
from octavo.quant.format import CheckpointFormat, Scheme, StoredTensor
from octavo.quant.grid import (
    check_group,
    check_words,
    common_zero,
    even_grid,
    input_order,
    stored_scales,
)
from octavo.quant.packing import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import QuantizedWeight

BITS = (2, 3, 4, 8)
VERSIONS = ("gptq", "gptq_v2")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a word of ones, by bits


@dataclass(frozen=True)
class GPTQ:
    """``group``: 0 stands for all inputs. ``symmetric``: None where the config says nothing.
    ``notes``: see ``Scheme``."""

    bits: int
    group: int
    symmetric: bool | None = None
    version: str = "gptq"
    notes: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    name = "gptq"

    def tensors(self) -> tuple[StoredTensor, ...]:
        packed = Fraction(32, self.bits)
        return (
            StoredTensor("qweight", (("in", packed), ("out", 1)), kinds=("I32",)),
            StoredTensor("scales", (("in", self.group), ("out", 1))),
            StoredTensor("qzeros", (("in", self.group), ("out", packed)), kinds=("I32",)),
            StoredTensor("g_idx", (("in", 1),), kinds=("I32",), optional=True),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_group(self.group, in_features)
        check_words(in_features, self.bits, "inputs")
        check_words(out_features, self.bits, "outputs")

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> QuantizedWeight:
        from octavo.ops.weights import QuantizedWeight

        group = self.group or in_features
        codes = unpack(tensors["qweight"].T, self.bits, in_features)
        order = None
        if "g_idx" in tensors:
            order = input_order(tensors["g_idx"], group)
            codes = codes if order is None else codes[:, order]
        zero, zeros = self._zeros(tensors["qzeros"], out_features)
        scales = stored_scales(tensors["scales"]).T.contiguous()
        return QuantizedWeight(codes, scales, None, self.bits, group, zero, zeros, order)

    def _zeros(self, words: Tensor, outputs: int) -> tuple[int, Tensor | None]:
        """words: int32 [groups, out * bits / 32]. The zero of all groups, or 0 and each one's own.

        A symmetric quantizer's zeros are all 2^(bits - 1), so that what is stored tells the version
        by itself. Files are about whose field is absent or wrong; they are taken for what they
        hold.

        Zeros of v1 are made by taking 1 from each in whole words (GPTQModel's v2 to v1), so that a
        zero of 0 borrows from the next: they are added back in words. Only codes of 3 bits, which
        cross words, are counted by themselves, where 0 is stored as 7."""
        middle, is_v2 = 1 << (self.bits - 1), self.version == "gptq_v2"
        stored = unpack(words, self.bits, outputs)
        low, high = (int(value) for value in stored.aminmax())
        if low == high and low in (middle - 1, middle) and self.symmetric is not False:
            if is_v2 != (low == middle):
                self.notes[_contradiction(low, self.version)] = None
            return middle, None
        if not is_v2 and self.bits == 3:
            stored = stored + 1 & 7
        elif not is_v2:
            stored = unpack(words + _ONES[self.bits], self.bits, outputs)
        return common_zero(stored.T)

    def bytes_of(self, out_features: int, in_features: int) -> int:
        groups = in_features // (self.group or in_features)
        return out_features * (in_features * self.bits // 8 + groups * 3)

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight that the format cannot hold: of
        other bits or groups, with minimums, with scales that FP16 rounds, and in v1 with a zero of
        0, which readers disagree about."""
        import torch

        group = self.group or weight.shape[1]
        codes, scales, zeros = even_grid(weight, self.bits, group)
        if self.version == "gptq":
            if not bool(zeros.all()):
                raise ValueError("a zero point of 0 cannot be told in v1: write gptq_v2")
            zeros = zeros - 1
        places = torch.arange(weight.shape[1], dtype=torch.int32, device=codes.device) // group
        if weight.order is not None:
            inverse = weight.order.argsort()
            codes, places = codes[:, inverse], places[inverse]
        return {
            "qweight": pack(codes, self.bits).T.contiguous(),
            "qzeros": pack(zeros.T, self.bits),
            "scales": scales.T.contiguous(),
            "g_idx": places,
        }


def config(format: GPTQ, act_order: bool = False, **more: Any) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``more``: fields to add."""
    return {
        "quant_method": "gptq",
        "bits": format.bits,
        "group_size": format.group or -1,
        "desc_act": act_order,
        "sym": bool(format.symmetric),
        "checkpoint_format": format.version,
        "lm_head": False,
        **more,
    }


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    if fields.boolean("is_marlin_format"):
        raise fields.error("is_marlin_format", True, "false (gptq and gptq_v2 layouts)")
    version = fields.choice("checkpoint_format", "format", allowed=VERSIONS, default="gptq")
    notes: dict[str, None] = {}
    base = GPTQ(
        bits=fields.choice("bits", "w_bit", "wbits", allowed=BITS),
        group=fields.group_size("group_size", "q_group_size", "groupsize", default=-1),
        symmetric=fields.boolean("sym"),
        version=version,
        notes=notes,
    )
    has_head = fields.boolean("lm_head") is not False
    override = _dynamic(fields, base)
    in_blocks = _in_blocks(fields)

    def format_of(module: str) -> CheckpointFormat | None:
        if module.split(".")[-1] == "lm_head":
            return override(module) if has_head else None
        return override(module) if in_blocks(module) else None

    return Scheme("gptq", format_of, spare_suffixes=("bias",), notes=notes)


def _dynamic(fields: Fields, base: GPTQ) -> Callable[[str], GPTQ | None]:
    """GPTQModel's rules by regular expressions for the beginning of names; the first that matches
    counts. ``-:`` leaves a module dense, ``+:`` or nothing gives it other bits or groups."""
    rules: list[tuple[Any, GPTQ | None]] = []
    for text in fields.mapping("dynamic"):
        found = pattern(text[2:] if text[:2] in ("-:", "+:") else text, fields, "dynamic")
        rule = fields.inner("dynamic").inner(text)
        own = replace(
            base,
            bits=rule.choice("bits", allowed=BITS, default=base.bits),
            group=rule.group_size("group_size", default=base.group or -1),
            symmetric=base.symmetric if (sym := rule.boolean("sym")) is None else sym,
        )
        rules.append((found, None if text.startswith("-:") else own))

    def override(module: str) -> GPTQ | None:
        return next((own for found, own in rules if found.match(module)), base)

    return override


def _in_blocks(fields: Fields) -> Callable[[str], bool]:
    """Whether ``modules_in_block_to_quantize`` names a module; all are where it says nothing."""
    _, listed = fields.get("modules_in_block_to_quantize", "modules_in_block")
    if listed is None:
        return lambda module: True
    parts = listed if isinstance(listed, list) else [listed]
    names = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    if not all(isinstance(one, str) for one in names):
        raise fields.error("modules_in_block_to_quantize", listed, "lists of names")
    endings = tuple(f".{one}" for one in names)
    return lambda module: f".{module}".endswith(endings)


def _contradiction(stored: int, version: str) -> str:
    return (
        f"symmetric zero points are stored as {stored}, which checkpoint_format {version} does not "
        f"mean; they are taken as the middle, as any symmetric quantizer's are"
    )
