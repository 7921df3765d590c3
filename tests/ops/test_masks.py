"""Masks of ids that may be drawn: the definition against plain Python, the kernel against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops import masks


def case(rows: int, vocab: int, num_masks: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(logits, index, masks, expected)."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    index = rng.integers(-1, num_masks, rows)
    allowed = rng.random((num_masks, -(-vocab // 32) * 32)) < rng.random((num_masks, 1))
    expected = logits.copy()
    for row, own in enumerate(index.tolist()):
        for token in range(vocab):
            if own >= 0 and not allowed[own, token]:
                expected[row, token] = -np.inf
    words = np.packbits(allowed, axis=-1, bitorder="little").view("<i4")
    return (torch.from_numpy(logits), torch.from_numpy(index.astype(np.int32)),
            torch.from_numpy(words), torch.from_numpy(expected))  # fmt: skip


CASES = [(1, 32, 1), (5, 97, 3), (8, 320, 8), (3, 1000, 2), (2, 31, 2)]


@pytest.mark.parametrize("rows,vocab,num_masks", CASES)
def test_what_a_mask_leaves_out_is_minus_infinity(rows: int, vocab: int, num_masks: int) -> None:
    logits, index, words, expected = case(rows, vocab, num_masks, seed=vocab)
    masks.keep_allowed(logits, index, words)
    assert torch.equal(logits, expected)


def test_bits_are_taken_apart_alike() -> None:
    words = torch.randint(-(2**31), 2**31, (5, 7), dtype=torch.int32)
    assert torch.equal(masks.unpacked(words), masks.unpacked_by_numpy(words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("rows,vocab,num_masks", CASES)
def test_the_kernel_does_the_same(rows: int, vocab: int, num_masks: int) -> None:
    pytest.importorskip("triton")
    from octavo.ops.triton.masks import keep_allowed

    logits, index, words, expected = case(rows, vocab, num_masks, seed=vocab + 1)
    wide = torch.full((rows, vocab + 5), 7.0)
    wide[:, :vocab] = logits
    keep_allowed(wide[:, :vocab], index, words, tile=128)
    assert torch.equal(wide[:, :vocab], expected)
    assert (wide[:, vocab:] == 7.0).all()
