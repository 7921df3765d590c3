"""GGUF's quantized types that are kept as groups of codes: the sizes of each. Never imports torch.

How they are read is in ``gguf_groups``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """``num_bytes`` and ``size`` (values) are a block's. ``table``: what codes stand for, where
    that is no even grid."""

    num_bytes: int
    size: int
    group: int
    bits: int
    zero: int
    table: tuple[float, ...] | None = None


def bytes_per_value(kinds: Collection[str]) -> float:
    """Of packed weights of these types that are multiplied as one (``alike``); where some are of
    tables, at most, as these are packed apart."""
    if any(KINDS[kind].table for kind in kinds):
        grids = {kind for kind in kinds if not KINDS[kind].table}
        of_tables = max((4 + 32 / k.group) / 8 for k in KINDS.values() if k.table)
        return max(of_tables, bytes_per_value(grids) if grids else 0.0)
    found = [KINDS[kind] for kind in kinds]
    zeros = {kind.zero for kind in found}
    bits, group = max(kind.bits for kind in found), min(kind.group for kind in found)
    apart = len(zeros) > 1 and bits < 8  # codes of 8 bits are moved to one zero
    wide = apart or any(kind.endswith("_K") for kind in kinds)
    numbers = 2 if 0 in zeros or apart else 1  # of a group: its scale, its minimum
    return bits / 8 + (4 if wide else 2) * numbers / group


_IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
KINDS = {
    "Q4_0": Kind(18, 32, 32, 4, 8),
    "Q4_1": Kind(20, 32, 32, 4, 0),
    "Q5_0": Kind(22, 32, 32, 8, 16),
    "Q5_1": Kind(24, 32, 32, 8, 0),
    "Q8_0": Kind(34, 32, 32, 8, 128),
    "Q2_K": Kind(84, 256, 16, 2, 0),
    "Q3_K": Kind(110, 256, 16, 3, 4),
    "Q4_K": Kind(144, 256, 32, 4, 0),
    "Q5_K": Kind(176, 256, 32, 8, 0),
    "Q6_K": Kind(210, 256, 16, 8, 32),
    "IQ4_NL": Kind(18, 32, 32, 4, 0, _IQ4),
    "IQ4_XS": Kind(136, 256, 32, 4, 0, _IQ4),
}
