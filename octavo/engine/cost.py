"""StepCosts: what steps cost on this machine, learnt while serving.

Two tables are enough for the chunk rule: the time of a pure decode step by number of rows, and what
prompt tokens add to a step by their number. What they add has a part that does not depend on how
many they are, so a price per token would not do: from small chunks it comes out too high, and keeps
them small. Both tables are exponential averages over powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.2
# Until a prompt has been seen: a chunk that is quick on any device.
FIRST_CHUNK = 256
# Of what the rule allows: averages lag behind contexts that grow.
CAUTION = 0.8
# Prompts are a crowd when there are more than so many, and more than this share of the decoding
# rows: a place whose prompt waits decodes nothing, and many such places cost more than long steps.
CROWD = 4
CROWD_SHARE = 1 / 16
# Shorter prompts say little about the price of a token.
MIN_PROMPT_TOKENS = 32


@dataclass(slots=True)
class _Point:
    """Averages over the steps with about so many prompt tokens."""

    tokens: float
    seconds: float  # beyond those of the step's decoding rows


class StepCosts:
    """Implements ``core.scheduler.StepCost`` from observed steps."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}  # rows, rounded up to a power of two -> seconds
        self._prompt: dict[int, _Point] = {}  # prompt tokens, rounded in the same way

    def observe(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """One finished step: its decoding rows, its other tokens, its time."""
        if num_prompt_tokens == 0:
            bucket = _bucket(num_decode_rows)
            self._decode[bucket] = _average(self._decode.get(bucket), seconds)
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:
            decode = self.decode_seconds(num_decode_rows) if num_decode_rows else 0.0
            if decode is not None:
                self._observe_prompt(num_prompt_tokens, max(0.0, seconds - decode))

    def _observe_prompt(self, tokens: int, seconds: float) -> None:
        point = self._prompt.setdefault(_bucket(tokens), _Point(tokens, seconds))
        point.tokens = _average(point.tokens, tokens)
        point.seconds = _average(point.seconds, seconds)

    def decode_seconds(self, num_decode_rows: int) -> float | None:
        """Predicted time of a pure decode step; None before any was seen."""
        if not self._decode:
            return None
        bucket = _bucket(num_decode_rows)
        nearest = min(self._decode, key=lambda seen: abs(seen.bit_length() - bucket.bit_length()))
        return self._decode[nearest]

    def chunk_limit(self, num_decode_rows: int, num_prompts: int) -> int:
        """Prompt tokens that nearly double the time of a decode step with so many rows, rounded
        down to few sizes, so that a device can prepare for them. In a crowd they may take more,
        in proportion: else new requests come faster than they are computed, until they wait in
        half of all places."""
        decode = self.decode_seconds(num_decode_rows)
        if decode is None or not self._prompt:
            return FIRST_CHUNK
        share = max(1.0, num_prompts / max(CROWD, CROWD_SHARE * num_decode_rows))
        return _rounded(int(self._tokens_in(CAUTION * share * decode)))

    def _tokens_in(self, seconds: float) -> float:
        """How many prompt tokens add so much to a step: between what was seen, straight lines."""
        tokens, spent = 0.0, 0.0
        for _, point in sorted(self._prompt.items()):
            if point.seconds > seconds:
                share = (seconds - spent) / (point.seconds - spent)
                return tokens + share * (point.tokens - tokens)
            tokens, spent = point.tokens, max(spent, point.seconds)
        return tokens * seconds / spent if spent else float(FIRST_CHUNK)


def _rounded(count: int) -> int:
    """To multiples of 64 below 512, of an eighth to a quarter of the size above."""
    size = max(64, 1 << (count.bit_length() - 3)) if count >= 64 else 1
    return count // size * size


def _bucket(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
