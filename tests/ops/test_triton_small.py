"""Triton's norm, embedding and block copies, interpreted on small shapes."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import registry
from octavo.ops.attention import copy_blocks
from tests.ops.comparing import assert_close, randn

launch = pytest.importorskip("octavo.ops.triton.launch")
pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has them")


def triton_version(op):
    return registry.select(op, "cuda", torch.float16)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (7, 40), (3, 4097)])
def test_rms_norm(rows, size, dtype):
    version = triton_version("rms_norm")
    assert version.name == "triton"
    x, weight = randn(rows, size).to(dtype), randn(size, seed=1).to(dtype)
    expected = registry.versions("rms_norm")[0].call(x.double(), weight.double(), 1e-5)
    assert_close(version.call(x, weight, 1e-5), expected, version, dtype)


def test_rms_norm_takes_any_leading_axes():
    x, weight = randn(2, 3, 64).half(), randn(64, seed=1).half()
    normed = triton_version("rms_norm").call
    found = normed(x.transpose(0, 1), weight, 1e-5)
    assert torch.equal(found, normed(x, weight, 1e-5).transpose(0, 1))


def test_rms_norm_of_rows_too_long_says_so():
    with pytest.raises(ValueError, match="16384"):
        triton_version("rms_norm").call(torch.zeros(1, 16392).half(), torch.zeros(16392).half(), 0)


@pytest.mark.parametrize("size", (8, 576, 5000))
def test_embedding(size):
    ids, weight = torch.tensor([4, 0, 9, 4]), randn(10, size).half()
    found = triton_version("embedding").call(ids, weight)
    assert torch.equal(found, registry.versions("embedding")[0].call(ids, weight))


def test_padding_ids_are_harmless():
    found = triton_version("embedding").call(torch.tensor([1, -1, 10]), torch.ones(10, 16).half())
    assert found.sum(1).tolist() == [16, 0, 0]


@pytest.mark.parametrize("dtype", (torch.float16, torch.float8_e5m2, torch.int8))
@pytest.mark.parametrize("shape", [(6, 2, 2, 16, 16), (5, 1, 2, 64, 80)])
def test_copy_blocks(shape, dtype):
    caches = [(9 * randn(*shape, seed=layer)).to(dtype) for layer in range(3)]
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor([[1, 2], [0, 4]])
    copy_blocks(expected, pairs)
    triton_version("copy_blocks").call(caches, pairs)
    bits = torch.int16 if dtype.itemsize == 2 else torch.uint8
    assert all(torch.equal(x.view(bits), y.view(bits)) for x, y in zip(caches, expected))
    assert not torch.equal(caches[0][1].view(bits), caches[0][0].view(bits))


def test_copy_blocks_refuses_caches_it_cannot_address():
    one, other = torch.zeros(4, 2, 2, 16, 16).half(), torch.zeros(4, 2, 2, 16, 32).half()
    for caches in ([one, other], [one.transpose(1, 3)]):
        with pytest.raises(ValueError, match="of one size"):
            triton_version("copy_blocks").call(caches, torch.tensor([[0, 1]]))
