"""AWQ checkpoints in AutoAWQ's GEMM layout: codes of 4 bits with zeros, in groups of inputs.

Layout: https://github.com/casper-hansen/AutoAWQ (modules/linear/gemm.py), the paper is
https://arxiv.org/abs/2306.00978. A weight is (code - zero) * scale. A word of 32 bits holds eight
outputs of one input, the even ones first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.quant.fields import Fields, named_by
from octavo.quant.format import CheckpointFormat, Scheme, StoredTensor
from octavo.quant.grid import check_group, check_words, common_zero, even_grid, stored_scales
from octavo.quant.packing import as_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import QuantizedWeight

BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs the nibbles of a word are, from the low


@dataclass(frozen=True)
class AWQ:
    """``group``: 0 stands for all inputs."""

    group: int
    name = "awq"

    def tensors(self) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor("qweight", (("in", 1), ("out", 8)), kinds=("I32",)),
            StoredTensor("scales", (("in", self.group), ("out", 1))),
            StoredTensor("qzeros", (("in", self.group), ("out", 8)), kinds=("I32",)),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_group(self.group, in_features)
        check_words(out_features, BITS, "outputs")

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> QuantizedWeight:
        from octavo.ops.weights import QuantizedWeight

        group = self.group or in_features
        codes = _outputs(tensors["qweight"], out_features)
        zero, zeros = common_zero(_outputs(tensors["qzeros"], out_features))
        scales = stored_scales(tensors["scales"]).T.contiguous()
        return QuantizedWeight(codes, scales, None, BITS, group, zero, zeros)

    def bytes_of(self, out_features: int, in_features: int) -> int:
        groups = in_features // (self.group or in_features)
        return out_features * (in_features * BITS // 8 + groups * 3)

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight that the format cannot hold: of
        other bits or groups, with minimums or act-order, or with scales that FP16 rounds."""
        if weight.order is not None:
            raise ValueError("AWQ has no order of inputs (act-order)")
        codes, scales, zeros = even_grid(weight, BITS, self.group or weight.shape[1])
        return {
            "qweight": _words(codes),
            "qzeros": _words(zeros),
            "scales": scales.T.contiguous(),
        }


def _outputs(words: Tensor, outputs: int) -> Tensor:
    """words: int32 [n, out / 8]. uint8 [out, n]."""
    stored = as_bytes(words.T).unflatten(1, (-1, 4))
    codes: Tensor = stored.new_empty((outputs // 8, 8, len(words)))
    for place, output in enumerate(_ORDER):
        codes[:, output] = stored[..., place // 2] >> BITS * (place % 2) & 15
    return codes.flatten(0, 1)


def _words(codes: Tensor) -> Tensor:
    """The inverse."""
    nibbles = codes.unflatten(0, (-1, 8))[:, list(_ORDER)]
    return pack(nibbles.flatten(0, 1).T, BITS)


def config(format: AWQ, skipped: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``skipped``: modules that are dense."""
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": format.group or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(skipped),
    }


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    fields.choice("version", allowed=("gemm",), default="gemm")
    fields.choice("bits", "w_bit", allowed=(BITS,))
    fields.boolean("zero_point")
    format = AWQ(fields.group_size("group_size", "q_group_size"))
    skipped = fields.names("modules_to_not_convert")
    is_skipped = named_by(skipped, fields, "modules_to_not_convert")

    def format_of(module: str) -> CheckpointFormat | None:
        return None if is_skipped(module) else format

    return Scheme("awq", format_of)
