"""What a slot's draw needs, and where a device finds its parameters: numbers that the host's slots
(worker/slots.py) and the kernels share."""

from __future__ import annotations

from enum import IntEnum

# Beyond an argmax of the raw logits; bits of ``Slots.needs`` and of the column ``NEEDS``.
RANDOM = 1
TOP_K = 2
TOP_P = 4
MIN_P = 8
PENALTIES = 16
EDITS = 32  # allowed ids, bad words, min_tokens or logit_bias
LOGPROBS = 64
GRAMMAR = 128  # a mask of the ids that may be drawn, made on the host for each draw
TRUNCATION = TOP_K | TOP_P | MIN_P


class Float(IntEnum):
    """Columns of a device's float32 parameters, one row per slot."""

    SCALE = 0  # 1 / temperature
    TOP_P = 1
    GAP = 2  # -log(min_p): how far below the largest a scaled logit may lie
    REPETITION = 3
    INVERSE_REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6


class Int(IntEnum):
    """Columns of a device's int32 parameters, one row per slot."""

    NEEDS = 0
    TOP_K = 1
    SEED_LOW = 2
    SEED_HIGH = 3
    PROMPT_LEN = 4
    MIN_TOKENS = 5


class Edit(IntEnum):
    """Columns of a device's int64 table of edits: addresses of int32 arrays on the device, 0 where
    there is nothing, and how many entries they have."""

    ALLOWED = 0  # a bit per token id
    BIAS = 1  # ids, then as many float32 values
    NUM_BIAS = 2
    STOPS = 3  # ids banned until min_tokens are out
    NUM_STOPS = 4
    WORDS = 5  # per word: its last id, the length of its prefix, the prefix aligned to the right
    NUM_WORDS = 6
    PREFIX = 7  # ids of the longest prefix
    SAVED = 8  # room for one number per stop id and two per word


WIDTH = 8  # columns of the float and of the int table
EDIT_WIDTH = 16
