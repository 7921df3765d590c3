"""What the API process measures in passing, kept in light histograms, and sums over processes.

``exposition`` makes families of it, and of the engines' live state, when Prometheus scrapes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from octavo.engine.messages import EngineStats
from octavo.engine.replica import Replica
from octavo.engine.replicas import Replicas
from octavo.server.exposition import Exposition
from octavo.server.group import Board
from octavo.server.histograms import (
    FIRST_TOKEN_BUCKETS,
    N_BUCKETS,
    PER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    Histogram,
    StepHistograms,
    token_buckets,
)
from octavo.server.totals import EngineTotals, Totals, summed
from octavo.types import RequestTimings, SamplingParams

# Histograms that each API process has its part of; those of steps are the engine's.
SUMMED = (
    *("first_token", "inter_token", "per_output_token", "request", "queue", "inference"),
    *("prefill", "decode", "prompt_tokens", "generation_tokens", "max_generation_tokens"),
    *("params_n", "params_max_tokens"),
)
BOARD_SECONDS = 0.25
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Totals).decode


class Metrics:
    """One per API process."""

    def __init__(self, client: Replicas, model_name: str, max_model_len: int = 131072) -> None:
        self._client = client
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(PER_TOKEN_BUCKETS)
        self.per_output_token = Histogram(PER_TOKEN_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(REQUEST_BUCKETS)
        self.inference = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.decode = Histogram(REQUEST_BUCKETS)
        self.steps: defaultdict[int, StepHistograms] = defaultdict(StepHistograms)  # by replica
        self.params_n = Histogram(N_BUCKETS)
        self.refused: dict[int, int] = {400: 0, 404: 0, 429: 0, 503: 0}  # by HTTP status
        self.num_timed_out = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.size_by_tokens(max_model_len)
        self.in_flight: Callable[[], int] = lambda: 0  # HTTP requests; set by their owner
        self._board: Board | None = None  # of several API processes
        self._departed = Totals()
        self.registry = CollectorRegistry()
        self.registry.register(Exposition(self, client, model_name))

    def size_by_tokens(self, max_model_len: int) -> None:
        """Histograms of token counts get their bounds once the model's length is known."""
        bounds = token_buckets(max_model_len)
        self.prompt_tokens = Histogram(bounds)
        self.generation_tokens = Histogram(bounds)
        self.max_generation_tokens = Histogram(bounds)
        self.params_max_tokens = Histogram(bounds)

    # ---- several API processes ----

    def own(self) -> Totals:
        """What this process has counted, and those that it has survived."""
        histograms = {name: getattr(self, name) for name in SUMMED}
        counted = Totals(
            engines={replica.index: _counted(replica) for replica in self._client.replicas},
            num_in_flight=self.in_flight(),
            num_timed_out=self.num_timed_out,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            refused={str(status): count for status, count in self.refused.items()},
            histograms={name: (h.counts, h.total) for name, h in histograms.items()},
        )
        return summed([counted, self._departed])

    def totals(self) -> Totals:
        """The sum over all API processes: of the others what they wrote last, at most
        ``BOARD_SECONDS`` ago."""
        others = self._board.others() if self._board is not None else []
        return summed([self.own(), *map(_decode, others)])

    def share(self, board: Board) -> None:
        self._board = board

    async def keep_shared(self) -> None:
        """Writes what this process has counted, again and again."""
        while self._board is not None:
            self._board.write(_encode(self.own()))
            await asyncio.sleep(BOARD_SECONDS)

    def share_last(self) -> None:
        """What is left to tell at the end."""
        if self._board is not None:
            self._board.write(_encode(self.own()))

    def settle_member(self, pid: int) -> None:
        """The process has died: its counts are ours from now on, what was open in it is aborted."""
        if self._board is not None and (raw := self._board.take(pid)) is not None:
            self._departed = summed([self._departed, _decode(raw).after_death()])
            self._board.write(_encode(self.own()))

    # ---- measured in passing ----

    def on_step(self, engine: int, stats: EngineStats) -> None:
        self.steps[engine].observe(stats)

    def on_admitted(self, params: SamplingParams, max_tokens: int) -> None:
        self.params_n.observe(params.n)
        self.params_max_tokens.observe(max_tokens)

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

    # ---- the page ----

    def page(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format the scraper accepts, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def _counted(replica: Replica) -> EngineTotals:
    return EngineTotals(
        num_running=replica.client.num_running,
        num_waiting=replica.client.num_waiting,
        num_waiting_tokens=replica.client.num_waiting_tokens,
        num_admitted=replica.num_admitted,
        ended=replica.ended,
    )
