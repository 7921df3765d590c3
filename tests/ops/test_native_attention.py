"""The attention kernels of csrc/, each that runs on this CPU: what tests/ops/test_ops.py does not
ask of every version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry, TorchPagedAttention
from octavo.ops.native import attention as module
from octavo.ops.native import library
from octavo.ops.native.attention import NativePagedAttention
from octavo.ops.native.library import features
from tests.ops.attention_batches import Rope, columns
from tests.ops.batch_invariance import assert_tokens_alike
from tests.ops.comparing import assert_close, randn
from tests.ops.emulated_tiles import EMULATED_ATTENTION as EMULATED

(VERSION,) = (v for v in registry.versions("paged_attention") if v.name == "native")
BF16 = torch.bfloat16
KERNELS = [
    pytest.param((dtype, needed, name), id=name.removeprefix("octavo_attention_"))
    for dtype, kernels in {**module.KERNELS, BF16: (*module.KERNELS[BF16], EMULATED)}.items()
    for needed, name in kernels
    if needed in features()
]
if not KERNELS:
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)


@pytest.fixture(params=KERNELS)
def dtype(request, monkeypatch):
    """Of a kernel, which is the one that runs; but for AMX's with other head sizes than its own."""
    dtype, needed, name = request.param
    kernels = [(needed, name)]
    if "amx" in name:
        monkeypatch.setattr(module, "AMX", name)
        kernels.append((needed, "octavo_attention_bf16_avx512bf16"))
    monkeypatch.setattr(library, "features", lambda: needed)
    monkeypatch.setattr(module, "KERNELS", {dtype: tuple(kernels)})
    return dtype


@pytest.fixture(params=(1, 3))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def heads_of(geometry: AttentionGeometry) -> int:
    return geometry.num_heads + 2 * geometry.num_kv_heads


def weight_of(geometry: AttentionGeometry, dtype: torch.dtype) -> torch.Tensor | None:
    if geometry.qk_norm_eps is None:
        return None
    rows = geometry.num_heads + geometry.num_kv_heads
    return randn(rows, geometry.head_dim, seed=3).to(dtype)


def check_lives(
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    block_size: int,
    steps: list[list[int]],
    sinks: torch.Tensor | None = None,
) -> None:
    """Rows that bring so many tokens in each step, against the definition in FP64. What no token
    has been written to is NaN."""
    count, longest = len(steps[0]), max(sum(row) for row in zip(*steps))
    width = -(-longest // block_size)
    order = torch.randperm(count * width, generator=torch.Generator().manual_seed(5))
    tables = order.int().view(count, width)
    tested, exact = NativePagedAttention(geometry), TorchPagedAttention(geometry)
    cache = torch.full(tested.kv_shape(len(order), block_size), float("nan"), dtype=dtype)
    wide_cache = torch.zeros(exact.kv_shape(len(order), block_size), dtype=torch.float64)
    rope, weight = Rope(geometry.head_dim), weight_of(geometry, dtype)
    past = [0] * count
    for index, new in enumerate(steps):
        decode = next((i for i, n in enumerate(new) if n != 1), count)
        batch = columns(past, new, tables, block_size, decode)
        qkv = randn(sum(new), heads_of(geometry) * geometry.head_dim, seed=index).to(dtype)
        expected = exact(
            qkv.double(),
            wide_cache,
            exact.prepare(batch, rope, torch.float64),
            None if weight is None else weight.double(),
            None if sinks is None else sinks.double(),
        )
        found = tested(qkv, cache, tested.prepare(batch, rope, dtype), weight, sinks)
        assert_close(found, expected, VERSION, dtype)
        past = [p + n for p, n in zip(past, new)]


GEOMETRIES = {
    "dim 8": AttentionGeometry(2, 1, 8),
    "dim 24, group 5": AttentionGeometry(5, 1, 24, qk_norm_eps=1e-6),
    "dim 66, window": AttentionGeometry(2, 2, 66, window=20),
    "dim 256, softcap": AttentionGeometry(4, 2, 256, window=40, softcap=3.0),
    "group of 71": AttentionGeometry(71, 1, 64),
}


@pytest.mark.parametrize("block_size", (1, 5, 8, 16, 40))
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_any_geometry_and_block_size(dtype, geometry, block_size):
    check_lives(geometry, dtype, block_size, [[9, 30, 61], [1, 1, 12], [1, 1, 1]])


LONG = {
    "all": AttentionGeometry(3, 1, 32),
    "window": AttentionGeometry(4, 2, 16, window=700),
    "softcap": AttentionGeometry(2, 1, 16, softcap=20.0),
}


@pytest.mark.parametrize("block_size", (8, 32))
@pytest.mark.parametrize("geometry", LONG.values(), ids=LONG)
def test_contexts_of_several_pieces(dtype, geometry, block_size, threads):
    check_lives(geometry, dtype, block_size, [[1030, 500], [1, 80], [1, 1]])


@pytest.mark.parametrize("softcap", (None, 5.0))
def test_sinks(dtype, softcap):
    geometry = AttentionGeometry(8, 2, 64, window=600, softcap=softcap)
    sinks = torch.linspace(-4, 6, 8)
    check_lives(geometry, dtype, 16, [[700, 3], [1, 1], [1, 17]], sinks)
    check_lives(geometry, dtype, 16, [[20, 3]], sinks.to(dtype))


def test_scores_far_from_zero(dtype):
    """Keys in the thousands: one weight is 1, the others are 0 or nearly."""
    geometry = AttentionGeometry(2, 1, 32)
    attention, exact = NativePagedAttention(geometry), TorchPagedAttention(geometry)
    batch = columns([0], [600], torch.arange(38)[None].int(), 16, 0)
    qkv = randn(600, 4 * 32).to(dtype)
    qkv[:, 64:96] *= 1000
    cache = torch.zeros(attention.kv_shape(38, 16), dtype=dtype)
    wide_cache = torch.zeros(exact.kv_shape(38, 16), dtype=torch.float64)

    def no_rope(positions, lengths):
        return torch.ones(len(positions), 16), torch.zeros(len(positions), 16)

    state = exact.prepare(batch, no_rope, torch.float64)
    expected = exact(qkv.double(), wide_cache, state)
    found = attention(qkv, cache, attention.prepare(batch, no_rope, dtype))
    error = (found.double() - expected).abs().amax(1)
    assert error.median() <= 2 * torch.finfo(dtype).eps
    assert found.isfinite().all()


def test_what_is_no_number_shows_where_it_is_seen(dtype):
    """A NaN in a key: in the tokens after it, in no other row."""
    attention = NativePagedAttention(AttentionGeometry(2, 1, 32))
    batch = columns([0, 0], [600, 9], torch.arange(76).view(2, 38).int(), 16, 0)
    qkv = randn(609, 4 * 32).to(dtype)
    qkv[530, 64] = float("nan")
    cache = torch.zeros(attention.kv_shape(76, 16), dtype=dtype)
    found = attention(qkv, cache, attention.prepare(batch, Rope(32), dtype))
    assert found[:530].isfinite().all() and found[600:].isfinite().all()
    assert found[530:600].isnan().all()


INVARIANT = {
    "gqa3-64": (AttentionGeometry(9, 3, 64), 16),
    "gqa7-80-norm": (AttentionGeometry(7, 1, 80, qk_norm_eps=1e-6), 8),
    "mha-24-window": (AttentionGeometry(2, 2, 24, window=550), 5),
}


@pytest.mark.parametrize(("geometry", "block_size"), INVARIANT.values(), ids=INVARIANT)
def test_a_token_attends_the_same_however_its_prompt_comes(dtype, geometry, block_size, threads):
    """Alone or among others, at once, in chunks or token by token, over the borders of pieces."""
    length = 1100
    rows = randn(4, length, heads_of(geometry) * geometry.head_dim).to(dtype)
    ways = (
        ([7] * 157 + [1], rows[:0]),
        ([1000] + [1] * 100, rows[1:2]),
        ([500, 13] + [1] * 5 + [582], rows[1:]),
    )
    weight = weight_of(geometry, dtype)
    assert_tokens_alike(NativePagedAttention(geometry), rows[0], weight, ways, block_size)


def test_results_do_not_depend_on_the_number_of_threads(dtype):
    geometry = AttentionGeometry(6, 2, 64)
    attention = NativePagedAttention(geometry)
    tables = torch.arange(300).view(3, 100).int()
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            cache = torch.full(attention.kv_shape(300, 16), float("nan"), dtype=dtype)
            for past, new in (([0, 0, 0], [1500, 1, 300]), ([1500, 1, 300], [1, 1, 1])):
                batch = columns(past, new, tables, 16, 0)
                qkv = randn(sum(new), 10 * 64, seed=sum(past)).to(dtype)
                state = attention.prepare(batch, Rope(64), dtype)
                results.append(attention(qkv, cache, state))
    finally:
        torch.set_num_threads(before)
    for part in (0, 1):
        assert results[part].isfinite().all()
        assert all(torch.equal(found, results[part]) for found in results[part::2])


ROUNDED = {
    "gqa3-64": (AttentionGeometry(9, 3, 64), 16),
    "dim 80, norm": (AttentionGeometry(4, 2, 80, qk_norm_eps=1e-6), 8),
    "dim 24, window": (AttentionGeometry(3, 1, 24, window=300, softcap=4.0), 5),
}
KINDS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def scales_of(geometry: AttentionGeometry) -> torch.Tensor | None:
    """Unlike for each head of keys and of values; FP8 has them."""
    if geometry.cache_dtype == torch.int8:
        return None
    count = 2 * geometry.num_kv_heads
    return torch.linspace(0.01, 0.3, count).view(2, geometry.num_kv_heads)


@kinds
@pytest.mark.parametrize(("geometry", "block_size"), ROUNDED.values(), ids=ROUNDED)
def test_a_cache_of_8_bits(dtype, geometry, block_size, kind):
    """Against the definition in FP64: now and then a number lies so close between two others that
    it is rounded to the other one, and moves what sees it by a part of 1 / 127, or of itself."""
    geometry = replace(geometry, cache_dtype=kind)
    scales = scales_of(geometry)
    tested, exact = NativePagedAttention(geometry), TorchPagedAttention(geometry)
    rope, weight = Rope(geometry.head_dim), weight_of(geometry, dtype)
    width = -(-701 // block_size)
    tables = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1))
    tables = tables.int().view(2, width)
    shape = tested.kv_shape(2 * width, block_size)
    cache = torch.full(shape, -1, dtype=torch.int8).view(kind)  # no numbers, nor scales
    wide_cache = torch.zeros(exact.kv_shape(2 * width, block_size), dtype=torch.float64)
    past, plain = [0, 0], NativePagedAttention(replace(geometry, cache_dtype=None))
    plain_cache = torch.zeros(plain.kv_shape(2 * width, block_size), dtype=dtype)
    for new in ([600, 5], [1, 100], [100, 1]):
        batch = columns(past, new, tables, block_size, new.index(1) if 1 in new[:1] else 0)
        qkv = randn(sum(new), heads_of(geometry) * geometry.head_dim, seed=new[0]).to(dtype)
        expected = exact(
            qkv.double(),
            wide_cache,
            exact.prepare(batch, rope, torch.float64),
            None if weight is None else weight.double(),
            kv_scales=scales,
        )
        unrounded = plain(qkv.clone(), plain_cache, plain.prepare(batch, rope, dtype), weight)
        found = tested(qkv, cache, tested.prepare(batch, rope, dtype), weight, None, scales)
        error, price = (found.double() - expected).abs(), (unrounded.double() - expected).abs()
        steps = 2 if dtype == BF16 else 16 if kind == torch.int8 else 256
        unit = steps * torch.finfo(dtype).eps
        assert error.mean() <= unit * expected.abs().mean()
        assert error.max() <= (0.02 if kind == torch.int8 else 0.1) * expected.abs().max()
        assert price.mean() > 2 * error.mean() or dtype == BF16  # rounding is what was compared
        past = [p + n for p, n in zip(past, new)]


@pytest.mark.parametrize("kind", (torch.int8, torch.float8_e4m3fn), ids=("int8", "e4m3"))
@pytest.mark.parametrize(("geometry", "block_size"), ROUNDED.values(), ids=ROUNDED)
def test_a_cache_of_8_bits_is_the_same_however_its_prompt_comes(dtype, geometry, block_size, kind):
    geometry = replace(geometry, cache_dtype=kind)
    length = 700
    rows = randn(3, length, heads_of(geometry) * geometry.head_dim).to(dtype)
    ways = (([7] * 100, rows[:0]), ([1] * 40 + [660], rows[1:]), ([512, 188], rows[1:]))
    weight = weight_of(geometry, dtype)
    assert_tokens_alike(NativePagedAttention(geometry), rows[0], weight, ways, block_size)


@pytest.mark.parametrize("kind", (torch.float8_e4m3fn, torch.float8_e5m2), ids=("e4m3", "e5m2"))
def test_numbers_are_kept_as_torch_rounds_them(dtype, kind):
    """Every number of FP8, those halfway between two and next to these, the largest and what is
    beyond, denormal ones, zeros, no number: what a token that sees itself alone gets back."""
    grid = torch.arange(256).to(torch.uint8).view(kind).float()
    grid = grid[grid.isfinite()].unique()
    middle = (grid[1:] + grid[:-1]) / 2
    near = [middle * (1 + side) for side in (-(2.0**-7), 0.0, 2.0**-7)]
    largest, least = grid[-1], grid[grid > 0][0]
    beyond = torch.stack((largest * 1.1, largest * 64, least / 2, least / 3, least / 1e9))
    values = torch.cat((grid, *near, beyond, -beyond, torch.tensor([float("nan")])))
    values = values.to(dtype).float()
    dim = 32
    values = torch.cat((values, values.new_zeros(-len(values) % dim))).view(-1, dim)
    attention = NativePagedAttention(AttentionGeometry(1, 1, dim, cache_dtype=kind))
    count = len(values)
    batch = columns([0] * count, [1] * count, torch.arange(count)[:, None].int(), 16, count)
    qkv = torch.cat((torch.zeros(count, 2 * dim), values), dim=1).to(dtype)
    cache = torch.zeros(attention.kv_shape(count, 16), dtype=kind)
    found = attention(qkv, cache, attention.prepare(batch, Rope(dim), dtype)).float()
    expected = values.clamp(-largest, largest).to(kind).float()
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 1
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_a_plan_grows_with_its_step(dtype):
    attention = NativePagedAttention(AttentionGeometry(8, 8, 16))
    batch = columns([0], [4000], torch.arange(250)[None].int(), 16, 0)
    state = attention.prepare(batch, Rope(16), dtype)
    assert state.step.num_tasks > 256
    assert state.step.num_tasks <= state.step.capacity


def test_refusals(dtype):
    with pytest.raises(ValueError, match="not 65"):
        NativePagedAttention(AttentionGeometry(2, 1, 65))
    with pytest.raises(ValueError, match="512"):
        NativePagedAttention(AttentionGeometry(2, 1, 514))
    attention = NativePagedAttention(AttentionGeometry(2, 1, 16))
    batch = columns([0], [9], torch.zeros(1, 1).int(), 16, 0)
    state = attention.prepare(batch, Rope(16), dtype)
    cache = torch.zeros(attention.kv_shape(1, 16))
    qkv = torch.randn(9, 64).to(dtype)
    with pytest.raises(ValueError, match="the cache must be"):
        attention(qkv, cache.to(torch.float8_e4m3fn), state)
    with pytest.raises(ValueError, match="prepared for"):
        attention(qkv.half(), cache.half(), state)


def test_kernels_are_chosen_by_what_the_cpu_has(monkeypatch):
    Features = type(features())
    monkeypatch.setattr(library, "features", lambda: Features(0))
    assert not module.available("cpu", torch.float32)
    monkeypatch.setattr(library, "features", lambda: Features.AVX2)
    assert module.kernel_name(torch.float32, 64) == "octavo_attention_f32_avx2"
    monkeypatch.setattr(library, "features", lambda: ~Features(0))
    assert module.kernel_name(torch.float32, 64) == "octavo_attention_f32_avx512"
    assert module.kernel_name(BF16, 64) == "octavo_attention_bf16_amx"
    assert module.kernel_name(BF16, 80) == "octavo_attention_bf16_avx512bf16"
    assert not module.available("cpu", torch.float16)
    assert not module.available("cuda", torch.float32)
