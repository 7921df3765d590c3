"""SqueezeLLM checkpoints: a table of numbers for each output, and outliers beside it.

Layout: https://github.com/SqueezeAILab/SqueezeLLM (squeezellm/quant.py), the paper is
https://arxiv.org/abs/2306.07629. A weight is table[code], plus an outlier where there is one, whose
stored number is already what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from octavo.quant.fields import Fields, named_by
from octavo.quant.format import Axes, CheckpointFormat, Scheme, StoredTensor, numbers
from octavo.quant.grid import check_finite, check_words
from octavo.quant.packing import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import Outliers, TableWeight

BITS = (3, 4)


@dataclass(frozen=True)
class SqueezeLLM:
    bits: int
    name = "squeezellm"

    def tensors(self) -> tuple[StoredTensor, ...]:
        table: Axes = (("out", 1), ("one", Fraction(1, 1 << self.bits)))
        return (
            StoredTensor("qweight", (("in", Fraction(32, self.bits)), ("out", 1)), kinds=("I32",)),
            StoredTensor("lookup_table", table),
            numbers("rows", kinds=("I32",), optional=True),
            numbers("cols", kinds=("I32",), optional=True),
            numbers("vals", optional=True),
            # Where its kernel's threads begin in the outliers, which follows from them.
            numbers("startrows", kinds=("I32",), optional=True),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_words(in_features, self.bits, "inputs")

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> TableWeight:
        from octavo.ops.weights import TableWeight

        codes = unpack(tensors["qweight"].T, self.bits, in_features)
        table = tensors["lookup_table"].float()
        check_finite(table, "lookup_table")
        outliers = _outliers(tensors, out_features, in_features)
        return TableWeight(codes, table, None, self.bits, outliers=outliers)

    def bytes_of(self, out_features: int, in_features: int) -> int:
        """Without outliers, whose number only the file knows."""
        return out_features * (in_features * self.bits // 8 + 4 * (1 << self.bits))

    def write(self, weight: TableWeight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight that the format cannot hold."""
        if weight.bits != self.bits or weight.table.dim() != 2 or weight.scales is not None:
            raise ValueError(f"only codes of {self.bits} bits with a table for each output")
        words = pack(weight.codes, self.bits)
        tensors = {"qweight": words.T.contiguous(), "lookup_table": weight.table}
        if weight.outliers is not None:
            found = weight.outliers
            tensors |= {"rows": found.starts, "cols": found.columns, "vals": found.values}
        return tensors


def _outliers(tensors: Mapping[str, Any], outputs: int, inputs: int) -> Outliers | None:
    """Raises ValueError where they are not a matrix by rows (CSR)."""
    from octavo.ops.weights import Outliers

    names = ("rows", "cols", "vals")
    there = [name for name in names if name in tensors]
    if not there:
        return None
    if len(there) < len(names):
        raise ValueError(f"outliers need rows, cols and vals, there is only {', '.join(there)}")
    starts, columns, values = (tensors[name].flatten() for name in names)
    counts = starts.long().diff()  # in 64 bits: differences of 32 bits may wrap
    if len(starts) != outputs + 1 or int(starts[0]) != 0 or bool((counts < 0).any()):
        raise ValueError(f"rows does not ascend from 0 over {outputs + 1} numbers")
    if not int(starts[-1]) == len(columns) == len(values):
        raise ValueError(
            f"rows end at {int(starts[-1])}, but there are {len(columns)} cols, {len(values)} vals"
        )
    found = Outliers(starts, columns, values.float())
    check_finite(found.values, "vals")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < inputs:
        raise ValueError(f"cols holds {int(columns.min())} to {int(columns.max())}, of {inputs}")
    same_row = found.rows().diff() == 0
    if bool((same_row & (columns.diff() <= 0)).any()):
        raise ValueError("cols does not ascend within a row")
    return found if len(columns) else None


def config(format: SqueezeLLM, skipped: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``skipped``: modules that are dense. The
    format's own tools look for a quant_config.json with ``wbits``."""
    return {
        "quant_method": "squeezellm",
        "wbits": format.bits,
        "modules_to_not_convert": list(skipped),
    }


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    format = SqueezeLLM(fields.choice("wbits", "bits", allowed=BITS))
    skipped = fields.names("modules_to_not_convert")
    is_skipped = named_by(skipped, fields, "modules_to_not_convert")

    def format_of(module: str) -> CheckpointFormat | None:
        return None if is_skipped(module) else format

    return Scheme("squeezellm", format_of)
