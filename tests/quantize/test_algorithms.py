"""The algorithms against slow ones written from their papers, and against plain rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octavo.quantize import awq
from octavo.quantize.gptq import gptq
from octavo.quantize.grid import Grid
from octavo.quantize.squeezellm import nearest, squeezellm, weighted_k_means

pytestmark = pytest.mark.usefixtures("one_thread")


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and correlated inputs [T, in] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    sizes = torch.randn(inputs, generator=generator).exp()
    x = (
        torch.randn(4 * inputs, inputs, generator=generator) @ (mixing + torch.eye(inputs))
    ) * sizes
    return torch.randn(outputs, inputs, generator=generator) * 0.05, x


def moments(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.to(dtype).T @ x.to(dtype) / len(x)


def output_error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float((x.double() @ (rounded.double() - weight.double()).T).square().mean())


def obq_in_order(
    weight: Tensor, hessian: Tensor, grid: Grid, damping: float, order: Tensor
) -> Tensor:
    """Optimal Brain Quantization (Frantar & Alistarh 2022, section 4) with a given order of inputs:
    after each input is rounded, it is taken out of the inverse Hessian. FP64, no factorization."""
    work, hessian = weight.double().clone(), hessian.double().clone()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    left = order.tolist()
    result = torch.empty_like(work)
    for place, index in enumerate(order.tolist()):
        if place % (grid.group or len(order)) == 0:
            members = order[place : place + (grid.group or len(order))]
            scale, zero = grid.fit(work[:, members])
        inverse = torch.linalg.inv(hessian[left][:, left])
        row = inverse[left.index(index)]
        value = grid.rounded(work[:, index : index + 1], scale, zero)
        result[:, index] = value[:, 0]
        error = (work[:, index] - value[:, 0]) / row[left.index(index)]
        work[:, left] -= error[:, None] * row
        left.remove(index)
    return result


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    "grid",
    [Grid(4, 0, symmetric=True), Grid(3, 16, symmetric=False), Grid(4, 32, False, search=True)],
)
@pytest.mark.parametrize("inputs", [64, 96])
def test_gptq_is_optimal_brain_quantization_in_order(
    grid: Grid, act_order: bool, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.quantize.gptq.BLOCK", 40)  # no multiple of the groups
    weight, x = problem(12, inputs)
    hessian = moments(x, torch.float64)
    order = torch.arange(inputs)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    found = gptq(weight, hessian, grid, act_order=act_order).dense()
    expected = obq_in_order(weight, hessian, grid, 0.01, order)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("bits", "act_order"), [(2, True), (3, False), (3, True), (4, False), (4, True), (8, False)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_errs_less_than_rounding(bits: int, act_order: bool, symmetric: bool) -> None:
    weight, x = problem(48, 256)
    grid = Grid(bits, 64, symmetric)
    found = gptq(weight, moments(x), grid, act_order=act_order)
    plain = grid.round(weight)
    assert found.bits == bits and found.group == 64
    assert output_error(weight, found.dense(), x) < output_error(weight, plain.dense(), x)


def test_inputs_that_are_always_zero_do_not_matter_to_gptq() -> None:
    weight, x = problem(8, 64)
    x[:, 5] = 0
    grid = Grid(4, 32, symmetric=False)
    found = gptq(weight, moments(x), grid).dense()
    assert found.isfinite().all()
    assert output_error(weight, found, x) < output_error(weight, grid.round(weight).dense(), x)


def test_moments_that_are_not_finite_are_refused() -> None:
    weight, x = problem(8, 64)
    x[3, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, moments(x), Grid(4, 32, symmetric=False))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_to_the_nearest_of_the_grid(bits: int, symmetric: bool) -> None:
    weight = problem(16, 128)[0]
    weight[0, :32] = weight[0, :32].abs()  # a group without negative numbers
    weight[1, :32] = 0
    found = Grid(bits, 32, symmetric).round(weight)
    assert int(found.codes.max()) < 1 << bits
    assert torch.equal(found.scales, found.scales.half().to(found.scales.dtype))
    scales = found.scales.float().repeat_interleave(32, dim=1)
    furthest = 0.501 + (1 << bits) * 2**-11  # scales are rounded to FP16
    assert ((found.dense() - weight).abs() <= scales * furthest).all()
    if found.zeros is not None:
        assert int(found.zeros.min()) >= 1


def test_a_searched_range_errs_less() -> None:
    weight = problem(64, 256)[0]
    weight[::7, ::13] *= 6
    errors = [
        float((Grid(3, 64, True, search).round(weight).dense() - weight).abs().pow(2.4).sum())
        for search in (False, True)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_awqs_scales_err_less_than_rounding() -> None:
    weight, x = problem(64, 256)
    hessian, magnitude = moments(x), x.abs().mean(0)
    grid = Grid(4, 64, symmetric=False)
    scales = awq.find_scales(weight, hessian, magnitude, grid)
    scaled = grid.round(weight * scales).dense() / scales
    plain = output_error(weight, grid.round(weight).dense(), x)
    assert output_error(weight, scaled, x) < 0.8 * plain
    total = awq.output_error(scaled - weight, hessian).sum() / len(weight)
    assert float(total) == pytest.approx(output_error(weight, scaled, x), rel=1e-3)


def test_awqs_clipping_errs_less_than_rounding() -> None:
    weight, x = problem(64, 128)
    weight[::5, ::9] *= 5
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))  # independent
    grid = Grid(3, 32, symmetric=False)
    found = grid.round(awq.clipped(weight, moments(x), grid)).dense()
    plain = grid.round(weight).dense()
    assert output_error(weight, found, x) < 0.97 * output_error(weight, plain, x)


def best_tables_cost(values: Tensor, shares: Tensor, count: int) -> float:
    """Of one row, by trying every way to cut its sorted values."""
    order = values.argsort()
    v, s = values[order].double(), shares[order].double()
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(v)), count - 1):
        bounds = [0, *cuts, len(v)]
        cost = 0.0
        for a, b in itertools.pairwise(bounds):
            centre = (v[a:b] * s[a:b]).sum() / s[a:b].sum()
            cost += float((s[a:b] * (v[a:b] - centre).square()).sum())
        best = min(best, cost)
    return best


def test_k_means_is_near_the_best_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 14, generator=generator)
    shares = torch.rand(8, 14, generator=generator) + 0.05
    centres = weighted_k_means(values, shares, 4)
    left = values - centres.gather(1, nearest(values, centres))
    costs = (shares * left.square()).sum(1)
    best = torch.tensor([best_tables_cost(v, s, 4) for v, s in zip(values, shares)])
    assert (costs >= best * 0.9999).all()
    assert float(costs.sum()) < 1.4 * float(best.sum())


@pytest.mark.parametrize("bits", [3, 4])
def test_tables_err_less_than_an_even_grid(bits: int) -> None:
    weight, x = problem(32, 256)
    found = squeezellm(weight, x.square().mean(0), bits)
    plain = Grid(bits, 0, symmetric=False).round(weight).dense()
    assert found.table.shape == (32, 1 << bits) and found.outliers is None
    assert output_error(weight, found.dense(), x) < 0.9 * output_error(weight, plain, x)


def test_what_is_kept_apart_is_exact() -> None:
    weight, x = problem(64, 256)
    weight[3, 7] = 40.0
    found = squeezellm(weight, x.square().mean(0), 3, sparse=True)
    assert found.outliers is not None
    count = int(0.004 * weight.numel()) + int(0.0005 * weight.numel())
    assert len(found.outliers.values) == count
    rows, columns = found.outliers.rows(), found.outliers.columns.long()
    torch.testing.assert_close(found.dense()[rows, columns], weight[rows, columns])
    assert float(found.table.abs().max()) < 1  # the large one moves no table
    dense = squeezellm(weight, x.square().mean(0), 3)
    assert output_error(weight, found.dense(), x) < output_error(weight, dense.dense(), x)
