"""What the API process measures in passing, kept in light histograms, and sums over processes.

``exposition`` makes families of it, and of the engines' live state, when Prometheus scrapes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec

from octavo.engine.messages import EngineStats
from octavo.engine.replica import Replica
from octavo.engine.replicas import Replicas
from octavo.server.exposition import Exposition
from octavo.server.families import page
from octavo.server.group import Board
from octavo.server.histograms import StepHistograms
from octavo.server.measures import SUMMED, EngineMeasures
from octavo.server.totals import EngineTotals, Totals, summed

BOARD_SECONDS = 0.25
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Totals).decode


class Metrics:
    """One per API process."""

    def __init__(self, client: Replicas, model_name: str, max_model_len: int = 131072) -> None:
        self._client = client
        self._max_model_len = max_model_len
        self.engines: dict[int, EngineMeasures] = {}
        self.steps: defaultdict[int, StepHistograms] = defaultdict(StepHistograms)  # by replica
        self.refused: dict[int, int] = {400: 0, 404: 0, 429: 0, 503: 0}  # by HTTP status
        self.num_timed_out = 0
        self.in_flight: Callable[[], int] = lambda: 0  # HTTP requests; set by their owner
        self._board: Board | None = None  # of several API processes
        self._departed = Totals()
        self._exposition = Exposition(self, client, model_name)

    def size_by_tokens(self, max_model_len: int) -> None:
        """Histograms of token counts get their bounds once the model's length is known."""
        self._max_model_len = max_model_len
        self.engines.clear()

    # ---- several API processes ----

    def own(self) -> Totals:
        """What this process has counted, and those that it has survived."""
        counted = Totals(
            engines={replica.index: self._counted(replica) for replica in self._client.replicas},
            num_in_flight=self.in_flight(),
            num_timed_out=self.num_timed_out,
            refused={str(status): count for status, count in self.refused.items()},
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

    def of(self, engine: int) -> EngineMeasures:
        """Of the sequences that the engine has: ``RequestStream.engine_of`` says which."""
        if (found := self.engines.get(engine)) is None:
            found = self.engines[engine] = EngineMeasures(self._max_model_len)
        return found

    def on_step(self, engine: int, stats: EngineStats) -> None:
        self.steps[engine].observe(stats)

    # ---- the page ----

    def page(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format the scraper accepts, and its content type."""
        return page(self._exposition.families(), accept)

    def _counted(self, replica: Replica) -> EngineTotals:
        client, measures = replica.client, self.of(replica.index)
        histograms = {name: getattr(measures, name) for name in SUMMED}
        return EngineTotals(
            num_running=client.num_running,
            num_waiting=client.num_waiting,
            num_waiting_tokens=client.num_waiting_tokens,
            num_admitted=replica.num_admitted,
            ended=replica.ended,
            queue_tokens=replica.queue_tokens,
            num_prompt_tokens=measures.num_prompt_tokens,
            num_cached_tokens=measures.num_cached_tokens,
            num_generated_tokens=measures.num_generated_tokens,
            histograms={name: (h.counts, h.total) for name, h in histograms.items()},
        )
