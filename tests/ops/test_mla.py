"""Multi-head latent attention: its definition against expanded heads, and the other versions (that
in Triton interpreted on a CPU) against the definition in FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops.cpu.mla import CPUPagedLatentAttention
from octavo.ops.mla import MLAGeometry, TorchPagedLatentAttention, rotate_pairs
from tests.ops.attention_batches import Case, Rope, case
from tests.ops.latent_batches import inputs, latent_history, ups

module = pytest.importorskip("octavo.ops.triton.latent_attention")
configs = pytest.importorskip("octavo.ops.triton.latent_configs")
TritonPagedLatentAttention = module.TritonPagedLatentAttention
Tiles, LatentConfig = configs.Tiles, configs.LatentConfig
FP16, BF16 = torch.float16, torch.bfloat16
SMALL = MLAGeometry(4, 32, 16, 24, 20, 40**-0.5)
HEADS = {
    "4": SMALL,
    "16-interleaved": replace(SMALL, num_heads=16, interleaved=True),
    "20-latent-64": replace(SMALL, num_heads=20, latent_dim=64, value_dim=32),
    "40-latent-48": replace(SMALL, num_heads=40, latent_dim=48, rope_dim=8),
    "1": replace(SMALL, num_heads=1),
}


def expanded(geometry: MLAGeometry, q, kv, key_up, value_up, rope: Rope) -> torch.Tensor:
    """Attention of one new context with keys and values of every head, as published."""
    positions = torch.arange(len(q))
    cos, sin = rope(positions, positions + 1)
    nope, turned = q.split((geometry.nope_dim, geometry.rope_dim), dim=2)
    latent, shared = kv.split((geometry.latent_dim, geometry.rope_dim), dim=1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        """Pairs as complex numbers."""
        pairs = x.unflatten(-1, (-1, 2)) if geometry.interleaved else x.unflatten(-1, (2, -1)).mT
        number = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
        pairs = torch.view_as_real(number)
        return (pairs if geometry.interleaved else pairs.mT).flatten(-2)

    heads = geometry.num_heads
    keys = torch.einsum("hnr,kr->khn", key_up, latent)
    keys = torch.cat((keys, turn(shared[:, None]).expand(-1, heads, -1)), dim=2)
    values = torch.einsum("hrv,kr->khv", value_up, latent)
    queries = torch.cat((nope, turn(turned)), dim=2)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (queries, keys, values)), is_causal=True, scale=geometry.scale
    )
    return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("interleaved", (False, True))
def test_the_definition_equals_expanded_heads(interleaved):
    geometry = replace(SMALL, interleaved=interleaved)
    batch, rope = case([0], [37], 16).plain, Rope(geometry.rope_dim)
    q, kv = (x.double() for x in inputs(geometry, 37, torch.float32))
    key_up, value_up = (x.double() for x in ups(geometry, torch.float32))
    exact = TorchPagedLatentAttention(geometry)
    cache = torch.zeros(exact.kv_shape(6, 16), dtype=torch.float64)
    state = exact.prepare(batch, rope, torch.float64)
    found = exact(q, kv, cache, state, key_up, value_up)
    torch.testing.assert_close(found, expanded(geometry, q, kv, key_up, value_up, rope))


def test_pairs_turn_where_they_are():
    x, angle = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]), torch.tensor([[0.5, 0.25]])
    cos, sin = angle.cos(), angle.sin()
    (c, d), (s, t) = cos[0].tolist(), sin[0].tolist()
    apart = rotate_pairs(x, cos, sin, interleaved=False)
    assert apart.flatten().tolist() == pytest.approx([c, -t, s, d])
    beside = rotate_pairs(x, cos, sin, interleaved=True)
    assert beside.flatten().tolist() == pytest.approx([c, s, -t, d])


@pytest.mark.parametrize("query_rows", (2048, 40))
@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("geometry", HEADS.values(), ids=HEADS)
def test_cpu_version(geometry, dtype, query_rows, monkeypatch):
    """New prompts, later chunks and rows of one token, a few queries at a time and all at once."""
    monkeypatch.setattr("octavo.ops.cpu.mla.QUERY_ROWS", query_rows)
    batch = case([31, 0, 75, 16, 0], [1, 1, 30, 7, 50], 16)
    q, kv = inputs(geometry, len(batch.real), dtype)
    weights = ups(geometry, dtype)
    cache, rope = latent_history(geometry, batch, dtype), Rope(geometry.rope_dim)
    exact, wide = TorchPagedLatentAttention(geometry), cache.double()
    state = exact.prepare(batch.plain, rope, torch.float64)
    expected = exact(q.double(), kv.double(), wide, state, *(w.double() for w in weights))
    attention = CPUPagedLatentAttention(geometry)
    assert attention.kv_shape(*cache.shape[:2]) == tuple(cache.shape)
    found = attention(q, kv, cache, attention.prepare(batch.plain, rope, dtype), *weights)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (found.double() - expected).abs().max() <= 4 * eps * expected.abs().max()
    torch.testing.assert_close(cache.double(), wide, rtol=4 * eps, atol=eps, equal_nan=True)


def check(geometry: MLAGeometry, case: Case, dtype=FP16, rope=None, attention=None) -> None:
    """One step: the outputs, what is cached, all other places, the padding."""
    rope = rope or Rope(geometry.rope_dim)
    q, kv = inputs(geometry, len(case.real), dtype)
    weights = ups(geometry, dtype)
    before = latent_history(geometry, case, dtype)
    exact, wide = TorchPagedLatentAttention(geometry), before.double()
    state = exact.prepare(case.plain, rope, torch.float64)
    expected = exact(q.double(), kv.double(), wide, state, *(w.double() for w in weights))

    attention = attention or TritonPagedLatentAttention(geometry)
    cache = before.clone()
    tokens = len(case.padded.positions)
    poisoned = [x.new_full((tokens, *x.shape[1:]), float("nan")) for x in (q, kv)]
    for all_tokens, real in zip(poisoned, (q, kv)):
        all_tokens[case.real] = real
    state = attention.prepare(case.padded, rope, dtype)
    found = attention(*poisoned, cache, state, *weights)

    eps = torch.finfo(dtype).eps
    error = (found[case.real].double() - expected).abs().max() / expected.abs().max()
    assert error <= 8 * eps, f"relative error {error:.2e}"
    padding = torch.ones(tokens, dtype=torch.bool)
    padding[case.real] = False
    assert torch.equal(found[padding], torch.zeros_like(found[padding]))
    written = torch.zeros(before.shape[:2], dtype=torch.bool)
    written.view(-1)[case.plain.slot_mapping] = True
    torch.testing.assert_close(cache[written].double(), wide[written], rtol=4 * eps, atol=eps)
    assert torch.equal(cache[~written].view(torch.int16), before[~written].view(torch.int16))


@pytest.mark.parametrize("geometry", HEADS.values(), ids=HEADS)
def test_rows_of_one_token(geometry):
    check(geometry, case([70, 0, 31, 32], [1, 1, 1, 1], 16))


@pytest.mark.parametrize("geometry", HEADS.values(), ids=HEADS)
def test_rows_of_several_tokens(geometry):
    check(geometry, case([0, 75], [21, 7], 16))


@pytest.mark.parametrize("block_size", (16, 64))
def test_long_contexts_are_split_and_merged(block_size):
    check(SMALL, case([1100, 63, 64, 700], [1] * 4, block_size))


@pytest.mark.parametrize("block_size", (16, 128))
def test_mixed_batch_with_padding(block_size):
    check(
        HEADS["16-interleaved"], case([33, 127, 0, 140, 5], [1, 1, 3, 18, 2], block_size, 2, 3, 4)
    )


LOW, HIGH = Tiles(16, 32, 4, 3), Tiles(64, 64, 8, 2)


@pytest.mark.parametrize(
    ("config", "dtype"),
    (
        (LatentConfig(LOW, 1, 1), BF16),
        (LatentConfig(LOW, 8, 1), FP16),  # more splits than some contexts have tiles of keys
        (LatentConfig(HIGH, 3, 1), BF16),
        (LatentConfig(HIGH, 5, 2), FP16),
    ),
    ids=str,
)
def test_any_tiles_and_splits_give_the_same(monkeypatch, config, dtype):
    """Of rows of several tokens too."""
    monkeypatch.setattr(module, "latent_config", lambda *shape: config)
    check(replace(SMALL, num_heads=24), case([130, 0, 31, 90], [1, 1, 1, 6], 16, 1, 1, 1), dtype)


def test_many_splits_are_merged_in_several_goes(monkeypatch):
    config = LatentConfig(LOW, 40, 1)
    monkeypatch.setattr(module, "latent_config", lambda *shape: config)
    check(SMALL, case([1200], [1], 16))


def test_many_rows_find_their_tiles():
    """More rows than are looked through at once; some of one token, where any number may be."""
    geometry = replace(SMALL, num_heads=3, latent_dim=16)
    check(geometry, case([3] * 131, [2] + [1] * 130, 16, padded_rows=5))


def test_angles_that_depend_on_the_context():
    rope = Rope(SMALL.rope_dim, by_token=True)
    check(SMALL, case([40, 3, 7, 0], [1, 1, 5, 3], 16, 1, 1, 2), rope=rope)


def test_step_replayed_at_other_lengths():
    """Only tensors of the batch change, as when a graph is replayed."""
    attention = TritonPagedLatentAttention(SMALL)
    wide = case([500, 500, 0], [1, 1, 64], 16)
    attention.prepare(wide.padded, Rope(SMALL.rope_dim), FP16)
    for past, new in (([0, 90, 30], [1, 1, 50]), ([499, 3, 7], [1, 1, 2])):
        other = case(past, new, 16)
        tables = torch.full((3, wide.padded.block_tables.shape[1]), 1 << 30, dtype=torch.int32)
        tables[:, : other.padded.block_tables.shape[1]] = other.padded.block_tables
        other.padded = replace(other.padded, block_tables=tables)
        check(SMALL, other, attention=attention)


def test_rows_with_drafts(monkeypatch):
    """Rows of three tokens as rows of equally many, as verifying drafts will, in splits."""
    monkeypatch.setattr(
        TritonPagedLatentAttention,
        "rows_of",
        staticmethod(lambda batch, tokens: [module.Rows(0, 3, 9, even=True)]),
    )
    config = LatentConfig(LOW, 4, 1)
    monkeypatch.setattr(module, "latent_config", lambda *shape: config)
    check(replace(SMALL, num_heads=6), case([0, 150, 31], [3, 3, 3], 16))


@pytest.mark.parametrize("heads", (1, 16, 24, 128))
@pytest.mark.parametrize("rows", (1, 8, 64, 500))
@pytest.mark.parametrize("context", (16, 8192))
def test_partial_results_fit_the_workspace(heads, rows, context):
    geometry = MLAGeometry(heads, 512, 64, 128, 128, 0.1)
    for even, tokens in ((True, rows), (False, rows), (False, 40 * rows)):
        config = configs.latent_config(geometry, rows, tokens, even, context, True)
        parts = configs.query_tiles(geometry, rows, tokens, even, config.tiles.rows) * config.splits
        assert config.splits == 1 or 4 * parts * config.tiles.rows * 512 <= configs.WORKSPACE_BYTES


@pytest.mark.parametrize("block_size", (8, 48))
def test_refuses_other_block_sizes(block_size):
    with pytest.raises(ValueError, match="power of two"):
        TritonPagedLatentAttention(SMALL).kv_shape(10, block_size)


def test_refuses_wider_latents():
    with pytest.raises(ValueError, match="512 at most"):
        TritonPagedLatentAttention(replace(SMALL, latent_dim=576))


def test_refuses_a_cache_of_another_dtype():
    attention, batch = TritonPagedLatentAttention(SMALL), case([0], [1], 16)
    cache = torch.zeros(attention.kv_shape(4, 16), dtype=torch.float8_e4m3fn)
    state = attention.prepare(batch.padded, Rope(SMALL.rope_dim), FP16)
    with pytest.raises(ValueError, match="float8"):
        attention(*inputs(SMALL, 1, FP16), cache, state, *ups(SMALL, FP16))
