"""The parts that the sampler's kernels share, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.ops import sampling

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from octavo.ops.needs import WIDTH, Int  # noqa: E402
from octavo.ops.triton import sampling_parts as parts  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def noise_kernel(params_i, position, ids, bits, logs, SIZE: tl.constexpr):
    first, second = parts.row_keys(params_i, 0, tl.load(position))
    i = tl.arange(0, SIZE)
    token = tl.load(ids + i)
    tl.store(bits + i, parts.noise_bits(first, second, token))
    tl.store(logs + i, parts.log_exponential(first, second, token))


@triton.jit
def pack_kernel(scores, packed, back, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    found = parts.pack(tl.load(scores + i), i)
    tl.store(packed + i, found)
    tl.store(back + i, parts.packed_id(found))


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (42, 1), (2**64 - 1, 2**20), (0x9E3779B97F4A7C15, 777)]
)
def test_noise_has_the_bits_of_the_definition_and_its_exponentials(
    seed: int, position: int
) -> None:
    size = 1024
    words = np.array([seed], dtype="<u8").view("<i4")
    params = torch.zeros(1, WIDTH, dtype=torch.int32)
    params[0, Int.SEED_LOW], params[0, Int.SEED_HIGH] = int(words[0]), int(words[1])
    place = torch.tensor([position], dtype=torch.int32)
    ids = torch.randint(0, 300_000, (size,), dtype=torch.int32)
    bits = torch.zeros(size, dtype=torch.int32, device=DEVICE)
    logs = torch.zeros(size, dtype=torch.float32, device=DEVICE)
    noise_kernel[(1,)](params.to(DEVICE), place.to(DEVICE), ids.to(DEVICE), bits, logs, SIZE=size)
    low, high = torch.tensor(words[:1]), torch.tensor(words[1:])
    expected = sampling.noise_bits(sampling.row_keys(low, high, place), ids)[0]
    assert bits.tolist() == expected.tolist()
    exponentials = sampling.exponential(expected)
    assert torch.allclose(logs.cpu().exp(), exponentials, rtol=2e-6, atol=0.0)


@triton.jit
def exponential_kernel(bits, logs, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(logs + i, parts.log_exponential_of(tl.load(bits + i)))


def test_logarithms_of_exponentials_are_exact_to_rounding_from_end_to_end() -> None:
    ends = [0, 1, 2, 3, 2**31 - 1, 2**31 - 2, 2**31 - 64, 2**31 - 200, 2**30, 2**30 - 1]
    third = int(2**31 / 3)
    near = [third + step * 64 for step in range(-8, 9)]
    powers = [2**e + d for e in range(2, 31) for d in (-1, 0, 1)]
    chosen = torch.tensor(ends + near + powers, dtype=torch.int32)
    bits = torch.cat([chosen, torch.randint(0, 2**31 - 1, (1024 - len(chosen),)).int()])
    logs = torch.zeros(1024, dtype=torch.float32, device=DEVICE)
    exponential_kernel[(1,)](bits.to(DEVICE), logs, SIZE=1024)
    v = np.minimum((bits.numpy().astype(np.float32) + np.float32(0.5)) * 2.0**-31, 1 - 2.0**-24)
    exact = np.log(-np.log1p(-v.astype(np.float64)))
    error = np.abs(logs.cpu().numpy() - exact) / np.maximum(1, np.abs(exact))
    assert error.max() < 2e-7


def test_packed_scores_have_the_order_of_most_likely() -> None:
    nan, inf = math.nan, math.inf
    rows = [
        [1.0, 3.0, 3.0, -3.0],
        [-inf, -inf, -inf, -inf],
        [2.0, nan, inf, nan],
        [-0.0, 0.0, -1.0, 0.0],
        [0.0, -0.0, 1e-45, -1e-45],
        [inf, nan, -nan, -inf],
        [-5.0, -4.0, -4.5, -4.0],
        [3e38, -3e38, 3.1e38, 3.1e38],
    ]
    for row in rows:
        scores = torch.tensor(row)
        packed = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        back = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        pack_kernel[(1,)](scores.to(DEVICE), packed, back, SIZE=4)
        assert back.tolist() == [0, 1, 2, 3]
        assert int(packed.argmax()) == int(sampling.most_likely(scores[None])), row
        assert len(set(packed.tolist())) == 4
