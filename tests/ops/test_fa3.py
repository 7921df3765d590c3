"""What FlashAttention-3 is asked to compute, by an operator that does what its documentation says
(tests/gpu/test_attention.py asks the real one)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from octavo.ops.attention import AttentionGeometry
from octavo.ops.fa3 import FA3PagedAttention
from octavo.ops.triton.attention import TritonPagedAttention
from tests.ops.attention_batches import Rope, by_head, case, history


def forward(
    q, k, v, *, out, cu_seqlens_q, seqused_k, max_seqlen_q, page_table, softmax_scale, is_causal,
    window_size_left, window_size_right,
):  # fmt: skip
    """Variable lengths, paged: the causal mask is aligned to the end of keys; query i sees keys
    from i - left to i + right."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    assert cu_seqlens_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    assert is_causal and len(cu_seqlens_q) == len(seqused_k) + 1 == len(page_table) + 1
    starts = cu_seqlens_q.tolist()
    assert starts[0] == 0 and max_seqlen_q >= max(b - a for a, b in pairwise(starts))
    group, size = q.shape[1] // k.shape[2], k.shape[1]
    for row, length in enumerate(seqused_k.tolist()):
        mine = slice(starts[row], starts[row + 1])
        place = torch.arange(length)
        block = page_table[row, place // size].long()
        keys, values = (t[block, place % size].float() for t in (k, v))
        keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
        query = q[mine].float().transpose(0, 1)
        position = torch.arange(length - query.shape[1], length)[:, None]
        seen = place <= position + window_size_right
        if window_size_left >= 0:
            seen &= place >= position - window_size_left
        scores = (query @ keys.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
        out[mine] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)


@pytest.mark.parametrize("window", (None, 20))
def test_fa3_is_asked_for_the_rows_of_several_tokens(window):
    geometry = AttentionGeometry(4, 2, 64, window=window, own_scale=0.2)
    batch = case([40, 3, 7, 0], [1, 1, 25, 3], 16, 1, 1, 2)
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    qkv = torch.randn(len(batch.padded.positions), heads * 64).half()
    results = []
    for attention in (FA3PagedAttention(geometry, forward), TritonPagedAttention(geometry)):
        cache = by_head(history(geometry, batch, torch.float16))
        state = attention.prepare(batch.padded, Rope(64), torch.float16)
        results.append((attention(qkv.clone(), cache, state), cache))
    (found, cache), (expected, other_cache) = results
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
    assert torch.equal(cache.view(torch.int16), other_cache.view(torch.int16))


def test_steps_of_single_tokens_never_reach_fa3():
    def never(*tensors, **options):
        raise AssertionError

    geometry = AttentionGeometry(2, 1, 64)
    batch = case([40, 3], [1, 1], 16)
    attention = FA3PagedAttention(geometry, never)
    cache = by_head(history(geometry, batch, torch.float16))
    state = attention.prepare(batch.padded, Rope(64), torch.float16)
    assert attention(torch.randn(2, 4 * 64).half(), cache, state).isfinite().all()
