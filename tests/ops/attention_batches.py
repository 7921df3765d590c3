"""Mixed batches for tests of paged attention: shuffled blocks, a random past, and padding whose
every number would show if it were used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.ops.attention import AttentionGeometry

NOWHERE = 1 << 30  # as a block, a position: far outside of everything


@dataclass
class Columns:
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    block_size: int
    decode_rows: int
    query_starts_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    queries: int = 1

    def to(self, device: str) -> Columns:
        names = ("positions", "slot_mapping", "query_starts", "seq_lens", "block_tables")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass
class Rope:
    """Of base 10,000; ``by_token``: as if angles depended on the lengths of contexts."""

    head_dim: int
    max_position: int = 4096
    by_token: bool = False

    def __call__(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=positions.device) / self.head_dim
        angles = positions[:, None] * 10000.0**-steps
        if self.by_token:
            angles = angles * (1 + lengths[:, None] / 100)
        return angles.cos(), angles.sin()

    def table(self, length: int, device: torch.device) -> Tensor | None:
        if self.by_token:
            return None
        positions = torch.arange(length, device=device)
        return torch.cat(self(positions, positions), dim=1)


def columns(
    past: list[int], new: list[int], tables: Tensor, block_size: int, decode_rows: int
) -> Columns:
    """Row i has ``past[i]`` tokens in the cache and brings ``new[i]``."""
    counts, before = torch.tensor(new), torch.tensor(past)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    rows = torch.arange(len(new)).repeat_interleave(counts)
    positions = torch.arange(int(starts[-1])) - starts[rows] + before[rows]
    blocks = tables[rows, positions // block_size].long()
    return Columns(
        positions,
        blocks * block_size + positions % block_size,
        starts.int(),
        (before + counts).int(),
        tables,
        block_size,
        decode_rows,
        starts.tolist(),
        (before + counts).tolist(),
    )


@dataclass
class Case:
    """A batch with padding; the ``plain`` one, its real rows and tokens alone, which a definition
    understands; and which tokens these are."""

    plain: Columns
    padded: Columns
    real: Tensor  # int64, tokens of ``padded``
    num_blocks: int


def case(
    past: list[int],
    new: list[int],
    block_size: int,
    padded_decode: int = 0,
    padded_rows: int = 0,
    padded_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """Rows with one token come first. Padding: rows after the decode rows that bring a token each,
    rows after the others that bring none, tokens at the end."""
    decode = next((i for i, n in enumerate(new) if n != 1), len(new))
    used = -(-(torch.tensor(past) + torch.tensor(new)) // block_size)
    num_blocks, width = int(used.sum()) + 3, int(used.max()) + 1
    there = torch.arange(width) < used[:, None]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    tables = torch.full(there.shape, NOWHERE, dtype=torch.int32)
    tables[there] = order[: num_blocks - 3].int()
    plain = columns(past, new, tables, block_size, decode)

    def rows(x: Tensor, filler: int) -> Tensor:
        def pad(count: int) -> Tensor:
            return x.new_full((count, *x.shape[1:]), filler)

        return torch.cat((x[:decode], pad(padded_decode), x[decode:], pad(padded_rows)))

    def tokens(x: Tensor, filler: int) -> Tensor:
        fill = (x.new_full((padded_decode,), filler), x.new_full((padded_tokens,), filler))
        return torch.cat((x[:decode], fill[0], x[decode:], fill[1]))

    counts = rows(plain.query_starts.diff(), 0)
    counts[decode : decode + padded_decode] = 1
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    padded = Columns(
        tokens(plain.positions, NOWHERE),
        tokens(plain.slot_mapping, -1),
        starts,
        rows(plain.seq_lens, 0),
        rows(tables, NOWHERE),
        block_size,
        decode + padded_decode,
    )
    real = (padded.slot_mapping >= 0).nonzero().flatten()
    return Case(plain, padded, real, num_blocks)


def history(
    geometry: AttentionGeometry, case: Case, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """[block, offset, k|v, head, d]: random where a row's past is, NaN everywhere else."""
    plain, size = case.plain, case.plain.block_size
    past = (plain.seq_lens - plain.query_starts.diff()).tolist()
    slots = columns([0] * len(past), past, plain.block_tables, size, 0).slot_mapping
    shape = (case.num_blocks * size, 2, geometry.num_kv_heads, geometry.head_dim)
    cache = torch.full(shape, float("nan"), device=device).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    known = torch.randn(len(slots), *shape[1:], generator=generator, device=device)
    cache[slots.to(device)] = known.to(dtype)
    return cache.unflatten(0, (case.num_blocks, size))


def by_head(cache: Tensor) -> Tensor:
    """The cache in the Triton version's layout, [block, head, k|v, offset, d]."""
    return cache.permute(0, 3, 2, 1, 4).contiguous()


def keep(cache: Tensor, dtype: torch.dtype | None, scales: Tensor | None = None) -> Tensor:
    """FP32 [block, offset, k|v, head, d] as the Triton version keeps it in ``dtype``; scales: FP32
    [2, heads], of FP8."""
    numbers = by_head(cache)
    if dtype == torch.int8:
        steps = numbers.abs().amax(-1) / 127
        codes = (numbers / steps[..., None]).round().nan_to_num(99).to(dtype)
        return torch.cat((codes.flatten(-2), steps.view(dtype)), dim=-1)
    if scales is not None:
        numbers = numbers / scales.t()[:, :, None, None]
    return numbers if dtype is None else numbers.to(dtype)


def parts_of(cache: Tensor, geometry: AttentionGeometry) -> tuple[Tensor, Tensor]:
    """Of a cache that ``keep`` gives, the numbers as kept [block, head, k|v, offset, d] and what
    each token's are multiplied by if that is in the cache, FP32 [block, head, k|v, offset, 1]."""
    if geometry.cache_dtype != torch.int8:
        return cache, torch.ones(1, device=cache.device)
    size = cache.shape[-1] // (geometry.head_dim + 4)
    codes, steps = cache.split((size * geometry.head_dim, 4 * size), dim=-1)
    return (
        codes.unflatten(-1, (size, geometry.head_dim)),
        steps.contiguous().view(torch.float32)[..., None],
    )


def read(cache: Tensor, geometry: AttentionGeometry, scales: Tensor | None = None) -> Tensor:
    """What the numbers of a cache that ``keep`` gives stand for, FP32 [block, head, k|v, offset,
    d]."""
    numbers, steps = parts_of(cache, geometry)
    found = numbers.float() * steps
    return found if scales is None else found * scales.t()[:, :, None, None]
