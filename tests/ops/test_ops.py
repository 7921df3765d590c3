"""Every version of every operation against its definition in FP64, on random inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry, TorchPagedAttention, copy_blocks
from octavo.ops.cpu import linear as cpu_linear
from octavo.ops.cpu.attention import CPUPagedAttention
from tests.ops.attention_batches import Columns
from tests.ops.attention_batches import columns as batch_columns
from tests.ops.comparing import assert_close, randn

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((7, 576), (576,), (576,))
RUNS_ANYWHERE = {"cpu-amx"}  # chosen only where it is faster


def cases(op: str):
    """What runs on a CPU. The Triton versions have files of their own (test_triton_*.py)."""
    return [
        pytest.param(version, dtype, id=f"{version.name}-{str(dtype)[6:]}")
        for version in registry.versions(op)
        for dtype in DTYPES
        if version.available("cpu", dtype) or version.name in RUNS_ANYWHERE
    ]


@pytest.mark.parametrize("rows", (1, 7, 130))
@pytest.mark.parametrize(("version", "dtype"), cases("rms_norm"))
def test_rms_norm(version, dtype, rows):
    x, weight = randn(rows, 576).to(dtype), randn(576, seed=1).to(dtype)
    expected = registry.versions("rms_norm")[0].call(x.double(), weight.double(), 1e-5)
    assert_close(version.call(x, weight, 1e-5), expected, version, dtype)


@pytest.mark.parametrize(("version", "dtype"), cases("layer_norm"))
def test_layer_norm(version, dtype):
    x, weight, bias = ((randn(*shape, seed=s) + 1).to(dtype) for s, shape in enumerate(SHAPES))
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * weight.double() + bias.double()
    assert_close(version.call(x, weight, bias, 1e-5), expected, version, dtype)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
    "gelu_tanh": lambda x: x * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh()) / 2,
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("version", "dtype"), cases("activate"))
def test_activate(version, dtype, kind, gated):
    x = (randn(7, 90) * 3).to(dtype)
    gate, up = x.double().chunk(2, -1) if gated else (x.double(), 1)
    expected = ACTIVATIONS[kind](gate) * up
    assert_close(version.call(x, kind, gated), expected, version, dtype)


@pytest.mark.parametrize("summed", (False, True))
@pytest.mark.parametrize(("version", "dtype"), cases("add_scaled"))
def test_add_scaled(version, dtype, summed):
    x, other = randn(7, 90).to(dtype), randn(7, 90, seed=1).to(dtype)
    expected = (x.double() if summed else 0) + 0.22 * other.double()
    found = version.call(x.clone() if summed else None, other.clone(), 0.22)
    assert_close(found, expected, version, dtype)


@pytest.mark.parametrize(("version", "dtype"), cases("soft_cap")[::2])
def test_soft_cap(version, dtype):
    x = randn(7, 90).float() * 30
    expected = 20 * (x.double() / 20).tanh()
    assert_close(version.call(x.clone(), 20.0), expected, version, dtype)


@pytest.mark.parametrize("op", ("activate", "soft_cap", "layer_norm"))
def test_a_row_is_the_same_in_any_batch(op):
    """Rows of an odd size, and so many that threads share them."""
    version = registry.runnable(op, "cpu", torch.float32, deterministic=True)[-1]
    further = {"activate": ("gelu_tanh", False), "soft_cap": (20.0,)}
    arguments = further.get(op, (randn(333, seed=1), randn(333, seed=2), 1e-5))
    x = randn(1000, 333).float()
    arguments = [a.float() if isinstance(a, torch.Tensor) else a for a in arguments]
    whole = version.call(x.clone(), *arguments)
    for part in (slice(0, 1), slice(5, 9), slice(300, 999)):
        assert torch.equal(version.call(x[part].clone(), *arguments), whole[part])


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("epilogue", ("none", "add", "silu_mul"))
@pytest.mark.parametrize("rows", (1, 5, 64, 200))
@pytest.mark.parametrize(("version", "dtype"), cases("linear"))
def test_linear(version, dtype, rows, epilogue, bias):
    x = randn(rows, 96).to(dtype)
    weights = [(randn(80, 96, seed=s) / 10).to(dtype) for s in (1, 2)]
    shift = randn(160, seed=3).to(dtype) if bias else None
    other = randn(rows, 160, seed=4).to(dtype) if epilogue == "add" else None
    wide = registry.versions("linear")[0].call(
        [w.double() for w in weights], shift.double() if bias else None, epilogue
    )
    expected = wide(x.double(), None if other is None else other.double())
    assert_close(version.call(weights, shift, epilogue)(x, other), expected, version, dtype)


@pytest.mark.parametrize(("version", "dtype"), cases("linear"))
def test_logits_near_the_largest_are_exact_in_fp32(version, dtype):
    x, weight = (randn(5, 96) * 8).to(dtype), randn(400, 96, seed=1).to(dtype)
    found = version.call([weight], None, "logits")(x)
    exact = x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert_close(found, exact, version, dtype)
    leading = exact >= exact.amax(-1, keepdim=True) - 0.5
    assert (found - exact).abs()[leading].max() <= 1e-3
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize(("version", "dtype"), cases("linear"))
def test_flat_logits_take_no_more_memory_than_others(version, dtype, monkeypatch):
    monkeypatch.setattr(cpu_linear, "_GATHERED_BYTES", 4 * 96 * 100)
    largest = 0
    vecdot = torch.linalg.vecdot

    def spy(left, right):
        nonlocal largest
        largest = max(largest, len(right))
        return vecdot(left, right)

    monkeypatch.setattr(torch.linalg, "vecdot", spy)
    x, weight = (randn(5, 96) / 100).to(dtype), randn(400, 96, seed=1).to(dtype) / 100
    found = version.call([weight], None, "logits")(x)
    assert (found - x.double() @ weight.double().T).abs().max() <= 1e-6
    assert largest <= 100


def columns(past: list[int], new: list[int], tables: torch.Tensor, block_size: int) -> Columns:
    """Row i has ``past[i]`` tokens in the cache and brings ``new[i]``; decode rows come first."""
    decode = next((i for i, n in enumerate(new) if n != 1), len(new))
    return batch_columns(past, new, tables, block_size, decode)


def rope(geometry: AttentionGeometry):
    exponents = torch.arange(0, geometry.head_dim, 2) / geometry.head_dim

    def tables(positions, lengths):
        angles = positions[:, None] * 10000.0**-exponents
        return angles.cos(), angles.sin()

    return tables


STEPS = [  # (tokens each row brings) for rows of one life: prefill, chunks, decode, mixed
    [5, 40, 150, 3],
    [1, 1, 20, 9],
    [1, 1, 1, 140],
    [1, 1, 1, 1],
    [1, 1, 1, 1],
]

GEOMETRIES = {
    "mha-64": AttentionGeometry(4, 4, 64),
    "gqa3-64": AttentionGeometry(9, 3, 64),
    "gqa4-80-norm": AttentionGeometry(8, 2, 80, qk_norm_eps=1e-6),
    "gqa7-96": AttentionGeometry(7, 1, 96),
    "gqa2-128-window": AttentionGeometry(4, 2, 128, window=33),
    "gqa2-16-window-wide": AttentionGeometry(4, 2, 16, window=170),
    "gqa2-24-softcap-scale": AttentionGeometry(4, 2, 24, softcap=2.0, own_scale=0.4),
    "mha-32-softcap-window": AttentionGeometry(2, 2, 32, softcap=1.5, window=33),
}
# With blocks of 8 tokens, too: which blocks are read depends on a window and on nothing else.
SMALL_BLOCKS = ("gqa3-64", "gqa2-128-window")


@pytest.mark.parametrize(
    ("geometry", "block_size"),
    [
        *(pytest.param(geometry, 16, id=f"{name}-16") for name, geometry in GEOMETRIES.items()),
        *(pytest.param(GEOMETRIES[name], 8, id=f"{name}-8") for name in SMALL_BLOCKS),
    ],
)
@pytest.mark.parametrize(("version", "dtype"), cases("paged_attention"))
def test_paged_attention(version, dtype, geometry, block_size):
    """Over the steps of four rows' lives, with shuffled blocks; each version has its own cache."""
    generator = torch.Generator().manual_seed(7)
    width = -(-256 // block_size)
    tables = torch.randperm(4 * width, generator=generator).view(4, width).int()
    tested, exact = version.call(geometry), TorchPagedAttention(geometry)
    cache = torch.zeros(tested.kv_shape(4 * width, block_size), dtype=dtype)
    wide_cache = torch.zeros(exact.kv_shape(4 * width, block_size), dtype=torch.float64)
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    weight = None
    if geometry.qk_norm_eps is not None:
        weight = randn(heads - geometry.num_kv_heads, geometry.head_dim, seed=3).to(dtype)
    past = [0, 0, 0, 0]
    for index, new in enumerate(STEPS):
        batch = columns(past, new, tables, block_size)
        qkv = randn(sum(new), heads * geometry.head_dim, seed=index).to(dtype)
        wide_weight = None if weight is None else weight.double()
        state = exact.prepare(batch, rope(geometry), torch.float64)
        expected = exact(qkv.double(), wide_cache, state, wide_weight)
        state = tested.prepare(batch, rope(geometry), dtype)
        found = tested(qkv.clone(), cache, state, weight)
        assert_close(found, expected, version, dtype)
        past = [p + n for p, n in zip(past, new)]


def test_definition_of_attention_equals_torchs_own():
    geometry = AttentionGeometry(6, 2, 32)
    batch = columns([0], [50], torch.arange(4)[None].int(), 16)
    qkv = randn(50, 10 * 32)
    attention = TorchPagedAttention(geometry)
    still = replace(batch, positions=torch.zeros(50, dtype=torch.int64))  # no rotation

    def no_rope(positions, lengths):
        return torch.ones(len(positions), 16), torch.zeros(len(positions), 16)

    assert still.positions.sum() == 0
    cache = torch.zeros(attention.kv_shape(4, 16), dtype=torch.float64)
    found = attention(qkv, cache, attention.prepare(batch, no_rope, torch.float64))
    query, key, value = qkv.view(1, 50, 10, 32).transpose(1, 2).split((6, 2, 2), dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2).reshape(50, -1))


def test_definition_of_softcap_and_sinks():
    """One head, no rotation: written out for the last token."""
    geometry = AttentionGeometry(1, 1, 16, softcap=0.5)
    batch = columns([0], [9], torch.zeros(1, 1).int(), 16)
    qkv, sink = randn(9, 48), torch.tensor([0.7], dtype=torch.float64)

    def no_rope(positions, lengths):
        return torch.ones(len(positions), 8), torch.zeros(len(positions), 8)

    attention = TorchPagedAttention(geometry)
    cache = torch.zeros(attention.kv_shape(1, 16), dtype=torch.float64)
    state = attention.prepare(batch, no_rope, torch.float64)
    found = attention(qkv, cache, state, sinks=sink)[-1]
    query, key, value = qkv[-1, :16], qkv[:, 16:32], qkv[:, 32:]
    weights = (0.5 * torch.tanh(key @ query / 4 / 0.5)).exp()
    torch.testing.assert_close(found, weights @ value / (weights.sum() + sink.exp()))


@pytest.mark.parametrize(
    ("dtype", "bound"), ((torch.float8_e4m3fn, 0.04), (torch.float8_e5m2, 0.08), (torch.int8, 0.01))
)
def test_definition_keeps_keys_and_values_in_8_bits(dtype, bound):
    scales = None if dtype == torch.int8 else torch.tensor([[0.5], [0.01]])
    batch = columns([0], [9], torch.zeros(1, 1).int(), 16)
    qkv = randn(9, 64)
    results = []
    for kept_in in (None, dtype):
        geometry = AttentionGeometry(2, 1, 16, cache_dtype=kept_in)
        attention = TorchPagedAttention(geometry)
        cache = torch.zeros(attention.kv_shape(1, 16), dtype=torch.float64)
        state = attention.prepare(batch, rope(geometry), torch.float64)
        results.append((attention(qkv, cache, state, kv_scales=scales), cache[0, :9]))
    (exact, kept), (found, stored) = results
    assert 0 < (stored - kept).norm() / kept.norm() < bound
    assert 0 < (found - exact).norm() / exact.norm() < bound
    if scales is not None:
        codes = stored / scales.double()[:, :, None]
        assert torch.equal(codes.to(dtype).double(), codes)
        largest = torch.finfo(dtype).max
        attention(1e6 * qkv, cache, state, kv_scales=scales)
        assert (cache[0, :9] / scales.double()[:, :, None]).abs().max() == largest


def test_the_cpu_version_refuses_what_it_does_not_do():
    attention = CPUPagedAttention(AttentionGeometry(2, 1, 16))
    batch = columns([0], [9], torch.zeros(1, 1).int(), 16)
    state = attention.prepare(batch, rope(attention.geometry), torch.float32)
    cache = torch.zeros(attention.kv_shape(1, 16))
    with pytest.raises(ValueError, match="sinks"):
        attention(torch.randn(9, 64), cache, state, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="8 bits"):
        attention(torch.randn(9, 64), cache.to(torch.float8_e4m3fn), state)
    with pytest.raises(ValueError, match="8 bits"):
        CPUPagedAttention(AttentionGeometry(2, 1, 16, cache_dtype=torch.int8))


@pytest.mark.parametrize(("version", "dtype"), cases("paged_attention"))
def test_attention_ignores_what_other_blocks_hold(version, dtype):
    """Places past a row's end and other rows' blocks have no influence."""
    attention = version.call(AttentionGeometry(4, 2, 16))
    tables = torch.arange(8).view(2, 4).int()
    results = []
    for filler in (0.0, 100.0):
        cache = torch.full(attention.kv_shape(8, 16), filler, dtype=dtype)
        for past, new in (([0, 0], [20, 7]), ([20, 7], [1, 1])):
            batch = columns(past, new, tables, 16)
            state = attention.prepare(batch, rope(attention.geometry), dtype)
            results.append(attention(randn(sum(new), 8 * 16).to(dtype), cache, state))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_long_decode_rows_are_gathered_in_bounded_groups(monkeypatch):
    """More groups, the same answer."""
    from octavo.ops.cpu import attention as module

    geometry = AttentionGeometry(4, 2, 16)
    tables = torch.randperm(60, generator=torch.Generator().manual_seed(5)).view(6, 10).int()
    batch = columns([100, 3, 159, 40, 150, 90], [1] * 6, tables, 16)
    qkv = randn(6, 8 * 16).float()
    filled = randn(60, 2, 2, 16, 16, seed=1).float()
    results, counts = [], []
    for limit in (16384, 320):
        monkeypatch.setattr(module, "GROUP_PLACES", limit)
        attention = module.CPUPagedAttention(geometry)
        state = attention.prepare(batch, rope(geometry), torch.float32)
        counts.append(len(state.groups))
        assert all(group.keys.rows * group.places <= limit for group in state.groups)
        results.append(attention(qkv.clone(), filled.clone(), state))
    assert counts[0] < counts[1]
    torch.testing.assert_close(results[0], results[1])


def test_copy_blocks_copies_in_every_layer():
    caches = [torch.arange(5.0).view(5, 1, 1), 10 * torch.arange(5.0).view(5, 1)]
    copy_blocks(caches, torch.tensor([[1, 2], [3, 0]]))
    assert [cache.flatten().tolist() for cache in caches] == [[3, 1, 1, 3, 4], [30, 10, 10, 30, 40]]


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
def test_copy_blocks_copies_8_bits_as_they_are(dtype):
    bits = torch.arange(256).to(torch.uint8).view(4, 2, 32)
    cache = bits.clone().view(dtype)
    copy_blocks([cache], torch.tensor([[3, 0]]))
    assert torch.equal(cache.view(torch.uint8), bits[[3, 1, 2, 3]])


def test_select_prefers_the_last_version_that_runs():
    assert registry.select("linear", "cpu", torch.float16).name == "torch"
    names = [v.name for v in registry.versions("linear") if v.available("cpu", torch.bfloat16)]
    assert registry.select("linear", "cpu", torch.bfloat16).name == names[-1]
