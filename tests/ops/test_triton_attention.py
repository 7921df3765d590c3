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
from tests.ops.attention_batches import Case, Rope, by_head, case, history, keep, parts_of, read

TritonPagedAttention = module.TritonPagedAttention
FP16, BF16 = torch.float16, torch.bfloat16
KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


# Largest error by the largest number, where now and then a key or value is rounded to another
# neighbour than the definition's.
BOUNDS = {torch.float8_e4m3fn: 0.02, torch.float8_e5m2: 0.04, torch.int8: 0.006}


def scales_for(geometry: AttentionGeometry) -> torch.Tensor | None:
    """Of FP8, unlike for each head of keys and of values."""
    if geometry.cache_dtype in (None, torch.int8):
        return None
    count = 2 * geometry.num_kv_heads
    return torch.linspace(0.02, 0.5, count).view(2, geometry.num_kv_heads)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(
    geometry: AttentionGeometry,
    case: Case,
    dtype=FP16,
    rope=None,
    attention=None,
    sinks=None,
    kv_scales=None,
) -> None:
    """One step: the outputs, the keys and values written, all other places, the padding."""
    rope = rope or Rope(geometry.head_dim)
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    qkv = randn(len(case.real), heads * geometry.head_dim, seed=1).to(dtype)
    weight = None
    if geometry.qk_norm_eps is not None:
        weight = randn(heads - geometry.num_kv_heads, geometry.head_dim, seed=2).to(dtype)
    kind = geometry.cache_dtype
    cache = keep(history(geometry, case, torch.float32 if kind else dtype), kind, kv_scales)
    before, old = cache.clone(), read(cache, geometry, kv_scales).double()
    exact, wide = TorchPagedAttention(geometry), old.permute(0, 3, 2, 1, 4).contiguous()
    expected = exact(
        qkv.double(),
        wide,
        exact.prepare(case.plain, rope, torch.float64),
        None if weight is None else weight.double(),
        sinks,
        kv_scales,
    )

    attention = attention or TritonPagedAttention(geometry)
    poisoned = qkv.new_full((len(case.padded.positions), qkv.shape[1]), float("nan"))
    poisoned[case.real] = qkv
    state = attention.prepare(case.padded, rope, dtype)
    found = attention(poisoned, cache, state, weight, sinks, kv_scales)

    eps = torch.finfo(dtype).eps
    error = (found[case.real].double() - expected).abs().max() / expected.abs().max()
    assert error <= BOUNDS.get(kind, 8 * eps), f"relative error {error:.2e}"
    padding = torch.ones(len(found), dtype=torch.bool)
    padding[case.real] = False
    assert torch.equal(found[padding], torch.zeros_like(found[padding]))
    found, expected = read(cache, geometry, kv_scales).double(), by_head(wide)
    written = torch.zeros(expected.shape[0], expected.shape[3], dtype=torch.bool)
    written.view(-1)[case.plain.slot_mapping] = True
    new = written[:, None, None, :, None].expand(found.shape)
    if kind is None:
        torch.testing.assert_close(found[new], expected[new], rtol=4 * eps, atol=eps)
    else:  # here and there a number is rounded to another neighbour
        error = (found[new] - expected[new]).norm() / expected[new].norm()
        assert error <= 0.005, f"relative error {error:.2e}"
    for mine, other in zip(parts_of(cache, geometry), parts_of(before, geometry)):
        if mine.dim() > 1:
            same = ~written[:, None, None, :, None].expand(mine.shape)
            bits = torch.uint8 if mine.itemsize == 1 else torch.int16
            mine, other = (t.contiguous().view(bits) for t in (mine, other))
            same = same.repeat_interleave(mine.shape[-1] // same.shape[-1], dim=-1)
            assert torch.equal(mine[same], other[same])
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


@kinds
@pytest.mark.parametrize(("dtype", "tma"), ((FP16, False), (BF16, True)))
def test_cache_of_8_bits(monkeypatch, dtype, tma, kind):
    config = PrefillConfig(64, 64, 4, 3, tma)
    monkeypatch.setattr(module, "prefill_config", lambda *shape: config)
    geometry = AttentionGeometry(4, 2, 64, qk_norm_eps=1e-6, window=150, cache_dtype=kind)
    batch = case([90, 0, 130, 70], [1, 1, 1, 9], 64, 1, 1, 2)
    check(geometry, batch, dtype, kv_scales=scales_for(geometry))


@kinds
@pytest.mark.parametrize("dim", (32, 80, 256))
def test_cache_of_8_bits_and_heads_of_other_sizes(kind, dim):
    geometry = AttentionGeometry(3, 1, dim, cache_dtype=kind)
    check(geometry, case([90, 0, 7], [1, 1, 9], 16))


@kinds
def test_cache_of_8_bits_in_splits_and_the_same_way_for_all_rows(monkeypatch, kind):
    geometry = AttentionGeometry(4, 2, 64, cache_dtype=kind)
    config = DecodeConfig(32, 1, 5, 4, 1)
    monkeypatch.setattr(module, "decode_config", lambda *shape: config)
    batch = case([130, 63, 0, 20], [1, 1, 1, 9], 16, 1, 1, 2)
    check(geometry, batch, kv_scales=scales_for(geometry))
    fixed = FixedPagedAttention(geometry)
    check(geometry, batch, attention=fixed, kv_scales=scales_for(geometry))


def test_values_of_any_size_in_int8():
    """Scales that differ by 1e6 from token to token, and tokens of zeros: weights are multiplied by
    them in FP16."""
    geometry = AttentionGeometry(2, 1, 32, cache_dtype=torch.int8)
    batch = case([100], [1], 16)
    cache = keep(history(geometry, batch, torch.float32), torch.int8)
    _, steps = parts_of(cache, geometry)
    exponents = torch.linspace(-8, -2, steps.shape[3]).flip(0)
    size = 16 * 32
    cache[:, :, 1, size:] = (10.0**exponents).float().view(torch.int8)
    cache[batch.plain.block_tables[0, 2], :, 1] = 0
    state = (attention := TritonPagedAttention(geometry)).prepare(batch.padded, Rope(32), FP16)
    exact = TorchPagedAttention(geometry)
    wide = read(cache, geometry).double().permute(0, 3, 2, 1, 4).contiguous()
    qkv = randn(1, 4 * 32, seed=1)
    qkv[:, 96:] *= 1e-6
    qkv = qkv.to(FP16)
    expected = exact(qkv.double(), wide, exact.prepare(batch.plain, Rope(32), torch.float64))
    found = attention(qkv, cache, state).double()
    assert (found - expected).abs().max() <= 0.002 * expected.abs().max()


def test_cache_of_8_bits_shows_what_is_no_number_in_a_key():
    """E4M3 has such a number too, but the interpreter reads it as 480."""
    for kind in (torch.int8, torch.float8_e5m2):
        geometry = AttentionGeometry(2, 1, 32, cache_dtype=kind)
        batch = case([0, 0], [5, 3], 16)
        attention = TritonPagedAttention(geometry)
        qkv = randn(8, 4 * 32, seed=1).to(FP16)
        qkv[3, 70] = float("nan")
        cache = keep(history(geometry, batch, torch.float32), kind)
        found = attention(qkv, cache, attention.prepare(batch.padded, Rope(32), FP16))
        assert found[:3].isfinite().all() and found[5:].isfinite().all()
        assert found[3:5].isnan().all()


@pytest.mark.parametrize("window", (None, 40))
def test_softcap_and_sinks(window):
    geometry = AttentionGeometry(6, 2, 64, window=window, softcap=2.0, own_scale=0.3)
    batch = case([200, 0, 70], [1, 1, 9], 16, 1)
    check(geometry, batch, sinks=torch.tensor([-3.0, 0.0, 1.0, 20.0, 4.0, -30.0]))
    for kind in KINDS.values():
        geometry = replace(geometry, cache_dtype=kind)
        check(geometry, batch, kv_scales=scales_for(geometry))


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
    with pytest.raises(ValueError, match="float8"):
        attention(torch.randn(1, 256).half(), cache.to(torch.float8_e4m3fn), state)
    with pytest.raises(ValueError, match="uint8"):
        TritonPagedAttention(replace(geometry, cache_dtype=torch.uint8))


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
