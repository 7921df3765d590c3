"""Paged attention on a GPU at real sizes, against attention written out in FP32."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry, kept
from tests.ops.attention_batches import (
    Case,
    Columns,
    Rope,
    by_head,
    case,
    history,
    keep,
    parts_of,
    read,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
LONGEST = 33_100
LLAMA = AttentionGeometry(32, 8, 128)
QWEN = AttentionGeometry(16, 8, 128, qk_norm_eps=1e-6)
GEOMETRIES = {
    "32/8-128": LLAMA,
    "16/8-128-norm": QWEN,
    "9/3-64": AttentionGeometry(9, 3, 64),
    "28/4-128-window": AttentionGeometry(28, 4, 128, window=1000),
    "8/8-80": AttentionGeometry(8, 8, 80),
    "32/32-96": AttentionGeometry(32, 32, 96),
    "16/1-192": AttentionGeometry(16, 1, 192),
    "8/4-256-window": AttentionGeometry(8, 4, 256, window=511),
    "20/1-64": AttentionGeometry(20, 1, 64),
}


def made(name: str) -> type:
    found = {v.name: v for v in registry.versions("paged_attention", "cuda")}
    if name not in found or not found[name].available("cuda", BF16):
        pytest.skip(f"{name} does not run here")
    return found[name].call


def normed(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x: [m, heads, d], as complex numbers (i, i + d/2); angles: [m, d / 2]."""
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half], x[..., half:])
    number = number * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((number.real, number.imag), dim=-1)


@dataclass
class Extras:
    """What ``PagedAttention.__call__`` gets beside the batch."""

    weight: Tensor | None = None
    sinks: Tensor | None = None
    scales: Tensor | None = None


def expected_of(
    geometry: AttentionGeometry, qkv: Tensor, before: Tensor, plain: Columns, extras: Extras
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, keys and values of the new tokens, FP32. before: [block, offset, k|v, head, d], what
    is kept stands for."""
    dim, hq, hkv = geometry.head_dim, geometry.num_heads, geometry.num_kv_heads
    heads = qkv.float().unflatten(1, (-1, dim))
    steps = torch.arange(dim // 2, device=DEVICE) / (dim // 2)
    angles = plain.positions.to(DEVICE)[:, None] * 10000.0**-steps
    qk = turned(normed(heads[:, : hq + hkv], extras.weight, geometry.qk_norm_eps), angles)
    query, key, value = qk[:, :hq], qk[:, hq:], heads[:, hq + hkv :]
    scales = (None, None) if extras.scales is None else extras.scales
    key, value = (kept(x, geometry.cache_dtype, scale) for x, scale in zip((key, value), scales))
    starts, lengths = plain.query_starts.tolist(), plain.seq_lens.tolist()
    out = torch.empty_like(query)
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        past = length - (end - start)
        blocks = plain.block_tables[row, : -(-past // plain.block_size)].long().to(DEVICE)
        old = before[blocks].flatten(0, 1)[:past].float()
        k = torch.cat((old[:, 0], key[start:end])).transpose(0, 1)
        v = torch.cat((old[:, 1], value[start:end])).transpose(0, 1)
        for low in range(start, end, 128):
            high = min(low + 128, end)
            q = query[low:high].transpose(0, 1).unflatten(0, (hkv, -1))  # [kv, group, m, d]
            scores = q @ k[:, None].transpose(2, 3) * geometry.scale
            if geometry.softcap is not None:
                scores = (scores / geometry.softcap).tanh() * geometry.softcap
            age = plain.positions[low:high, None].to(DEVICE) - torch.arange(length, device=DEVICE)
            gone = age < 0 if geometry.window is None else (age < 0) | (age >= geometry.window)
            scores.masked_fill_(gone, float("-inf"))
            total = scores.logsumexp(-1, keepdim=True)
            if extras.sinks is not None:
                total = total.logaddexp(extras.sinks.float().view(hkv, -1, 1, 1))
            weights = (scores - total).exp()
            out[low:high] = (weights @ v[:, None]).flatten(0, 1).transpose(0, 1)
    return out.flatten(1), key, value


def inputs(
    geometry: AttentionGeometry, case: Case, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """qkv of the padded batch, NaN where it is padding, and the weights of the q/k norm."""
    heads = geometry.num_heads + 2 * geometry.num_kv_heads
    generator = torch.Generator(DEVICE).manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    qkv = torch.full((len(case.padded.positions), heads * geometry.head_dim), float("nan"))
    qkv = qkv.to(DEVICE, dtype)
    qkv[case.real.to(DEVICE)] = randn(len(case.real), qkv.shape[1]).to(dtype)
    if geometry.qk_norm_eps is None:
        return qkv, None
    shape = (geometry.num_heads + geometry.num_kv_heads, geometry.head_dim)
    return qkv, (1 + 0.1 * randn(*shape)).to(dtype)


def assert_right(
    geometry: AttentionGeometry,
    case: Case,
    found: Tensor,
    cache: Tensor,
    before: Tensor,
    qkv: Tensor,
    extras: Extras,
) -> None:
    """cache, before: after the step and before it, as ``keep`` gives them."""
    real, plain, kind = case.real.to(DEVICE), case.plain, geometry.cache_dtype
    old = read(before, geometry, extras.scales).permute(0, 3, 2, 1, 4)
    out, key, value = expected_of(geometry, qkv[real], old, plain, extras)
    error = (found[real].float() - out).norm() / out.norm()
    bound = 0.01 if kind or found.dtype == BF16 else 0.002
    assert error <= bound, f"relative error {error:.4f}"
    if not kind:
        largest = (found[real].float() - out).abs().max() / out.abs().max()
        assert largest <= 8 * torch.finfo(found.dtype).eps, f"largest error {largest:.4f}"
    padding = torch.ones(len(found), dtype=torch.bool, device=DEVICE)
    padding[real] = False
    assert not found[padding].any()
    slots = plain.slot_mapping.to(DEVICE)
    block, offset = slots // plain.block_size, slots % plain.block_size
    written = read(cache, geometry, extras.scales)[block, :, :, offset]
    for index, tensor in enumerate((key, value)):  # of written, [tokens, head, k|v, d]
        error = (written[:, :, index] - tensor).norm() / tensor.norm()
        assert error <= 0.005
    for mine, other in zip(parts_of(cache, geometry), parts_of(before, geometry)):
        if mine.dim() > 1:
            bits = torch.uint8 if mine.itemsize == 1 else torch.int16
            rest, other = mine.contiguous().view(bits).clone(), other.contiguous().view(bits)
            rest[block, :, :, offset] = other[block, :, :, offset]
            assert torch.equal(rest, other)


def check(
    geometry: AttentionGeometry,
    case: Case,
    dtype: torch.dtype = BF16,
    name: str = "triton",
    sinks: Tensor | None = None,
) -> None:
    attention, kind = made(name)(geometry), geometry.cache_dtype
    scales = None
    if kind not in (None, torch.int8):
        count = 2 * geometry.num_kv_heads
        scales = torch.linspace(0.02, 0.5, count, device=DEVICE).view(2, -1)
    before = keep(history(geometry, case, torch.float32 if kind else dtype, DEVICE), kind, scales)
    cache = before.clone()
    qkv, weight = inputs(geometry, case, dtype)
    extras = Extras(weight, sinks, scales)
    rope = Rope(geometry.head_dim, LONGEST)
    state = attention.prepare(case.padded.to(DEVICE), rope, dtype)
    found = attention(qkv.clone(), cache, state, weight, sinks, scales)
    assert not state.workspace.arrived.any()
    assert_right(geometry, case, found, cache, before, qkv, extras)


def lengths(rows: int, longest: int, seed: int = 3) -> list[int]:
    """From 1 to ``longest``, many of them short."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(rows, generator=generator, dtype=torch.float64)
    return [longest, *(longest**share).long().tolist()][:rows]


@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize(
    ("rows", "longest"),
    ((1, 1), (1, 130), (1, 33_000), (8, 8_000), (64, 8_000), (64, 33_000), (512, 2_000)),
)
def test_one_token_a_row(rows, longest, dtype):
    past = [length - 1 for length in lengths(rows, longest)]
    check(LLAMA, case(past, [1] * rows, 64, padded_decode=rows // 8), dtype)


@pytest.mark.parametrize("block_size", (16, 64, 128))
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_mixed_batch(geometry, block_size):
    past = [*lengths(12, 5_000), 0, 40, 2_000, 0, 3_000]
    new = [1] * 12 + [300, 2, 129, 1_000, 64]
    check(geometry, case(past, new, block_size, 4, 3, 50))


@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("name", ("triton", "fa3"))
@pytest.mark.parametrize(("past", "new"), (([0], [8_192]), ([30_000], [2_048])))
def test_several_tokens_a_row(name, past, new, dtype):
    check(LLAMA, case(past, new, 64), dtype, name)


@kinds
@pytest.mark.parametrize(
    ("name", "block_size", "dtype"),
    (
        ("32/8-128", 64, BF16),
        ("32/8-128", 16, FP16),
        ("8/8-80", 64, BF16),
        ("16/1-192", 16, BF16),
        ("8/4-256-window", 64, BF16),
        ("9/3-64", 64, FP16),
    ),
)
def test_cache_of_8_bits(name, block_size, dtype, kind):
    past = [*lengths(12, 5_000), 0, 40, 2_000]
    batch = case(past, [1] * 12 + [300, 2, 129], block_size, 4, 3, 50)
    check(replace(GEOMETRIES[name], cache_dtype=kind), batch, dtype)


@kinds
@pytest.mark.parametrize("rows", (1, 64, 256))
def test_one_token_a_row_over_a_cache_of_8_bits(rows, kind):
    past = [length - 1 for length in lengths(rows, 8_000)]
    check(replace(LLAMA, cache_dtype=kind), case(past, [1] * rows, 64))


@kinds
@pytest.mark.parametrize("name", ("triton", "triton-fixed", "fa3"))
def test_a_long_prompt_over_a_cache_of_8_bits(name, kind):
    check(replace(LLAMA, cache_dtype=kind), case([3_000, 0], [2_048, 500], 64), name=name)


@pytest.mark.parametrize("kind", (None, *KINDS.values()))
def test_softcap_and_sinks(kind):
    batch = case([*lengths(12, 5_000), 0, 40, 2_000], [1] * 12 + [300, 2, 129], 64, 4)
    capped = AttentionGeometry(8, 4, 256, 511, softcap=5.0, own_scale=0.2, cache_dtype=kind)
    check(capped, batch)
    check(replace(capped, softcap=None), batch)
    sinks = torch.linspace(-4, 6, 64, device=DEVICE)
    check(AttentionGeometry(64, 8, 64, window=128, cache_dtype=kind), batch, sinks=sinks)


def test_many_short_rows():
    new = [1 + i % 7 for i in range(300)]
    check(QWEN, case([i * 3 for i in range(300)], sorted(new), 64))


def test_angles_by_token():
    geometry = AttentionGeometry(8, 2, 128)
    batch = case([100, 4_000, 0, 70], [1, 1, 200, 30], 64, 2, 1, 3)
    attention = made("triton")(geometry)
    results = []
    for by_token in (True, False):
        rope = Rope(128, LONGEST)
        if by_token:
            rope.table = lambda length, device: None  # the same angles, looked up by token
        cache = by_head(history(geometry, batch, BF16, DEVICE))
        state = attention.prepare(batch.padded.to(DEVICE), rope, BF16)
        assert state.by_token == by_token
        results.append(attention(inputs(geometry, batch, BF16)[0], cache, state))
    assert torch.equal(*results)


def refill(static: Columns, other: Columns) -> None:
    """Puts another batch of no more rows, tokens and blocks where the graph reads its own."""
    for field in fields(Columns):
        mine, new = getattr(static, field.name), getattr(other, field.name)
        if not isinstance(mine, Tensor):
            continue
        if mine.ndim == 2:
            mine[:, : new.shape[1]] = new
        else:
            mine.copy_(new)


@pytest.mark.parametrize("geometry", (LLAMA, QWEN), ids=("32/8", "16/8-norm"))
@pytest.mark.parametrize("rows", (1, 8, 64, 200))
def test_captured_decode_step_serves_any_lengths(geometry, rows):
    """Captured at one set of lengths, replayed at others, some rows padding."""
    width = 4_000
    first = case([width] * rows, [1] * rows, 64)
    later = [
        case([n - 1 for n in lengths(rows - rows // 4, longest, seed)], [1] * (rows - rows // 4),
             64, padded_decode=rows // 4, seed=seed)
        for seed, longest in ((1, 40), (2, 1_000), (3, width))
    ]  # fmt: skip
    replay(geometry, first, later)


def test_captured_mixed_step_serves_any_lengths():
    first = case([500] * 6 + [4_000, 0], [1] * 6 + [400, 112], 64)
    later = [
        case([9, 3, 77, 1_000, 2_000, 0, 3_900, 0], [1] * 6 + [500, 12], 64, seed=1),
        case([9, 3, 77, 0], [1] * 3 + [300], 64, padded_decode=3, padded_rows=1,
             padded_tokens=212, seed=2),
    ]  # fmt: skip
    replay(LLAMA, first, later)


def replay(geometry: AttentionGeometry, first: Case, later: list[Case]) -> None:
    attention = made("triton")(geometry)
    rope = Rope(geometry.head_dim, LONGEST)
    blocks = max(c.num_blocks for c in (first, *later))
    shape = attention.kv_shape(blocks, first.plain.block_size)
    cache = torch.zeros(shape, dtype=BF16, device=DEVICE)
    static = first.padded.to(DEVICE)
    qkv, weight = inputs(geometry, first, BF16)

    def step() -> Tensor:
        return attention(qkv, cache, attention.prepare(static, rope, BF16), weight)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for other in (*later, first):
        assert len(other.padded.positions) == len(qkv)
        before = by_head(history(geometry, other, BF16, DEVICE))
        refill(static, other.padded.to(DEVICE))
        fresh, _ = inputs(geometry, other, BF16)
        for _ in range(2):  # the second finds the counters as the first left them
            cache[: len(before)] = before
            qkv.copy_(fresh)
            out.fill_(float("nan"))
            graph.replay()
            used = cache[: len(before)]
            assert_right(geometry, other, out, used, before, fresh, Extras(weight))


def test_equal_inputs_give_equal_bits():
    """Splits are merged in one order, whichever arrives last."""
    batch = case([20_000, 300, 5_000], [1] * 3, 64)
    attention = made("triton")(LLAMA)
    before = by_head(history(LLAMA, batch, BF16, DEVICE))
    qkv, _ = inputs(LLAMA, batch, BF16)
    state = attention.prepare(batch.padded.to(DEVICE), Rope(128, LONGEST), BF16)
    first = attention(qkv.clone(), before.clone(), state)
    for _ in range(20):
        assert torch.equal(attention(qkv.clone(), before.clone(), state), first)
