"""What the sampler's kernels share: processed logits, noise, and how a draw enters the state.

A row is handed on as one tuple, ``row_of``'s. ``ops.sampling`` holds the definitions; the integer
part of the noise repeats its bits, floating point agrees to a few units in the last place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops import needs
from octavo.ops.needs import Float, Int

RANDOM = tl.constexpr(needs.RANDOM)
TOP_K = tl.constexpr(needs.TOP_K)
TOP_P = tl.constexpr(needs.TOP_P)
MIN_P = tl.constexpr(needs.MIN_P)
PENALTIES = tl.constexpr(needs.PENALTIES)
EDITS = tl.constexpr(needs.EDITS)
TRUNCATION = tl.constexpr(needs.TRUNCATION)
WIDTH = tl.constexpr(needs.WIDTH)

SCALE_AT = tl.constexpr(int(Float.SCALE))
TOP_P_AT = tl.constexpr(int(Float.TOP_P))
GAP_AT = tl.constexpr(int(Float.GAP))
REPETITION_AT = tl.constexpr(int(Float.REPETITION))
INVERSE_AT = tl.constexpr(int(Float.INVERSE_REPETITION))
FREQUENCY_AT = tl.constexpr(int(Float.FREQUENCY))
PRESENCE_AT = tl.constexpr(int(Float.PRESENCE))
NEEDS_AT = tl.constexpr(int(Int.NEEDS))
TOP_K_AT = tl.constexpr(int(Int.TOP_K))
SEED_LOW_AT = tl.constexpr(int(Int.SEED_LOW))
SEED_HIGH_AT = tl.constexpr(int(Int.SEED_HIGH))

# In the table of seen tokens: the sign says that a token is in the prompt, the rest how often it
# is in the output.
MOST_SEEN = tl.constexpr(0x7FFF)

LARGEST_ID = tl.constexpr(0x7FFFFFFF)
NOBODY = tl.constexpr(-(1 << 63))  # below every packed score
# Coefficients of log1p(f) = f - f^2 / 2 + f^3 (C0 + C1 f + ...), |f| <= 1/3, fitted for the
# smallest relative error (1e-8, before rounding).
C0 = tl.constexpr(0.3333321511745453)
C1 = tl.constexpr(-0.24999797344207764)
C2 = tl.constexpr(0.20010405778884888)
C3 = tl.constexpr(-0.16680487990379333)
C4 = tl.constexpr(0.14005868136882782)
C5 = tl.constexpr(-0.12184261530637741)
C6 = tl.constexpr(0.1398443728685379)
C7 = tl.constexpr(-0.12891684472560883)
LN_2 = tl.constexpr(0.6931471805599453)
TWO_THIRDS = tl.constexpr(0x3F2AAAAB)  # its bits


# ---- scores ----


@triton.jit
def row_of(logits, seen, params_f, params_i, slot, vocab):
    """The row at ``logits`` (float32 [vocab]) drawn by ``slot``'s parameters. seen: int16
    [slots, vocab]; params_f, params_i: [slots, WIDTH]."""
    floats = params_f + slot * WIDTH
    return (
        logits,
        seen + slot.to(tl.int64) * vocab,
        vocab,
        tl.load(params_i + slot * WIDTH + NEEDS_AT) & PENALTIES,
        tl.load(floats + REPETITION_AT),
        tl.load(floats + INVERSE_AT),
        tl.load(floats + FREQUENCY_AT),
        tl.load(floats + PRESENCE_AT),
    )


@triton.jit
def scores(row, ids):
    """Logits after penalties, float32; -inf beyond the vocabulary."""
    return penalise(tl.load(row[0] + ids, mask=ids < row[2], other=float("-inf")), row, ids)


@triton.jit
def penalise(x, row, ids):
    _, seen, vocab, penalised, repetition, inverse, frequency, presence = row
    if penalised:
        known = tl.load(seen + ids, mask=ids < vocab, other=0).to(tl.int32)
        count = known & MOST_SEEN
        x = tl.where(known != 0, x * tl.where(x > 0, inverse, repetition), x)
        x = x - count.to(tl.float32) * frequency
        x = x - tl.where(count > 0, presence, 0.0)
    return x


@triton.jit
def is_truncated(asks):
    """Whether a slot with these needs draws from a part of the vocabulary."""
    return ((asks & RANDOM) != 0) & ((asks & TRUNCATION) != 0)


@triton.jit
def finite_or_zero(largest):
    """What to measure distances from: -inf - -inf would be NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


# ---- the winner ----


@triton.jit
def pack(score, ids):
    """int64 whose largest is the largest score (NaN above all), the lowest id among equals."""
    score = score + 0.0  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(score == score, order, 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (ids ^ LARGEST_ID).to(tl.int64)


@triton.jit
def packed_id(packed):
    return (packed & LARGEST_ID).to(tl.int32) ^ LARGEST_ID


@triton.jit
def packed_score(packed):
    order = (packed >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# ---- noise ----


@triton.jit
def mix32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def row_keys(params_i, slot, position):
    """Two uint32 keys of (seed, position)."""
    low = tl.load(params_i + slot * WIDTH + SEED_LOW_AT).to(tl.uint32)
    high = tl.load(params_i + slot * WIDTH + SEED_HIGH_AT).to(tl.uint32)
    place = position.to(tl.uint32)
    first = mix32(mix32(low + 0x9E3779B9) ^ place)
    second = mix32(mix32(first + high) ^ (place * 0x9E3779B9))
    return first, second


@triton.jit
def noise_bits(first, second, ids):
    """31 uniform bits of each token, int32."""
    x = ids.to(tl.uint32) * 0x9E3779B9 + first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += second
    x *= 0x846CA68B
    x ^= x >> 16
    return (x & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _log1p(f):
    """For |f| <= 1/3, to about one unit in the last place."""
    q = tl.fma(f, C7, C6)
    q = tl.fma(q, f, C5)
    q = tl.fma(q, f, C4)
    q = tl.fma(q, f, C3)
    q = tl.fma(q, f, C2)
    q = tl.fma(q, f, C1)
    q = tl.fma(q, f, C0)
    q = tl.fma(q, f, -0.5)
    return tl.fma(q * f, f, f)


@triton.jit
def _split(x):
    """x = 2^exponent (1 + f) with 2/3 <= 1 + f < 4/3, for positive normal x."""
    bits = x.to(tl.int32, bitcast=True)
    shift = (bits - TWO_THIRDS) & -0x800000
    f = (bits - shift).to(tl.float32, bitcast=True) - 1.0
    return (shift >> 23).to(tl.float32), f


@triton.jit
def log_exponential(first, second, ids):
    """Logarithms of the tokens' standard exponential variates."""
    return log_exponential_of(noise_bits(first, second, ids))


@triton.jit
def log_exponential_of(bits):
    v = (bits.to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    exponent, f = _split(1.0 - v)
    f = tl.where(exponent == 0.0, -v, f)  # exact, where 1 - v has lost the digits of v
    variate = -tl.fma(exponent, LN_2, _log1p(f))
    exponent, f = _split(variate)
    return tl.fma(exponent, LN_2, _log1p(f))


# ---- the state ----


@triton.jit
def commit(token, row, slot, position, tokens, history, history_stride, seen, vocab, penalised):
    """Token of ``row`` into the tokens drawn, the slot's history and, if it counts, its counts."""
    tl.store(tokens + row, token)
    at = history + slot.to(tl.int64) * history_stride + position
    tl.store(at, token, mask=position < history_stride)
    if penalised:
        place = seen + slot.to(tl.int64) * vocab + token
        known = tl.load(place).to(tl.int32)
        more = tl.where((known & MOST_SEEN) == MOST_SEEN, known, known + 1)
        tl.store(place, more.to(tl.int16))
