"""How tests compare a version of an operation with its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear import silu_mul
from octavo.ops.registry import Version


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, version: Version, dtype: torch.dtype) -> None:
    """``expected``: FP64. The version's tolerance is in units of the dtype's epsilon."""
    error = (found.double() - expected).abs().max() / expected.abs().max()
    bound = version.tolerance * torch.finfo(dtype).eps + 4e-6  # sums are in FP32 at best
    assert error <= bound, f"relative error {error:.2e}, {version.name} promises {bound:.2e}"


def expected_linear(
    weights: list[Tensor],
    bias: Tensor | None,
    epilogue: str,
    x: Tensor,
    other: Tensor | None = None,
) -> Tensor:
    """The definition in FP64, nothing rounded."""
    y = x.double() @ torch.cat(weights).double().t()
    if bias is not None:
        y = y + bias.double()
    if other is not None:
        y = y + other.double()
    return silu_mul(y) if epilogue == "silu_mul" else y
