"""Layer norms, activations and scaled sums of csrc/pointwise.h, of each instruction set that this
CPU has, against the definitions in FP64."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import registry
from octavo.ops.native import pointwise
from octavo.ops.native.library import features
from tests.ops.comparing import assert_close, randn

KERNELS = [
    pytest.param((dtype, f"{name}_{isa}"), id=f"{name}_{isa}")
    for dtype, name in pointwise._DTYPES.items()
    for needed, isa in pointwise._ISAS
    if needed in features()
]
if not KERNELS:
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)
SIZES = (1, 2, 15, 33, 64, 577)
KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def version(op: str) -> registry.Version:
    return registry.versions(op)[-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layer_norms(kernel, size):
    dtype, name = kernel
    x, weight, bias = ((randn(9, size, seed=s) + 1).to(dtype) for s in range(3))
    found = pointwise.run_layer_norm(f"octavo_layer_norm_{name}", x, weight[0], bias[0], 1e-5)
    definition = registry.versions("layer_norm")[0].call
    expected = definition(x.double(), weight[0].double(), bias[0].double(), 1e-5)
    if size > 1:  # of one number all but the bias is rounding
        assert_close(found, expected, version("layer_norm"), dtype)
    assert found.dtype == dtype and found.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations(kernel, size, kind):
    dtype, name = kernel
    x = (randn(9, 2 * size) * 4).to(dtype)
    definition = registry.versions("activate")[0].call
    for gated in (False, True):
        found = pointwise.run_activate(f"octavo_activate_{name}", x, kind, gated)
        assert_close(found, definition(x.double(), kind, gated), version("activate"), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations_far_from_zero_and_of_no_numbers(kernel, kind):
    dtype, name = kernel
    x = torch.tensor([[-1e30, -100, -12, 12, 100, 1e30, 0, torch.inf, torch.nan]]).to(dtype)
    found = pointwise.run_activate(f"octavo_activate_{name}", x, kind, False)[0]
    assert found[:3].abs().max() < 1e-3
    torch.testing.assert_close(found[3:8], x[0, 3:8], rtol=1e-5, atol=0)
    assert found[8].isnan()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_scaled_sums(kernel, size):
    dtype, name = kernel
    x, other = randn(9, size).to(dtype), randn(9, size, seed=1).to(dtype)
    for scale in (1.0, 0.22):
        expected = x.double() + scale * other.double()
        written = x.clone()
        found = pointwise.run_add(f"octavo_add_{name}", written, other, scale)
        assert_close(found, expected, version("add_scaled"), dtype)
        assert found.data_ptr() == written.data_ptr()
        alone = pointwise.run_add(f"octavo_add_{name}", None, other, scale)
        assert torch.equal(alone, other * scale)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_number_is_the_same_wherever_it_lies(kernel):
    dtype, name = kernel
    row = randn(1, 40).to(dtype)
    wide = torch.cat((randn(1, 3, seed=1).to(dtype), row), dim=1)
    for kind in KINDS:
        found = pointwise.run_activate(f"octavo_activate_{name}", wide, kind, False)[:, 3:]
        assert torch.equal(
            found, pointwise.run_activate(f"octavo_activate_{name}", row, kind, False)
        )
