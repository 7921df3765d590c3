"""StepCosts: what steps cost on this machine, learnt while serving.

Two figures are enough for the chunk rule: the time of a pure decode step by number of rows, and the
time a prompt token adds to a step. Both are exponential averages.
"""

from __future__ import annotations

SMOOTHING = 0.2
# Until a prompt has been seen: a chunk that is quick on any device.
FIRST_CHUNK = 256
# Shorter prompts say little about the price of a token.
MIN_PROMPT_TOKENS = 32


class StepCosts:
    """Implements ``core.scheduler.StepCost`` from observed steps."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}  # rows, rounded up to a power of two -> seconds
        self._prompt_token: float | None = None  # seconds

    def observe(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """One finished step: its decoding rows, its other tokens, its time."""
        if num_prompt_tokens == 0:
            bucket = _bucket(num_decode_rows)
            self._decode[bucket] = _average(self._decode.get(bucket), seconds)
        elif num_prompt_tokens >= MIN_PROMPT_TOKENS:
            decode = self.decode_seconds(num_decode_rows) if num_decode_rows else 0.0
            if decode is not None:
                price = max(0.0, seconds - decode) / num_prompt_tokens
                self._prompt_token = _average(self._prompt_token, price)

    def decode_seconds(self, num_decode_rows: int) -> float | None:
        """Predicted time of a pure decode step; None before any was seen."""
        if not self._decode:
            return None
        bucket = _bucket(num_decode_rows)
        nearest = min(self._decode, key=lambda seen: abs(seen.bit_length() - bucket.bit_length()))
        return self._decode[nearest]

    def chunk_limit(self, num_decode_rows: int) -> int:
        """Prompt tokens that double the time of a decode step with so many rows."""
        decode = self.decode_seconds(num_decode_rows)
        if decode is None or not self._prompt_token:
            return FIRST_CHUNK
        return int(decode / self._prompt_token)


def _bucket(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
