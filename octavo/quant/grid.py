"""What formats of codes on an even grid share: groups, orders of inputs, zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import Quantized

LARGEST_GROUP = 65_536  # as in ops.weights, which imports torch


def check_group(group: int, in_features: int) -> None:
    """Raises ValueError for groups (0: of all inputs) that do not divide the inputs, or that no
    kernel takes."""
    if group and in_features % group:
        raise ValueError(f"groups of {group} do not divide {in_features} inputs")
    size = group or in_features
    if size % 4 or size > LARGEST_GROUP:
        raise ValueError(f"a group has a multiple of 4 inputs, at most {LARGEST_GROUP}, not {size}")


def check_words(size: int, bits: int, what: str) -> None:
    """Raises ValueError where packed codes leave a word of 32 bits half empty."""
    if size * bits % 32:
        raise ValueError(f"{size} {what} of {bits} bits do not fill whole words of 32 bits")


def input_order(g_idx: Tensor, group: int) -> Tensor | None:
    """g_idx: int32 [in], each input's group. Inputs by group, int64 [in], in their own order within
    one; None where they stand so. Raises ValueError where a group has not ``group`` of them."""
    import torch

    size = len(g_idx)
    groups = -(-size // group)
    low, high = (int(value) for value in g_idx.aminmax())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx holds {low if low < 0 else high}, of groups 0 to {groups - 1}")
    straight = torch.arange(size, device=g_idx.device) // group
    if torch.equal(g_idx.long(), straight):
        return None
    counts = torch.bincount(g_idx.long(), minlength=groups)
    wrong = (counts != torch.bincount(straight, minlength=groups)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(f"g_idx gives group {first} {int(counts[first])} inputs, not {group}")
    return g_idx.argsort(stable=True)


def check_finite(numbers: Tensor, what: str) -> None:
    """Raises ValueError for infinities and what is no number."""
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"{what} holds numbers that are not finite")


def stored_scales(scales: Tensor) -> Tensor:
    """In a type that a ``QuantizedWeight`` takes. Raises ValueError where one is not finite."""
    import torch

    check_finite(scales, "scales")
    return scales if scales.dtype == torch.float16 else scales.float()


def common_zero(zeros: Tensor) -> tuple[int, Tensor | None]:
    """zeros: uint8 [out, groups]. The one zero of all, or 0 and each one's own."""
    low, high = (int(value) for value in zeros.aminmax())
    return (low, None) if low == high else (0, zeros.contiguous())


def even_grid(weight: Quantized, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """What (code - zero) * scale is made of: codes, uint8 [out, in]; scales, FP16 [out, groups];
    zeros, uint8 [out, groups]. Raises ValueError for a weight that is not of this kind."""
    import torch

    from octavo.ops.weights import QuantizedWeight

    if not isinstance(weight, QuantizedWeight) or weight.minimums is not None:
        raise ValueError("only codes on an even grid without minimums can be written")
    if (weight.bits, weight.group) != (bits, group):
        raise ValueError(
            f"codes of {weight.bits} bits in groups of {weight.group}, not {bits} in {group}"
        )
    scales = weight.scales.half()
    if not torch.equal(scales.to(weight.scales.dtype), weight.scales):
        raise ValueError("scales that FP16 does not hold")
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(scales.shape, weight.zero, dtype=torch.uint8, device=scales.device)
    return weight.codes, scales, zeros
