"""Streams of codes in words, whatever their strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.quant.packing import pack, unpack
from tests.quant.slow_readers import code_at
from tests.quant.stored import words


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize("shape", ((1, 3), (5, 3), (1, 9), (4, 6)))
def test_codes_of_any_layout_of_words(bits: int, shape: tuple[int, int]) -> None:
    stored = words(np.random.default_rng(0), *shape)
    count = shape[1] * 32 // bits
    expected = [[code_at(row, bits, place) for place in range(count)] for row in stored.numpy()]
    for same in (stored, stored.T.contiguous().T, torch.stack((stored, stored), -1)[..., 1]):
        codes = unpack(same, bits, count)
        assert codes.tolist() == expected
        assert torch.equal(pack(codes, bits), stored)
        assert torch.equal(unpack(same, bits, count - 5), codes[:, : count - 5])


def test_a_single_word() -> None:
    stored = words(np.random.default_rng(0), 1, 2)
    for same in (stored[:, :1], stored.T[1:], torch.stack((stored, stored), -1)[:, 1:, 0]):
        assert torch.equal(pack(unpack(same, 4, 8), 4), same)
        assert torch.equal(pack(unpack(same, 4, 3), 4), same & 0xFFF)
