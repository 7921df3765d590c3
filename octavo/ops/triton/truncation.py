"""The second and third launch of a draw (ops/triton/sampling.py): min_p, top_k and top_p.

A cut is a gap: the tokens whose gap is at most the cut are kept, so all that tie at it are. It is
the smallest gap up to which the tokens weigh enough: each weighs 1 for top_k, its probability for
top_p. Gaps are not negative, so that their bits are ordered as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton import launch
from octavo.ops.triton.sampling_parts import (
    GAP_AT,
    MIN_P,
    NEEDS_AT,
    NOBODY,
    PENALTIES,
    SCALE_AT,
    TOP_K,
    TOP_K_AT,
    TOP_P,
    TOP_P_AT,
    TRUNCATION,
    WIDTH,
    commit,
    is_truncated,
    log_exponential,
    pack,
    packed_id,
    row_keys,
    row_of,
    scores,
)

END = tl.constexpr(31.0)  # e^-31 < 2^-44: a larger gap neither wins nor weighs
UNITS = tl.constexpr(2.0**44)  # the weight of the most likely token
EARLY = tl.constexpr(launch.EARLY)
LATE = tl.constexpr(launch.LATE)
# Columns of the state that ``scan`` leaves for each row, and their number.
LARGEST, MASS, BOUND, STATE = (tl.constexpr(i) for i in range(4))
PIVOTS = tl.constexpr(8)
AT_ONCE = tl.constexpr(32)


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel before, and lets the next one start to wait."""
    if PDL:
        gdc_wait()
        if PDL == EARLY:
            gdc_launch_dependents()


@triton.jit
def main_loop_done(PDL: tl.constexpr):
    if PDL == LATE:
        gdc_launch_dependents()


@triton.jit
def _weights(gaps, cut, by_mass):
    """int64, exact in any order of summing; 0 beyond the cut."""
    weights = tl.where(by_mass != 0, (tl.exp(-gaps) * UNITS).to(tl.int64), 1)
    return tl.where(gaps <= cut, weights, 0)


@triton.jit
def _asked(asks, by_mass):
    """Whether a slot asks for top_p, or with ``by_mass`` 0 for top_k."""
    return (asks & tl.where(by_mass != 0, TOP_P, TOP_K)) != 0


@triton.jit
def _floor(asks, params_f, slot):
    """The cut of min_p."""
    cut = tl.full([], END, tl.float32)
    if asks & MIN_P:
        cut = tl.minimum(cut, tl.load(params_f + slot * WIDTH + GAP_AT))
    return cut


@triton.jit
def _wanted(by_mass, whole, params_f, params_i, slot):
    """What the kept tokens weigh at least; whole: what they weigh before top_p."""
    wanted = tl.load(params_i + slot * WIDTH + TOP_K_AT).to(tl.int64)
    if by_mass:
        top_p = tl.load(params_f + slot * WIDTH + TOP_P_AT)
        share = (top_p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(share, 1)
    return wanted


@triton.jit
def _gap_bits(gap):
    return gap.to(tl.int32, bitcast=True)


@triton.jit
def _halve(gaps, weights, below, high, wanted):
    """The bits of the smallest of the ``gaps`` up to which they weigh ``wanted``, or ``high`` if
    they don't. below: bits that are known to be too few; high: bits."""
    bits = _gap_bits(gaps)
    low = below
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(bits <= middle, weights, 0), 0) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _compare(found, count, gaps, high, wanted, by_mass):
    """``_halve`` of few gaps, by pairs: ``gaps`` are the ``count`` that stand at ``found``."""
    up_to = tl.zeros(gaps.shape, tl.int64)
    for first in tl.range(0, count, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        others = tl.load(found + i, mask=i < count, other=float("inf"))
        weights = _weights(others, high, by_mass)
        up_to += tl.sum(tl.where(others[:, None] <= gaps[None, :], weights[:, None], 0), 0)
    return tl.min(tl.where(up_to >= wanted, gaps, high), 0)


# ---- the second launch ----


@triton.jit(do_not_specialize_on_alignment=["slots"])
def collect(
    logits, logits_stride, slots, params_f, params_i, seen, vocab, state, counts, found_gaps,
    found_ids, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """grid (chunks, rows): the tokens within the bound of their row, in no order. ``counts`` tells
    how many there are; beyond CAPACITY some of them are missing."""
    begin(PDL)
    chunk = tl.program_id(0)
    r = tl.program_id(1)
    slot = tl.load(slots + r)
    if slot < 0:
        return
    asks = tl.load(params_i + slot * WIDTH + NEEDS_AT)
    if not is_truncated(asks):
        return
    scale = tl.load(params_f + slot * WIDTH + SCALE_AT)
    largest = tl.load(state + r * STATE + LARGEST)
    bound = tl.load(state + r * STATE + BOUND)
    row = row_of(logits + r.to(tl.int64) * logits_stride, seen, params_f, params_i, slot, vocab)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    gaps = largest - scores(row, ids) * scale
    wanted = gaps <= bound
    main_loop_done(PDL)
    number = tl.sum(wanted.to(tl.int32), 0)
    if number > 0:
        first = tl.atomic_add(counts + r, number, sem="relaxed", scope="gpu")
        if first + number <= CAPACITY:
            at = r * CAPACITY + first + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(found_gaps + at, gaps, mask=wanted)
            tl.store(found_ids + at, ids, mask=wanted)


# ---- the third: a cut among candidates ----


@triton.jit
def _cut_found(found, count, gaps, asks, bound, mass, params_f, params_i, slot, FEW: tl.constexpr):
    """(cut, whether the candidates were enough). gaps: those at ``found``, padded with inf."""
    cut = _floor(asks, params_f, slot)
    enough = True
    for by_mass in tl.range(0, 2):
        if _asked(asks, by_mass):
            weights = _weights(gaps, cut, by_mass)
            total = tl.sum(weights, 0)
            alone = (asks & TRUNCATION) == TOP_P
            whole = tl.where(alone, (mass * UNITS).to(tl.int64), total)
            wanted = _wanted(by_mass, whole, params_f, params_i, slot)
            enough = (not alone) | (total >= wanted) | (bound >= END)
            if FEW:
                cut = _compare(found, count, gaps, cut, wanted, by_mass)
            else:
                bits = _halve(gaps, weights, -1, _gap_bits(cut), wanted)
                cut = bits.to(tl.float32, bitcast=True)
    return cut, enough


@triton.jit
def _draw_found(
    found_gaps, found_ids, count, asks, bound, mass, params_f, params_i, slot, first_key,
    second_key, SIZE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """(the winner, whether the candidates were enough), of at most SIZE candidates."""
    i = tl.arange(0, SIZE)
    gaps = tl.load(found_gaps + i, mask=i < count, other=float("inf"))
    ids = tl.load(found_ids + i, mask=i < count, other=0)
    cut, enough = _cut_found(
        found_gaps, count, gaps, asks, bound, mass, params_f, params_i, slot, FEW
    )
    score = pack(-gaps - log_exponential(first_key, second_key, ids), ids)
    return tl.max(tl.where(gaps <= cut, score, NOBODY), 0), enough


# ---- and in a whole row ----


@triton.jit
def _tile(row, scale, largest, first, TILE: tl.constexpr):
    """(ids, gaps) of TILE tokens of the row."""
    ids = first + tl.arange(0, TILE)
    return ids, largest - scores(row, ids) * scale


@triton.jit
def _weigh(row, scale, largest, vocab, cut, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for first in tl.range(0, vocab, TILE, num_stages=3):
        _, gaps = _tile(row, scale, largest, first, TILE)
        total += _weights(gaps, cut, 1)
    return tl.sum(total, 0)


@triton.jit
def _narrow(row, scale, largest, vocab, low, below, high, wanted, by_mass, TILE: tl.constexpr):
    """(low, what weighs up to it, high) of a range 1 / PIVOTS as wide that still holds the cut."""
    share = tl.arange(0, PIVOTS).to(tl.float32) / PIVOTS
    start = tl.maximum(low, 0.0)
    pivots = start + (high - start) * share
    totals = tl.zeros([PIVOTS, TILE], tl.int64)
    for first in tl.range(0, vocab, TILE, num_stages=3):
        _, gaps = _tile(row, scale, largest, first, TILE)
        weights = _weights(gaps, high, by_mass)
        totals += tl.where(gaps[None, :] <= pivots[:, None], weights[None, :], 0)
    totals = tl.sum(totals, 1)
    enough = totals >= wanted
    return (
        tl.max(tl.where(enough, low, pivots), 0),
        tl.max(tl.where(enough, below, totals), 0),
        tl.min(tl.where(enough, pivots, high), 0),
    )


@triton.jit
def _gather(
    row, scale, largest, vocab, low, high, found, CAPACITY: tl.constexpr, TILE: tl.constexpr
):
    """How many gaps lie in (low, high]; the first CAPACITY of them are in ``found``."""
    count = 0
    for first in tl.range(0, vocab, TILE, num_stages=3):
        _, gaps = _tile(row, scale, largest, first, TILE)
        inside = (gaps > low) & (gaps <= high)
        number = tl.sum(inside.to(tl.int32), 0)
        if number > 0:
            at = count + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(found + at, gaps, mask=inside & (at < CAPACITY))
            count += number
    return count


@triton.jit
def _search(
    row, scale, largest, vocab, high, wanted, found, by_mass,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, PIVOT_TILE: tl.constexpr,
):  # fmt: skip
    """The cut, at most ``high``: narrows the range that holds it until its tokens fit in
    ``found`` or are all equal."""
    low = tl.full([], -1.0, tl.float32)
    below = tl.full([], 0, tl.int64)
    count = tl.full([], CAPACITY + 1, tl.int32)
    apart = tl.full([], 2, tl.int32)
    while (count > CAPACITY) & (apart > 1):
        low, below, high = _narrow(
            row, scale, largest, vocab, low, below, high, wanted, by_mass, PIVOT_TILE
        )
        count = _gather(row, scale, largest, vocab, low, high, found, CAPACITY, TILE)
        apart = _gap_bits(high) - tl.where(low < 0, -1, _gap_bits(low))
    if apart > 1:
        tl.debug_barrier()
        i = tl.arange(0, CAPACITY)
        gaps = tl.load(found + i, mask=i < count, other=float("inf"), cache_modifier=".cg")
        low_bits = tl.where(low < 0, -1, _gap_bits(low))
        weights = _weights(gaps, high, by_mass)
        bits = _halve(gaps, weights, low_bits, _gap_bits(high), wanted - below)
        high = bits.to(tl.float32, bitcast=True)
        tl.debug_barrier()
    return high


@triton.jit
def _cut_row(
    row, scale, largest, mass, asks, vocab, params_f, params_i, slot, found,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, PIVOT_TILE: tl.constexpr,
):  # fmt: skip
    cut = _floor(asks, params_f, slot)
    for by_mass in tl.range(0, 2):
        if _asked(asks, by_mass):
            whole = (mass * UNITS).to(tl.int64)
            if (by_mass != 0) & ((asks & TRUNCATION) != TOP_P):
                whole = _weigh(row, scale, largest, vocab, cut, TILE)
            wanted = _wanted(by_mass, whole, params_f, params_i, slot)
            cut = _search(
                row, scale, largest, vocab, cut, wanted, found, by_mass, CAPACITY, TILE, PIVOT_TILE
            )
    return cut


@triton.jit
def _race_row(row, scale, largest, vocab, cut, first_key, second_key, TILE: tl.constexpr):
    best = tl.full([TILE], NOBODY, tl.int64)
    for first in tl.range(0, vocab, TILE, num_stages=3):
        ids, gaps = _tile(row, scale, largest, first, TILE)
        score = pack(-gaps - log_exponential(first_key, second_key, ids), ids)
        best = tl.maximum(best, tl.where(gaps <= cut, score, NOBODY))
    return tl.max(best, 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def settle(
    logits, logits_stride, slots, positions, tokens, params_f, params_i, history, history_stride,
    seen, vocab, state, counts, found_gaps, found_ids,
    FEW: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr, PIVOT_TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """grid (rows,)."""
    begin(PDL)
    r = tl.program_id(0)
    slot = tl.load(slots + r)
    if slot < 0:
        return
    asks = tl.load(params_i + slot * WIDTH + NEEDS_AT)
    if not is_truncated(asks):
        return
    position = tl.load(positions + r)
    mass = tl.load(state + r * STATE + MASS)
    count = tl.load(counts + r)
    first_key, second_key = row_keys(params_i, slot, position)
    found_gaps += r * CAPACITY
    found_ids += r * CAPACITY
    best = tl.full([], NOBODY, tl.int64)
    bound = tl.load(state + r * STATE + BOUND)
    enough = count <= CAPACITY
    if count <= FEW:
        best, enough = _draw_found(
            found_gaps, found_ids, count, asks, bound, mass, params_f, params_i, slot, first_key,
            second_key, FEW, True,
        )  # fmt: skip
    elif count <= CAPACITY:
        best, enough = _draw_found(
            found_gaps, found_ids, count, asks, bound, mass, params_f, params_i, slot, first_key,
            second_key, CAPACITY, False,
        )  # fmt: skip
    if not enough:
        scale = tl.load(params_f + slot * WIDTH + SCALE_AT)
        largest = tl.load(state + r * STATE + LARGEST)
        row = row_of(logits + r.to(tl.int64) * logits_stride, seen, params_f, params_i, slot, vocab)
        cut = _cut_row(
            row, scale, largest, mass, asks, vocab, params_f, params_i, slot, found_gaps,
            CAPACITY, TILE, PIVOT_TILE,
        )  # fmt: skip
        best = _race_row(row, scale, largest, vocab, cut, first_key, second_key, TILE)
    # Nobody: a row of NaN or infinities.
    token = tl.where(best == NOBODY, 0, packed_id(best))
    commit(token, r, slot, position, tokens, history, history_stride, seen, vocab, asks & PENALTIES)
