"""The Triton version of paged attention against the definition in FP64, interpreted on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.model.rope import Rope as ModelRope
from octavo.model.spec import DynamicScaling, LinearScaling, RopeSpec
from octavo.ops.attention import AttentionGeometry, TorchPagedAttention
from octavo.ops.triton import attention as module
from octavo.ops.triton.attention_configs import DecodeConfig, PrefillConfig
from octavo.ops.triton.fixed_attention import FixedPagedAttention
from tests.ops.attention_batches import Case, Rope, by_head, case, history

TritonPagedAttention = module.TritonPagedAttention
FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(
    geometry: AttentionGeometry,
    case: Case,
    dtype=FP16,
    rope=None,
    attention=None,
    cache_dtype=None,
    sinks=None,
    kv_scales=(1.0, 1.0),
) -> None:
    """One step: the outputs, the keys and values written, all other places, the padding."""
    rope = rope or Rope(geometry.head_dim)
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    qkv = randn(len(case.real), heads * geometry.head_dim, seed=1).to(dtype)
    weight = None
    if geometry.qk_norm_eps is not None:
        weight = randn(heads - geometry.num_kv_heads, geometry.head_dim, seed=2).to(dtype)
    fp8 = cache_dtype == FP8
    before = history(geometry, case, cache_dtype or dtype)
    exact, kept = TorchPagedAttention(geometry), before.clone() if fp8 else before.double()
    expected = exact(
        qkv.double(),
        kept,
        exact.prepare(case.plain, rope, torch.float64),
        None if weight is None else weight.double(),
        sinks,
        kv_scales,
    )

    attention = attention or TritonPagedAttention(geometry)
    cache = by_head(before)
    poisoned = qkv.new_full((len(case.padded.positions), qkv.shape[1]), float("nan"))
    poisoned[case.real] = qkv
    state = attention.prepare(case.padded, rope, dtype)
    found = attention(poisoned, cache, state, weight, sinks, kv_scales)

    eps = torch.finfo(dtype).eps
    error = (found[case.real].double() - expected).abs().max() / expected.abs().max()
    assert error <= (0.02 if fp8 else 8 * eps), f"relative error {error:.2e}"
    padding = torch.ones(len(found), dtype=torch.bool)
    padding[case.real] = False
    assert torch.equal(found[padding], torch.zeros_like(found[padding]))
    kept, written = by_head(kept), torch.zeros(before.shape[:2], dtype=torch.bool)
    written.view(-1)[case.plain.slot_mapping] = True
    written = written[:, None, None, :, None].expand(cache.shape)
    bound = {"rtol": 0.13, "atol": 0.002} if fp8 else {"rtol": 4 * eps, "atol": eps}
    torch.testing.assert_close(cache.double()[written], kept.double()[written], **bound)
    bits = torch.uint8 if fp8 else torch.int16
    assert torch.equal(cache.view(bits)[~written], by_head(before).view(bits)[~written])
    assert not state.workspace.arrived.any()


HEADS = {  # (query heads, kv heads, head size)
    "mha-64": (2, 2, 64),
    "gqa3-80": (6, 2, 80),
    "gqa4-128": (4, 1, 128),
    "gqa7-96": (7, 1, 96),
    "gqa20-32": (20, 1, 32),
    "mqa-192": (2, 1, 192),
    "mqa-256": (2, 1, 256),
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_rows_of_one_token(heads):
    check(AttentionGeometry(*heads), case([70, 0, 31, 32], [1, 1, 1, 1], 16))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_rows_of_several_tokens(heads):
    check(AttentionGeometry(*heads), case([0, 75], [21, 7], 16))


@pytest.mark.parametrize("block_size", (16, 64))
def test_long_contexts_are_split_and_merged(block_size):
    check(AttentionGeometry(4, 1, 64), case([1100, 63, 64, 700], [1] * 4, block_size))


def test_many_splits_are_merged_in_several_goes(monkeypatch):
    config = DecodeConfig(16, 1, 5, 64, 1)
    monkeypatch.setattr(module, "decode_config", lambda *shape: config)
    check(AttentionGeometry(8, 1, 32), case([1000], [1], 16))


@pytest.mark.parametrize("block_size", (16, 64, 128))
def test_mixed_batch_with_padding(block_size):
    geometry = AttentionGeometry(6, 2, 64, qk_norm_eps=1e-6)
    check(geometry, case([33, 127, 0, 140, 5], [1, 1, 3, 18, 2], block_size, 2, 3, 4))


@pytest.mark.parametrize("window", (1, 64, 150))
def test_window(window):
    geometry = AttentionGeometry(4, 2, 64, window=window)
    check(geometry, case([300, 20, 10, 210, 0], [1, 1, 1, 20, 70], 16))


@pytest.mark.parametrize("heads", ((6, 2, 80), (4, 1, 128)))
def test_bf16(heads):
    geometry = AttentionGeometry(*heads, qk_norm_eps=1e-6)
    check(geometry, case([200, 9, 40], [1, 1, 12], 16, 1), BF16)


@pytest.mark.parametrize("tma", (False, True))
@pytest.mark.parametrize("window", (None, 100))
def test_copy_engine_reads_the_same(monkeypatch, window, tma):
    def chosen(*shape):
        return PrefillConfig(64, 64, 4, 3, tma)

    monkeypatch.setattr(module, "prefill_config", chosen)
    geometry = AttentionGeometry(4, 1, 64, window=window)
    check(geometry, case([190, 64], [40, 2], 64))


@pytest.mark.parametrize(("dtype", "tma"), ((FP16, False), (BF16, True)))
def test_fp8_cache(monkeypatch, dtype, tma):
    config = PrefillConfig(64, 64, 4, 3, tma)
    monkeypatch.setattr(module, "prefill_config", lambda *shape: config)
    geometry = AttentionGeometry(4, 2, 64, qk_norm_eps=1e-6, window=150)
    batch = case([90, 0, 130, 70], [1, 1, 1, 9], 64, 1, 1, 2)
    check(geometry, batch, dtype, cache_dtype=FP8, kv_scales=(0.5, 0.02))


def test_fp8_cache_of_heads_of_80():
    geometry = AttentionGeometry(3, 1, 80)
    check(geometry, case([90, 0, 7], [1, 1, 9], 16), cache_dtype=FP8)


@pytest.mark.parametrize("window", (None, 40))
def test_softcap_and_sinks(window):
    geometry = AttentionGeometry(6, 2, 64, window=window, softcap=2.0, own_scale=0.3)
    batch = case([200, 0, 70], [1, 1, 9], 16, 1)
    check(geometry, batch, sinks=torch.tensor([-3.0, 0.0, 1.0, 20.0, 4.0, -30.0]))
    check(geometry, batch, cache_dtype=FP8, kv_scales=(0.5, 0.02))


def test_scores_scaled_by_a_number_of_their_own():
    check(AttentionGeometry(4, 2, 64, own_scale=0.3), case([200, 0, 70], [1, 1, 9], 16, 1))


def test_refuses_a_cache_of_another_dtype():
    geometry = AttentionGeometry(2, 1, 64)
    batch = case([3], [1], 16)
    attention = TritonPagedAttention(geometry)
    state = attention.prepare(batch.padded, Rope(64), FP16)
    cache = by_head(history(geometry, batch, BF16))
    with pytest.raises(ValueError, match="bfloat16"):
        attention(torch.randn(1, 256).half(), cache, state)


def test_many_rows_find_their_tiles():
    """More rows than are looked through at once; some of one token, where any number may be."""
    check(AttentionGeometry(1, 1, 16), case([3] * 131, [2] + [1] * 130, 16, padded_rows=5))


def test_angles_that_depend_on_the_context():
    geometry = AttentionGeometry(2, 1, 64)
    rope = Rope(64, by_token=True)
    check(geometry, case([40, 3, 7, 0], [1, 1, 5, 3], 16, 1, 1, 2), rope=rope)


def test_dynamic_scaling():
    rope = ModelRope(RopeSpec(500.0, DynamicScaling(4.0, 32)), 64, 128)
    check(AttentionGeometry(2, 1, 64), case([100, 3, 50], [1, 1, 9], 16), rope=rope)


def test_table_holds_what_a_call_gives():
    rope = ModelRope(RopeSpec(500.0, LinearScaling(2.0)), 64, 128)
    table = rope.table(128, torch.device("cpu"))
    positions = torch.tensor([0, 5, 127])
    assert torch.equal(table[positions], torch.cat(rope(positions, positions + 1), dim=1))
    assert rope.table(128, torch.device("cpu")) is table


def test_any_number_of_splits_gives_the_same(monkeypatch):
    """Also more than there are keys, and fewer than would be chosen."""
    for splits, min_tiles in ((1, 1), (3, 1), (64, 1), (16, 4)):
        config = DecodeConfig(32, 1, 5, splits, min_tiles)
        monkeypatch.setattr(module, "decode_config", lambda *shape, config=config: config)
        check(AttentionGeometry(3, 1, 64), case([130, 0, 31], [1, 1, 1], 16))


def test_step_replayed_at_other_lengths():
    """Only tensors of the batch change, as when a graph is replayed."""
    geometry = AttentionGeometry(4, 2, 64)
    attention = TritonPagedAttention(geometry)
    wide = case([500, 500, 0], [1, 1, 64], 16)
    attention.prepare(wide.padded, Rope(64), FP16)
    for past, new in (([0, 90, 30], [1, 1, 50]), ([499, 3, 7], [1, 1, 2])):
        other = case(past, new, 16)
        tables = torch.full((3, wide.padded.block_tables.shape[1]), 1 << 30, dtype=torch.int32)
        tables[:, : other.padded.block_tables.shape[1]] = other.padded.block_tables
        other.padded = replace(other.padded, block_tables=tables)
        check(geometry, other, attention=attention)


@pytest.mark.parametrize("window", (None, 40))
def test_rows_with_drafts(window):
    """Rows of three tokens through the kernel for rows of one, as verifying drafts will."""
    geometry = AttentionGeometry(6, 2, 64, window=window)
    batch = case([0, 150, 31], [3, 3, 3], 16)
    attention = TritonPagedAttention(geometry)
    qkv = randn(9, 10 * 64, seed=1).to(FP16)
    cache = by_head(history(geometry, batch, FP16))
    state = attention.prepare(batch.padded, Rope(64), FP16)
    expected = attention(qkv.clone(), cache.clone(), state)
    found = torch.full_like(expected, float("nan"))
    layer = module.Layer(cache)
    attention.rope_cache(qkv, layer, found, state)
    state.batch = replace(batch.padded, decode_rows=3)
    attention.decode(qkv, layer, found, state, DecodeConfig(32, 1, 5, 4, 1), queries=3)
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("window", (None, 40))
@pytest.mark.parametrize("heads", ((6, 2, 80), (2, 1, 192)))
def test_all_rows_the_same_way(heads, window):
    """As --deterministic has it: rows of one token, of several and of padding in one kernel."""
    geometry = AttentionGeometry(*heads, window=window, qk_norm_eps=1e-6)
    batch = case([33, 127, 0, 140, 5], [1, 1, 3, 18, 2], 16, 2, 3, 4)
    check(geometry, batch, attention=FixedPagedAttention(geometry))


@pytest.mark.parametrize("block_size", (8, 48))
def test_refuses_other_block_sizes(block_size):
    with pytest.raises(ValueError, match="power of two"):
        TritonPagedAttention(AttentionGeometry(4, 2, 64)).kv_shape(10, block_size)
