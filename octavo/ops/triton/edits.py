"""Allowed ids, bad words, min_tokens and logit_bias on the device: logits are changed in place
before a draw. One program a row; rows that ask for none of it are left alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import needs
from octavo.ops.needs import Edit, Int
from octavo.ops.triton.launch import options
from octavo.ops.triton.sampling_parts import EDITS, NEEDS_AT, WIDTH

EDIT_WIDTH = tl.constexpr(needs.EDIT_WIDTH)
PROMPT_LEN_AT = tl.constexpr(int(Int.PROMPT_LEN))
MIN_TOKENS_AT = tl.constexpr(int(Int.MIN_TOKENS))
ALLOWED_AT = tl.constexpr(int(Edit.ALLOWED))
BIAS_AT = tl.constexpr(int(Edit.BIAS))
NUM_BIAS_AT = tl.constexpr(int(Edit.NUM_BIAS))
STOPS_AT = tl.constexpr(int(Edit.STOPS))
NUM_STOPS_AT = tl.constexpr(int(Edit.NUM_STOPS))
WORDS_AT = tl.constexpr(int(Edit.WORDS))
NUM_WORDS_AT = tl.constexpr(int(Edit.NUM_WORDS))
PREFIX_AT = tl.constexpr(int(Edit.PREFIX))
SAVED_AT = tl.constexpr(int(Edit.SAVED))
TILE = 4096


@triton.jit
def _ints(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _floats(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _keep_allowed(x, vocab, words, TILE: tl.constexpr):
    for first in tl.range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        bits = tl.load(words + ids // 32, mask=ids < vocab, other=0)
        banned = ((bits >> (ids % 32)) & 1) == 0
        tl.store(x + ids, float("-inf"), mask=banned & (ids < vocab))


@triton.jit
def _save(x, ids, number, saved, STEP: tl.constexpr, ROOM: tl.constexpr):
    """saved[i] = x[ids[i * STEP]]"""
    for first in tl.range(0, number, ROOM):
        i = first + tl.arange(0, ROOM)
        token = tl.load(ids + i * STEP, mask=i < number, other=0)
        tl.store(saved + i, tl.load(x + token, mask=i < number), mask=i < number)


@triton.jit
def _match(words, number, prefix, past, position, output, met, ROOM: tl.constexpr):
    """met[i]: 1.0 where the output ends in all of word i but its last id, else 0.0. past: the
    slot's history."""
    for first in tl.range(0, number, ROOM):
        i = first + tl.arange(0, ROOM)
        word = words + i * (2 + prefix)
        same = tl.load(word + 1, mask=i < number, other=0) <= output
        for j in tl.range(0, prefix):
            wanted = tl.load(word + 2 + j, mask=i < number, other=-1)
            at = position - prefix + j
            found = tl.load(past + at, mask=at >= 0, other=-1)
            same = same & ((wanted == found) | (wanted < 0))
        tl.store(met + i, tl.where(same, 1.0, 0.0), mask=i < number)


@triton.jit
def _put(x, bans, BACK: tl.constexpr, ROOM: tl.constexpr):
    """Bans the stop ids and the last ids of the words that are met; BACK: takes that back."""
    stops, num_stops, saved, words, num_words, step, saved_ends, met = bans
    for first in tl.range(0, num_stops, ROOM):
        i = first + tl.arange(0, ROOM)
        token = tl.load(stops + i, mask=i < num_stops, other=0)
        value = tl.full([ROOM], float("-inf"), tl.float32)
        if BACK:
            value = tl.load(saved + i, mask=i < num_stops)
        tl.store(x + token, value, mask=i < num_stops)
    for first in tl.range(0, num_words, ROOM):
        i = first + tl.arange(0, ROOM)
        token = tl.load(words + i * step, mask=i < num_words, other=0)
        value = tl.full([ROOM], float("-inf"), tl.float32)
        if BACK:
            value = tl.load(saved_ends + i, mask=i < num_words)
        hit = tl.load(met + i, mask=i < num_words, other=0.0) > 0
        tl.store(x + token, value, mask=hit)


@triton.jit
def _any_left(x, vocab, TILE: tl.constexpr):
    left = tl.zeros([TILE], tl.int32)
    for first in tl.range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        score = tl.load(x + ids, mask=ids < vocab, other=float("-inf"))
        left |= (score != float("-inf")).to(tl.int32)
    return tl.max(left, 0) > 0


@triton.jit
def _edit(
    logits, logits_stride, slots, positions, params_i, edits, history, history_stride, vocab,
    TILE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """grid (rows,)."""
    r = tl.program_id(0)
    slot = tl.load(slots + r)
    if slot < 0:
        return
    params = params_i + slot * WIDTH
    if (tl.load(params + NEEDS_AT) & EDITS) == 0:
        return
    x = logits + r.to(tl.int64) * logits_stride
    own = edits + slot * EDIT_WIDTH
    allowed = tl.load(own + ALLOWED_AT)
    if allowed != 0:
        _keep_allowed(x, vocab, _ints(allowed), TILE)
        tl.debug_barrier()

    position = tl.load(positions + r)
    output = position - tl.load(params + PROMPT_LEN_AT)
    all_stops = tl.load(own + NUM_STOPS_AT).to(tl.int32)
    num_stops = tl.where(output < tl.load(params + MIN_TOKENS_AT), all_stops, 0)
    num_words = tl.load(own + NUM_WORDS_AT).to(tl.int32)
    if num_stops + num_words > 0:
        stops = _ints(tl.load(own + STOPS_AT))
        words = _ints(tl.load(own + WORDS_AT))
        prefix = tl.load(own + PREFIX_AT).to(tl.int32)
        saved = _floats(tl.load(own + SAVED_AT))
        saved_ends = saved + all_stops
        met = saved_ends + num_words
        past = history + slot.to(tl.int64) * history_stride
        _save(x, stops, num_stops, saved, 1, ROOM)
        _save(x, words, num_words, saved_ends, 2 + prefix, ROOM)
        _match(words, num_words, prefix, past, position, output, met, ROOM)
        tl.debug_barrier()
        bans = (stops, num_stops, saved, words, num_words, 2 + prefix, saved_ends, met)
        _put(x, bans, False, ROOM)
        tl.debug_barrier()
        if not _any_left(x, vocab, TILE):
            tl.debug_barrier()
            _put(x, bans, True, ROOM)
        tl.debug_barrier()

    number = tl.load(own + NUM_BIAS_AT).to(tl.int32)
    ids = _ints(tl.load(own + BIAS_AT))
    for first in tl.range(0, number, ROOM):
        i = first + tl.arange(0, ROOM)
        token = tl.load(ids + i, mask=i < number, other=0)
        value = tl.load(ids + number + i, mask=i < number, other=0)
        score = tl.load(x + token, mask=i < number)
        tl.store(x + token, score + value.to(tl.float32, bitcast=True), mask=i < number)


def edit(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    params_i: Tensor,
    edits: Tensor,
    history: Tensor,
    tile: int = TILE,
) -> None:
    """Changes the rows of logits whose slots ask for it, in place. A row that bad words and early
    stops would leave without a token keeps the scores it had before them.

    logits: float32 [r, V], rows contiguous; slots (-1: left alone; none twice), positions (of the
    token to be drawn): int32 [r]; params_i: int32 [slots, WIDTH]; edits: int64
    [slots, EDIT_WIDTH], columns of ``needs.Edit``; history: int32 [slots, max_len + 1].
    """
    rows, vocab = logits.shape
    _edit[(rows,)](
        logits, logits.stride(0), slots, positions, params_i, edits, history, history.stride(0),
        vocab, TILE=tile, ROOM=128, **options(8),
    )  # fmt: skip
