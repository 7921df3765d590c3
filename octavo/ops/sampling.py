"""Operations of the sampler: torch definitions, row by row, on any device.

All take a batch of rows [n, V] and never let one row see another. "Floors" are how truncations
compose: min_p, top_k and top_p each keep the tokens whose probability is at least a floor, so
tokens that tie at a floor are all kept and nothing depends on the order of a sort.

The draw is stateless: the noise of a token is a hash of (seed, position, token id), and the drawn
token is the winner of an exponential race, argmax p / E with E = -log1p(-v). docs/sampling.md
states the hash; it is 32-bit integer arithmetic only, so every backend can repeat its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")
# Candidates of top_p are first looked for above (1 - top_p) / FIRST_TRY: some hundreds of tokens
# for a language model, which is nearly always enough.
FIRST_TRY = 1024
# A probability below this never wins a race, so it need not run.
SMALLEST = float(torch.finfo(torch.float32).tiny)


def most_likely(scores: Tensor) -> Tensor:
    """int64 [n]: the place of each row's largest entry, the first of equals; NaN is largest."""
    if scores.device.type == "cpu":  # NumPy's is vectorised: ten times as fast as torch 2.13's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


GOLDEN = _signed(0x9E3779B9)  # 2^32 / golden ratio: spreads consecutive ids
# Multipliers of "lowbias32" (C. Wellons, hash-prospector, public domain).
MUL_1 = _signed(0x7FEB352D)
MUL_2 = _signed(0x846CA68B)


def mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser in wrapping int32; shifts are logical. Works in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= MUL_1
    x ^= (x >> 15) & 0x1FFFF
    x *= MUL_2
    x ^= (x >> 16) & 0xFFFF
    return x


def row_keys(seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys [n] of each (seed, position); the seed's words and positions are int32 [n]."""
    first = mix32(mix32(seed_low + GOLDEN) ^ positions)
    second = mix32(mix32(first + seed_high) ^ positions * GOLDEN)
    return first, second


def noise_bits(keys: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """[n, V]: 31 uniform bits (int32 >= 0) of each token. ids: int32 [V] or [n, V]."""
    first, second = keys
    x = ids * GOLDEN + first[:, None]
    x ^= (x >> 16) & 0xFFFF
    x *= MUL_1
    x ^= (x >> 15) & 0x1FFFF
    x += second[:, None]
    x *= MUL_2
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    return x


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variates, float32, from 31 bits: finite, above 0, fine near 0."""
    v = bits.to(torch.float32)
    v += 0.5
    v *= -(2.0**-31)
    v.clamp_(min=-(1.0 - 2.0**-24))
    return v.log1p_().neg_()


def race(probs: Tensor, ids: Tensor, floor: Tensor | None, keys: tuple[Tensor, Tensor]) -> Tensor:
    """The index in each row [n] (int64) whose token wins: argmax of p / E where p >= floor.

    probs: [n, C], need not sum to 1. ids: int32 [C] or [n, C], the token ids behind them.
    """
    score = exponential(noise_bits(keys, ids))
    torch.div(probs, score, out=score)
    if floor is not None:
        score.masked_fill_(probs < floor[:, None], -1.0)
    return most_likely(score)


def min_p_floor(probs: Tensor, min_p: Tensor) -> Tensor:
    """[n]: min_p times the largest probability of the row (0 keeps all)."""
    return probs.amax(-1) * min_p


def top_k_floor(probs: Tensor, top_k: Tensor) -> Tensor:
    """[n]: the top_k-th largest probability. top_k: int64 [n]; values of V and more keep all."""
    vocab = probs.shape[-1]
    largest = int(top_k.clamp(max=vocab).max())
    values = probs.topk(largest, dim=-1).values
    kth = values.gather(-1, (top_k.clamp(max=vocab) - 1)[:, None]).squeeze(-1)
    return torch.where(top_k >= vocab, torch.zeros_like(kth), kth)


def compact(probs: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at or above the floor, in the order of their ids: (probs, ids int32) [n, C].

    C is the largest count of a row; shorter rows end in probability 0 (id 0).
    """
    num_rows, vocab = probs.shape
    floor = floor.clamp(min=SMALLEST)
    flat = (probs >= floor[:, None]).view(-1).nonzero().squeeze(-1)
    rows = flat // vocab
    counts = torch.bincount(rows, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(flat), device=flat.device) - starts[rows]
    width = max(1, int(counts.max()))  # a row of NaN has no candidate at all
    found = probs.new_zeros(num_rows, width)
    found[rows, column] = probs.view(-1)[flat]
    ids = torch.zeros(num_rows, width, dtype=torch.int32, device=probs.device)
    ids[rows, column] = (flat - rows * vocab).to(torch.int32)
    return found, ids


def nucleus(
    probs: Tensor, floor: Tensor, top_p: Tensor, divisor: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """top_p over the tokens at or above ``floor``: (probs, ids, floor, complete).

    The nucleus is the smallest set of most likely tokens that holds at least ``top_p`` of the mass
    of those tokens; the returned floor [n] is its least likely member's probability. Candidates are
    taken above (1 - top_p) x mass / divisor. What lies below with divisor V weighs less than
    (1 - top_p), so V is always enough; with a smaller one ``complete`` [n] (bool) says where.
    """
    # float64: the order of a sum, which may depend on the batch, must not move a cut.
    mass = torch.ones_like(floor, dtype=torch.float64)
    if bool(((floor > 0) & (top_p < 1)).any()):
        kept = torch.where(probs >= floor[:, None], probs, 0.0).sum(-1, dtype=torch.float64)
        mass = torch.where(floor > 0, kept, mass)
    bound = ((1.0 - top_p.double()) * mass / divisor).to(probs.dtype)
    found, ids = compact(probs, torch.maximum(floor, bound))
    ranked = found.sort(dim=-1, descending=True).values
    total = ranked.cumsum(-1, dtype=torch.float64)
    wanted = (top_p.double() * mass)[:, None]
    complete = (total[:, -1:] >= wanted).squeeze(-1) | (floor >= bound)
    last = (total < wanted).sum(-1, keepdim=True).clamp(max=found.shape[-1] - 1)
    return found, ids, ranked.gather(-1, last).squeeze(-1), complete


def draw_above(probs: Tensor, floor: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """A token id [n] (int64) of each row, among the tokens at or above floor [n]."""
    found, ids = compact(probs, floor)
    winner = race(found, ids, None, keys)
    return ids.gather(-1, winner[:, None]).squeeze(-1).to(torch.int64)


def draw_truncated(
    probs: Tensor,
    floor: Tensor,
    top_p: Tensor,
    keys: tuple[Tensor, Tensor],
    divisor: int = FIRST_TRY,
) -> Tensor:
    """A token id [n] (int64) of each row, from its nucleus among the tokens at or above floor.

    probs: float32 [n, V], softmax rows; top_p: float32 [n], 1 where it is off; keys: ``row_keys``.
    """
    found, ids, cut, complete = nucleus(probs, floor, top_p, divisor)
    winner = race(found, ids, cut, keys)
    tokens = ids.gather(-1, winner[:, None]).squeeze(-1).to(torch.int64)
    if divisor < probs.shape[-1] and not bool(complete.all()):
        rest = (~complete).nonzero().squeeze(-1)
        again = (keys[0][rest], keys[1][rest])
        wide = draw_truncated(probs[rest], floor[rest], top_p[rest], again, probs.shape[-1])
        tokens[rest] = wide
    return tokens


def draw(probs: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """A token id [n] (int64) of each row of probs (float32 [n, V]), by its own noise."""
    ids = torch.arange(probs.shape[-1], dtype=torch.int32, device=probs.device)
    return race(probs, ids, None, keys)


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In place, on float32 [n, V].

    Repetition divides positive and multiplies negative logits of every token of prompt or output;
    frequency subtracts once per occurrence in the output, presence once if there is any.
    output_counts: int32 [n, V]; prompt_mask: bool [n, V]; the penalties: float32 [n].
    """
    in_output = output_counts > 0
    seen = in_output | prompt_mask
    factor = torch.where(logits > 0, 1.0 / repetition[:, None], repetition[:, None])
    logits.mul_(torch.where(seen, factor, 1.0))
    logits.sub_(output_counts * frequency[:, None])
    logits.sub_(in_output * presence[:, None])


def top_logprobs(logprobs: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids int32 [n, k + 1], values float32 [n, k + 1] and ranks int32 [n], of log-softmax rows.

    Column 0 is ``tokens`` (int64 [n]); the k most likely follow. Rank 1 is the most likely. NaN,
    which only a broken model gives, is reported as -inf.
    """
    logprobs = logprobs.nan_to_num(nan=NEG_INF, neginf=NEG_INF)
    chosen = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(k, dim=-1)
    return (
        torch.cat([tokens[:, None], ids], dim=-1).to(torch.int32),
        torch.cat([chosen, values], dim=-1),
        ranks.to(torch.int32),
    )
