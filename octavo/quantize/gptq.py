"""GPTQ: weights are rounded one input after the other, and what each rounding adds to the outputs
is made up for by the inputs not yet rounded.

Frantar, Ashkboos, Hoefler, Alistarh 2022, https://arxiv.org/abs/2210.17323; it is Optimal Brain
Quantization with one order of inputs for all outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.weights import QuantizedWeight
from octavo.quantize.grid import Grid

DAMPING = 0.01
BLOCK = 128  # inputs whose corrections are applied to the rest at one go


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    act_order: bool = False,
    damping: float = DAMPING,
) -> QuantizedWeight:
    """weight: [out, in], whose groups are whole. hessian: sum of x xT over the inputs x it meets,
    times any number, [in, in], FP32 or FP64, in which all is computed. ``act_order``: inputs are
    taken by falling diagonal of it, and groups are made in that order. ``damping``: is added to the
    diagonal, as a share of its mean.

    Raises ValueError where the Hessian is not positive definite even with a hundred times the
    damping, or not finite.
    """
    work = weight.to(hessian.dtype).clone()
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    silent = diagonal == 0  # inputs that are always 0: their weights do not count
    diagonal[silent] = 1
    work[:, silent] = 0
    order = None
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
        work, hessian = work[:, order], hessian[order][:, order]
    codes, scales, zeros = _solve(work, _inverse_factor(hessian, damping), grid)
    return grid.pack(codes, scales, zeros, order)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U with U^T U = hessian^-1: row i of it, from i on, is by what the
    rounding of input i moves those after it."""
    mean = hessian.diagonal().mean()
    for times in (1, 10, 100):
        damped = hessian.clone()
        damped.diagonal().add_(damping * times * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if failed or not factor.isfinite().all():
            continue
        inverse: Tensor = torch.cholesky_inverse(factor)
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed and upper.isfinite().all():
            return upper
    raise ValueError("the inputs' second moments are not positive definite, or not finite")


def _solve(work: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """codes [out, in], scales and zeros [out, groups]; ``work`` is used up."""
    inputs = work.shape[1]
    group = grid.group or inputs
    codes = torch.empty_like(work)
    scales, zeros = [], []
    scale = zero = work[:, :1]
    for begin in range(0, inputs, BLOCK):
        end = min(begin + BLOCK, inputs)
        block, own = work[:, begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i in range(end - begin):
            if (begin + i) % group == 0:
                # Later blocks know of this one's errors only when it is done.
                scale, zero = grid.fit(_corrected(work, errors, factor, begin, i, group))
                scales.append(scale)
                zeros.append(zero)
            column = block[:, i : i + 1]
            code = grid.codes(column, scale, zero)
            codes[:, begin + i] = code[:, 0]
            error = (column - (code - zero) * scale) / own[i, i]
            errors[:, i] = error[:, 0]
            block[:, i:] -= error * own[i, i:]
        work[:, end:] -= errors @ factor[begin:end, end:]
    return codes, torch.cat(scales, dim=1), torch.cat(zeros, dim=1)


def _corrected(
    work: Tensor, errors: Tensor, factor: Tensor, begin: int, done: int, group: int
) -> Tensor:
    """The group that begins at input ``begin + done``, with what the inputs of its block before it
    owe to those of it that lie in later blocks."""
    first = begin + done
    found = work[:, first : first + group]
    end = min(begin + BLOCK, work.shape[1])
    if done and first + group > end:
        found = found.clone()
        owed = errors[:, :done] @ factor[begin:first, end : first + group]
        found[:, end - first :] -= owed
    return found
