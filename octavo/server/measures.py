"""What one API process has measured of one engine's sequences."""

from __future__ import annotations

from octavo.server.histograms import (
    FIRST_TOKEN_BUCKETS,
    N_BUCKETS,
    PER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    Histogram,
    token_buckets,
)
from octavo.types import RequestTimings, SamplingParams

# Histograms that each API process has its part of; those of steps are the engine's.
SUMMED = (
    *("first_token", "inter_token", "per_output_token", "request", "queue", "inference"),
    *("prefill", "decode", "prompt_tokens", "generation_tokens", "max_generation_tokens"),
    *("params_n", "params_max_tokens"),
)


class EngineMeasures:
    """``max_model_len``: where the histograms of token counts end."""

    def __init__(self, max_model_len: int) -> None:
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(PER_TOKEN_BUCKETS)
        self.per_output_token = Histogram(PER_TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.inference = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.decode = Histogram(REQUEST_BUCKETS)
        self.params_n = Histogram(N_BUCKETS)
        bounds = token_buckets(max_model_len)
        self.prompt_tokens = Histogram(bounds)
        self.generation_tokens = Histogram(bounds)
        self.max_generation_tokens = Histogram(bounds)
        self.params_max_tokens = Histogram(bounds)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def on_admitted(self, params: SamplingParams, max_tokens: int) -> None:
        self.params_n.observe(params.n)
        self.params_max_tokens.observe(max_tokens)

    def on_started(self, num_prompt: int, num_cached: int) -> None:
        """A prompt, counted once however many choices it has."""
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached

    def on_finished(
        self, timings: RequestTimings, num_prompt: int, num_output: int, most_output: int
    ) -> None:
        """A sequence ended by itself: stop or length. ``most_output``: of its request's choices."""
        self.prompt_tokens.observe(num_prompt)
        self.generation_tokens.observe(num_output)
        self.max_generation_tokens.observe(most_output)
        t = timings
        if t.first_token < 0:
            return
        self.request.observe(t.last_token - t.arrival)
        self.queue.observe(t.first_scheduled - t.arrival)
        self.inference.observe(t.last_token - t.first_scheduled)
        self.prefill.observe(t.first_token - t.first_scheduled)
        self.decode.observe(t.last_token - t.first_token)
        if num_output > 1:
            self.per_output_token.observe((t.last_token - t.first_token) / (num_output - 1))

    def on_embedded(self, timings: RequestTimings, now: float, num_prompt: int) -> None:
        """A prompt's vector is there; it draws no tokens."""
        self.prompt_tokens.observe(num_prompt)
        self.request.observe(now - timings.arrival)
        self.queue.observe(timings.first_scheduled - timings.arrival)
