"""AWQ: inputs that are large on average keep more of their weights' precision. The weights of each
input are multiplied by a scale before they are rounded, and the input is divided by it in what
makes it, a norm or a linear: the unrounded model computes the same.

Lin et al. 2023, https://arxiv.org/abs/2306.00978. Errors of outputs are computed from the inputs'
second moments H: the sum over inputs x of |E x|^2 is the trace of E H E^T, which needs no inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.quantize.grid import Grid

STEPS = 20  # exponents tried: 0, 1/20 ... 19/20
_LEAST = 1e-4  # of magnitudes and scales
_CLIPS = torch.linspace(1.0, 0.5, 11)


def output_error(error: Tensor, hessian: Tensor) -> Tensor:
    """error: [out, in] of a weight; hessian: sum of x xT, [in, in]. The sum over inputs of the
    outputs' squared errors, [out]."""
    return ((error @ hessian) * error).sum(dim=1)


def find_scales(weight: Tensor, hessian: Tensor, magnitude: Tensor, grid: Grid) -> Tensor:
    """weight: FP32 [out, in], of all linears with these inputs; magnitude: mean |x_i|, [in].
    The scales magnitude^a, for the a of ``STEPS`` whose rounded weights err least; a = 0 rounds
    them as they are. [in]."""
    magnitude = magnitude.clamp_min(_LEAST)
    best, found = torch.inf, torch.ones_like(magnitude)
    for step in range(STEPS):
        scales = magnitude.pow(step / STEPS).clamp_min(_LEAST)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        rounded = grid.round(weight * scales).dense() / scales
        error = float(output_error(rounded - weight, hessian).sum())
        if error < best:
            best, found = error, scales
    return found


def scaled_hessian(hessian: Tensor, scales: Tensor) -> Tensor:
    """Of inputs that are divided by ``scales``."""
    return hessian / scales / scales[:, None]


def clipped(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """weight: FP32 [out, in], with the largest weights of each group cut off where the group's part
    of the outputs then errs less: at 0.5 to 1 of the largest."""
    inputs = weight.shape[1]
    group = grid.group or inputs
    moments = _diagonal_blocks(hessian, group)
    rows = weight.view(len(weight), -1, group)
    largest = rows.abs().amax(dim=2, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    found = rows
    for share in _CLIPS.tolist():
        cut = rows.clamp(-share * largest, share * largest)
        error = grid.round(cut.reshape(weight.shape)).dense().view_as(rows) - rows
        products = torch.einsum("ogi,gij->ogj", error, moments)
        total = (products * error).sum(dim=2, keepdim=True)
        found = torch.where(total < best, cut, found)
        best = torch.minimum(best, total)
    return found.reshape(weight.shape)


def _diagonal_blocks(hessian: Tensor, group: int) -> Tensor:
    """[in, in] -> [in / group, group, group]."""
    count = len(hessian) // group
    blocks = hessian.view(count, group, count, group)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def fold(values: Tensor, scales: Tensor, kept: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """values: a norm's weight, [in]; ``kept``: what of values remains once they are stored. The
    stored values / scales, and the scales that they then amount to: weights multiplied by those
    undo the division exactly, rounding included."""
    stored = kept(values / scales)
    usable = (stored != 0) & (values != 0)
    return torch.where(usable, stored, values), torch.where(usable, values / stored, 1.0)
