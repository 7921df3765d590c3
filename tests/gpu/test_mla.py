"""Multi-head latent attention on a GPU at real sizes, against keys and values of every head, as
the papers write it, in FP32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.ops import registry
from octavo.ops.mla import MLAGeometry
from tests.gpu.test_attention import lengths, refill
from tests.ops.attention_batches import Case, Rope, case
from tests.ops.latent_batches import inputs, latent_history, ups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
LONGEST = 33_100
DEEPSEEK = MLAGeometry(128, 512, 64, 128, 128, 192**-0.5, interleaved=True)
LITE = replace(DEEPSEEK, num_heads=16)
GEOMETRIES = {
    "128": DEEPSEEK,
    "16": LITE,
    "32": replace(DEEPSEEK, num_heads=32, interleaved=False),
    "40-of-256": MLAGeometry(40, 256, 32, 64, 64, 96**-0.5),
    "20-of-384": MLAGeometry(20, 384, 64, 96, 80, 160**-0.5),
}


def made(geometry: MLAGeometry):
    version = registry.select("paged_latent_attention", "cuda", BF16)
    assert version.name == "triton"
    return version.call(geometry)


def turned(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x: [m, heads, d], FP32, its pairs as complex numbers."""
    half = x.shape[-1] // 2
    angles = positions.to(DEVICE)[:, None] * 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    number = torch.view_as_complex(pairs.contiguous())
    number = number * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(number)
    return (pairs if interleaved else pairs.mT).flatten(-2)


def expected_of(
    geometry: MLAGeometry, case: Case, q: Tensor, kv: Tensor, before: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Outputs, and what is cached of the new tokens, FP32."""
    plain, latent_dim = case.plain, geometry.latent_dim
    key_up, value_up = (weight.float() for weight in weights)
    nope, rope = q.float().split((geometry.nope_dim, geometry.rope_dim), dim=2)
    query = torch.cat((nope, turned(rope, plain.positions, geometry.interleaved)), dim=2)
    latent, shared = kv.float().split((latent_dim, geometry.rope_dim), dim=1)
    shared = turned(shared[:, None], plain.positions, geometry.interleaved)[:, 0]
    new = torch.cat((latent, shared), dim=1)
    out = q.new_empty(len(q), geometry.num_heads, geometry.value_dim, dtype=torch.float32)
    starts, positions = plain.query_starts.tolist(), plain.positions.to(DEVICE)
    for row, length in enumerate(plain.seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        past = length - (end - start)
        blocks = plain.block_tables[row, : -(-past // plain.block_size)].long().to(DEVICE)
        cached = torch.cat((before[blocks].flatten(0, 1)[:past].float(), new[start:end]))
        keys = torch.cat(
            (
                cached[:, :latent_dim] @ key_up.mT,  # [heads, length, nope]
                cached[:, latent_dim:].expand(geometry.num_heads, -1, -1),
            ),
            dim=2,
        )
        values = cached[:, :latent_dim] @ value_up
        for low in range(start, end, 64):
            high = min(low + 64, end)
            scores = query[low:high].transpose(0, 1) @ keys.mT * geometry.scale
            unseen = positions[low:high, None] < torch.arange(length, device=DEVICE)
            found = scores.masked_fill_(unseen, float("-inf")).softmax(-1) @ values
            out[low:high] = found.transpose(0, 1)
    return out.flatten(1), new


def poisoned(case: Case, real: Tensor) -> Tensor:
    """Of the padded batch: NaN where it is padding."""
    padded = real.new_full((len(case.padded.positions), *real.shape[1:]), float("nan"))
    padded[case.real.to(DEVICE)] = real
    return padded


def assert_right(
    geometry: MLAGeometry,
    case: Case,
    found: Tensor,
    cache: Tensor,
    before: Tensor,
    given: list[Tensor],
    weights: list[Tensor],
) -> None:
    real, dtype, plain = case.real.to(DEVICE), found.dtype, case.plain
    out, new = expected_of(geometry, case, *given, before, weights)
    error = (found[real].float() - out).norm() / out.norm()
    assert error <= (0.01 if dtype == BF16 else 0.002), f"relative error {error:.4f}"
    largest = (found[real].float() - out).abs().max() / out.abs().max()
    assert largest <= 8 * torch.finfo(dtype).eps, f"largest error {largest:.4f}"
    padding = torch.ones(len(found), dtype=torch.bool, device=DEVICE)
    padding[real] = False
    assert not found[padding].any()
    slots = plain.slot_mapping.to(DEVICE)
    written = cache.flatten(0, 1)[slots].float()
    assert (written - new).norm() / new.norm() <= 0.005
    rest = cache.clone()
    rest.flatten(0, 1)[slots] = before.flatten(0, 1)[slots]
    assert torch.equal(rest.view(torch.int16), before.view(torch.int16))


def check(geometry: MLAGeometry, case: Case, dtype: torch.dtype = BF16, attention=None) -> None:
    attention = attention or made(geometry)
    before = latent_history(geometry, case, dtype, DEVICE)
    cache = before.clone()
    given = list(inputs(geometry, len(case.real), dtype, DEVICE))
    weights = list(ups(geometry, dtype, DEVICE))
    state = attention.prepare(case.padded.to(DEVICE), Rope(geometry.rope_dim, LONGEST), dtype)
    found = attention(*(poisoned(case, x) for x in given), cache, state, *weights)
    assert_right(geometry, case, found, cache, before, given, weights)


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    ((DEEPSEEK, BF16), (LITE, BF16), (DEEPSEEK, FP16)),
    ids=("128", "16", "128-fp16"),
)
@pytest.mark.parametrize(
    ("rows", "longest"), ((1, 1), (1, 130), (1, 33_000), (8, 8_000), (64, 4_000), (300, 1_000))
)
def test_one_token_a_row(rows, longest, geometry, dtype):
    past = [length - 1 for length in lengths(rows, longest)]
    check(geometry, case(past, [1] * rows, 64, padded_decode=rows // 8), dtype)


@pytest.mark.parametrize(
    ("name", "block_size"),
    (
        ("128", 64),
        ("128", 16),
        ("16", 128),
        ("32", 64),
        ("40-of-256", 64),
        ("20-of-384", 16),
    ),
)
def test_mixed_batch(name, block_size):
    geometry = GEOMETRIES[name]
    past = [*lengths(12, 3_000), 0, 40, 2_000, 0, 3_000]
    new = [1] * 12 + [200, 2, 129, 500, 64]
    check(geometry, case(past, new, block_size, 4, 3, 50))


@pytest.mark.parametrize(("past", "new"), (([0], [2_048]), ([12_000], [512]), ([16_000], [3])))
@pytest.mark.parametrize("geometry", (DEEPSEEK, LITE), ids=("128", "16"))
def test_several_tokens_a_row(geometry, past, new):
    check(geometry, case(past, new, 64))


def test_many_short_rows():
    new = [1 + i % 5 for i in range(300)]
    check(LITE, case([i * 3 for i in range(300)], sorted(new), 64))


@pytest.mark.parametrize("geometry", (DEEPSEEK, LITE), ids=("128", "16"))
def test_rows_with_drafts(geometry, monkeypatch):
    """Rows of four tokens each, as verifying drafts will bring them."""
    from octavo.ops.triton.latent_attention import Rows

    attention = made(geometry)
    rows = Rows(0, 8, 32, even=True)
    monkeypatch.setattr(type(attention), "rows_of", staticmethod(lambda batch, tokens: [rows]))
    check(geometry, case(lengths(8, 8_000), [4] * 8, 64), attention=attention)


def replay(geometry: MLAGeometry, first: Case, later: list[Case]) -> None:
    """Captured at one set of lengths, replayed at others, some rows padding."""
    attention, rope = made(geometry), Rope(geometry.rope_dim, LONGEST)
    blocks = max(c.num_blocks for c in (first, *later))
    shape = attention.kv_shape(blocks, first.plain.block_size)
    cache = torch.zeros(shape, dtype=BF16, device=DEVICE)
    static, tokens = first.padded.to(DEVICE), len(first.padded.positions)
    q, kv = inputs(geometry, tokens, BF16, DEVICE)
    weights = list(ups(geometry, BF16, DEVICE))

    def step() -> Tensor:
        return attention(q, kv, cache, attention.prepare(static, rope, BF16), *weights)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for other in (*later, first):
        assert len(other.padded.positions) == tokens
        before = latent_history(geometry, other, BF16, DEVICE)
        refill(static, other.padded.to(DEVICE))
        given = list(inputs(geometry, len(other.real), BF16, DEVICE))
        used = cache[: len(before)]
        used.copy_(before)
        q.copy_(poisoned(other, given[0]))
        kv.copy_(poisoned(other, given[1]))
        out.fill_(float("nan"))
        graph.replay()
        assert_right(geometry, other, out, used, before, given, weights)


@pytest.mark.parametrize("geometry", (DEEPSEEK, LITE), ids=("128", "16"))
@pytest.mark.parametrize("rows", (1, 8, 64))
def test_captured_decode_step_serves_any_lengths(geometry, rows):
    first, real = case([3_000] * rows, [1] * rows, 64), rows - rows // 4
    later = [
        case([n - 1 for n in lengths(real, longest, seed)], [1] * real, 64,
             padded_decode=rows // 4, seed=seed)
        for seed, longest in ((1, 40), (2, 1_000), (3, 3_000))
    ]  # fmt: skip
    replay(geometry, first, later)


def test_captured_mixed_step_serves_any_lengths():
    first = case([500] * 6 + [4_000, 0], [1] * 6 + [200, 112], 64)
    later = [
        case([9, 3, 77, 1_000, 2_000, 0, 3_900, 0], [1] * 6 + [300, 12], 64, seed=1),
        case([9, 3, 77, 0], [1] * 3 + [150], 64, padded_decode=3, padded_rows=1,
             padded_tokens=162, seed=2),
    ]  # fmt: skip
    replay(DEEPSEEK, first, later)


def test_equal_inputs_give_equal_bits():
    """Splits are merged in one order."""
    batch = case([20_000, 300, 5_000], [1] * 3, 64)
    attention = made(DEEPSEEK)
    cache = latent_history(DEEPSEEK, batch, BF16, DEVICE)
    given = [*inputs(DEEPSEEK, 3, BF16, DEVICE), cache]
    weights = ups(DEEPSEEK, BF16, DEVICE)
    state = attention.prepare(batch.padded.to(DEVICE), Rope(64, LONGEST), BF16)
    first = attention(*given, state, *weights)
    for _ in range(20):
        assert torch.equal(attention(*given, state, *weights), first)
