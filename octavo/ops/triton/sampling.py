"""Drawing tokens on the device: three launches, whatever the rows ask for, and no sorting.

``scan`` reads all logits once, many programs a row; the last to arrive finishes rows without
truncation and finds, for the others, a bound that nearly always leaves some tens or hundreds of
tokens. ``collect`` gathers those, ``settle`` finds the exact cut among them and draws; where the
bound left too many it searches the whole row. ``scan`` alone is enough for rows without truncation.

Instead of probabilities p the kernels compare gaps w = largest - scaled logit: p is e^-w times the
row's largest, and the race for the largest p / E is one for the largest -w - log E. Gaps beyond
``END`` are left out: no noise lets such a token win, and it weighs nothing in the sums of top_p,
which are integers in units of 2^-44 of the largest probability. So sums are exact in any order, and
a row's draw depends on neither the batch nor the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import sampling
from octavo.ops.triton.launch import LATE, OFF, has_pdl, next_power_of_2, options, pdl_for
from octavo.ops.triton.sampling_parts import (
    GAP_AT,
    MIN_P,
    NEEDS_AT,
    NOBODY,
    PENALTIES,
    RANDOM,
    SCALE_AT,
    TOP_K,
    TOP_K_AT,
    TOP_P,
    TOP_P_AT,
    TRUNCATION,
    WIDTH,
    commit,
    finite_or_zero,
    is_truncated,
    log_exponential,
    pack,
    packed_id,
    packed_score,
    penalise,
    row_keys,
    row_of,
)
from octavo.ops.triton.truncation import (
    BOUND,
    END,
    LARGEST,
    MASS,
    STATE,
    begin,
    collect,
    main_loop_done,
    settle,
)

FIRST_TRY = tl.constexpr(float(sampling.FIRST_TRY))
HALVINGS = tl.constexpr(11)  # of the bound of top_k: to about 0.015
CHUNK = 4096  # logits that one program looks at
GROUP = 64
CAPACITY = 4096  # candidates of a row
FEW = 512  # up to so many are compared in pairs


# ---- one look at all logits ----


@triton.jit
def _scan_chunk(x, ids, asks, scale, params_i, slot, position, groups, GROUP: tl.constexpr):
    """(a, b, id) of a chunk. Rows without noise: its largest score, 0 and its id. Rows without
    truncation: the winner is ``id`` and its score is a - b. Rows with: a is the largest scaled
    logit, b the sum of e^(scaled logit - a)."""
    if asks & RANDOM:
        z = x * scale
        a = tl.max(z, 0)
        lower = z - finite_or_zero(a)
        if asks & TRUNCATION:
            b = tl.sum(tl.exp(lower), 0)
            best = tl.full([], NOBODY, tl.int64)
            if asks & TOP_K:
                largest = tl.max(tl.reshape(z, [ids.shape[0] // GROUP, GROUP]), 1)
                tl.store(groups + tl.arange(0, ids.shape[0] // GROUP), largest)
        else:
            first, second = row_keys(params_i, slot, position)
            best = tl.max(pack(lower - log_exponential(first, second, ids), ids), 0)
            b = -packed_score(best)
    else:
        best = tl.max(pack(x, ids), 0)
        a = packed_score(best)
        b = 0.0
    return a, b, packed_id(best)


@triton.jit
def _bound(largest, mass, asks, params_f, params_i, slot, groups, num_groups, GROUPS: tl.constexpr):
    """A gap that the cut of a row does not exceed, or so it is hoped where only top_p asks."""
    bound = tl.full([], END, tl.float32)
    if asks & MIN_P:
        bound = tl.minimum(bound, tl.load(params_f + slot * WIDTH + GAP_AT))
    if asks & TOP_K:
        # The k-th largest token is at least the k-th largest of the groups' largest.
        g = tl.arange(0, GROUPS)
        there = g < num_groups
        highest = tl.load(groups + g, mask=there, other=float("-inf"), cache_modifier=".cg")
        gap = tl.where(there, largest - highest, float("inf"))
        k = tl.load(params_i + slot * WIDTH + TOP_K_AT)
        if tl.sum((gap <= bound).to(tl.int32), 0) >= k:
            low = 0.0
            for _ in range(HALVINGS):
                middle = 0.5 * (low + bound)
                enough = tl.sum((gap <= middle).to(tl.int32), 0) >= k
                low = tl.where(enough, low, middle)
                bound = tl.where(enough, middle, bound)
    elif (asks & TRUNCATION) == TOP_P:
        rest = (1.0 - tl.load(params_f + slot * WIDTH + TOP_P_AT)) * mass
        # Not below END for a broken row: no comparison with NaN holds.
        wanted = -tl.log(rest / FIRST_TRY)
        bound = tl.where(wanted < bound, tl.maximum(wanted, 0.0), bound)
    return bound


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def _scan(
    logits, logits_stride, slots, positions, tokens, params_f, params_i, history, history_stride,
    seen, vocab, part_a, part_b, part_id, groups, arrived, state, counts,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """grid (CHUNKS, rows)."""
    begin(PDL)
    chunk = tl.program_id(0)
    r = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    own_logits = logits + r.to(tl.int64) * logits_stride
    x = tl.load(own_logits + ids, mask=ids < vocab, other=float("-inf"))
    slot = tl.load(slots + r)
    if slot < 0:
        return
    PER_CHUNK: tl.constexpr = CHUNK // GROUP
    asks = tl.load(params_i + slot * WIDTH + NEEDS_AT)
    scale = tl.load(params_f + slot * WIDTH + SCALE_AT)
    position = tl.load(positions + r)
    row = row_of(own_logits, seen, params_f, params_i, slot, vocab)
    x = penalise(x, row, ids)
    own_groups = groups + r * (CHUNKS * PER_CHUNK)
    a, b, best = _scan_chunk(
        x, ids, asks, scale, params_i, slot, position, own_groups + chunk * PER_CHUNK, GROUP
    )
    main_loop_done(PDL)
    here = r * CHUNKS + chunk
    tl.store(part_a + here, a)
    tl.store(part_b + here, b)
    tl.store(part_id + here, best)
    tl.debug_barrier()
    if tl.atomic_add(arrived + r, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        tl.store(arrived + r, 0)
        c = tl.arange(0, CHUNKS_PAD)
        parts = r * CHUNKS + c
        there = c < CHUNKS
        tops = tl.load(part_a + parts, mask=there, other=float("-inf"), cache_modifier=".cg")
        others = tl.load(part_b + parts, mask=there, other=0.0, cache_modifier=".cg")
        largest = tl.max(tops, 0)
        if is_truncated(asks):
            mass = tl.sum(others * tl.exp(tops - finite_or_zero(largest)), 0)
            bound = _bound(
                largest, mass, asks, params_f, params_i, slot, own_groups, CHUNKS * PER_CHUNK,
                CHUNKS_PAD * PER_CHUNK,
            )  # fmt: skip
            tl.store(state + r * STATE + LARGEST, largest)
            tl.store(state + r * STATE + MASS, mass)
            tl.store(state + r * STATE + BOUND, bound)
            tl.store(counts + r, 0)
        else:
            score = tops
            if asks & RANDOM:
                score = (tops - finite_or_zero(largest)) - others
            winners = tl.load(part_id + parts, mask=there, other=0, cache_modifier=".cg")
            winner = tl.max(tl.where(there, pack(score, winners), NOBODY), 0)
            commit(
                packed_id(winner), r, slot, position, tokens, history, history_stride, seen, vocab,
                asks & PENALTIES,
            )  # fmt: skip


# ---- launches ----


@dataclass
class Scratch:
    """Room between the launches, for up to R rows of V logits: about 50 KiB a row."""

    part_a: Tensor  # float32 [R, chunks]
    part_b: Tensor  # float32 [R, chunks]
    part_id: Tensor  # int32 [R, chunks]
    groups: Tensor  # float32 [R, groups]
    arrived: Tensor  # int32 [R], 0 between draws
    state: Tensor  # float32 [R, STATE]
    counts: Tensor  # int32 [R]
    found_gaps: Tensor  # float32 [R, capacity]
    found_ids: Tensor  # int32 [R, capacity]
    chunk: int
    group: int
    few: int

    @classmethod
    def allocate(
        cls,
        rows: int,
        vocab: int,
        device: torch.device,
        chunk: int = CHUNK,
        group: int = GROUP,
        capacity: int = CAPACITY,
        few: int = FEW,
    ) -> Scratch:
        """chunk, group < chunk, capacity and few: powers of two."""
        chunks = -(-vocab // chunk)

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        return cls(
            part_a=zeros(chunks, torch.float32),
            part_b=zeros(chunks, torch.float32),
            part_id=zeros(chunks, torch.int32),
            groups=zeros(chunks * (chunk // group), torch.float32),
            arrived=zeros(1, torch.int32),
            state=zeros(STATE.value, torch.float32),
            counts=zeros(1, torch.int32),
            found_gaps=zeros(capacity, torch.float32),
            found_ids=zeros(capacity, torch.int32),
            chunk=chunk,
            group=group,
            few=min(few, capacity),
        )


def draw(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    params_f: Tensor,
    params_i: Tensor,
    history: Tensor,
    seen: Tensor,
    scratch: Scratch,
    truncation: bool = True,
) -> None:
    """Draws a token for each row by the parameters of its slot, into ``tokens``, the history and,
    with penalties, the counts of its slot. Rows of slot -1 are left out. Waits for nothing.

    logits: float32 [r, V], rows contiguous; slots (no slot twice), positions (of the drawn token),
    tokens: int32 [r]; params_f, params_i: [slots, WIDTH], columns of ops.needs; history: int32
    [slots, max_len + 1]; seen: int16 [slots, V]. truncation: False where no row uses top_k, top_p
    or min_p; rows that do then get no token.
    """
    rows, vocab = logits.shape
    pdl = pdl_for(rows)
    then = LATE if has_pdl() else OFF  # one version of the larger kernels is enough
    chunks = -(-vocab // scratch.chunk)
    launch = {"enable_fp_fusion": False}  # penalties round as the definition's
    source = (logits, logits.stride(0))
    target = (tokens, params_f, params_i, history, history.stride(0), seen, vocab)
    _scan[(chunks, rows)](
        *source, slots, positions, *target,
        scratch.part_a, scratch.part_b, scratch.part_id, scratch.groups, scratch.arrived,
        scratch.state, scratch.counts,
        CHUNKS=chunks, CHUNKS_PAD=next_power_of_2(chunks), CHUNK=scratch.chunk,
        GROUP=scratch.group, PDL=pdl, **options(4, pdl), **launch,
    )  # fmt: skip
    if not truncation:
        return
    found = (scratch.state, scratch.counts, scratch.found_gaps, scratch.found_ids)
    capacity = scratch.found_ids.shape[1]
    collect[(chunks, rows)](
        *source, slots, params_f, params_i, seen, vocab, *found,
        CAPACITY=capacity, CHUNK=scratch.chunk, PDL=then, **options(8, then), **launch,
    )  # fmt: skip
    settle[(rows,)](
        *source, slots, positions, *target, *found,
        FEW=scratch.few, CAPACITY=capacity, TILE=scratch.chunk,
        PIVOT_TILE=scratch.chunk // 2, PDL=then, **options(16, then), **launch,
    )  # fmt: skip
