"""A replica: the place of an engine that is started again when it dies, and its counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.accounts import no_ends, no_tokens
from octavo.engine.client import ProcessClient
from octavo.engine.launch import Launcher
from octavo.engine.messages import EngineInfo, EngineStats
from octavo.engine.routing import SEQUENCE_TOKENS, Load, RecentWork

# Of EngineStats: what only ever grows. The rest is the state of the moment.
RUNNING_TOTALS = (
    *("prefix_queries", "prefix_hits", "num_preemptions", "num_copies", "prompt_tokens"),
    *("prompt_tokens_cached", "generation_tokens", "num_steps"),
    *("num_drafts", "num_draft_tokens", "num_accepted_drafts", "drafted_at", "accepted_at"),
    "saved_seconds",
)
LIVE_COUNTS = (
    *("num_running", "num_waiting", "blocks_used", "blocks_cached", "blocks_free"),
    "graphs_pending",
)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an engine that died is started again
MOST_RESTARTS, RESTART_WINDOW = 5, 600.0  # in so many seconds; then its replica stays out


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica runs with, and where. ``joins``: nobody waits for it; it serves once an engine
    has come to its place, and again when that has gone and another has come."""

    config: EngineConfig
    launcher: Launcher
    joins: bool = False


class Restarts:
    """When an engine that has died may be started again."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self.count = 0  # ever

    def pause(self, now: float) -> float | None:
        """Seconds to wait before a restart, which is counted; None: there were too many lately."""
        while self._times and now - self._times[0] > RESTART_WINDOW:
            self._times.popleft()
        if len(self._times) >= MOST_RESTARTS:
            return None
        pause = min(FIRST_PAUSE * 2.0 ** len(self._times), LONGEST_PAUSE)
        self._times.append(now)
        self.count += 1
        return pause

    @property
    def num_recent(self) -> int:
        return len(self._times)


class Replica:
    """``client`` speaks to the engine that runs there now; each engine has a client of its own, so
    nothing that an earlier one still sends can be taken for the present one's."""

    def __init__(self, index: int, spec: ReplicaSpec, connect: Callable[[], ProcessClient]) -> None:
        """``connect`` makes the client of the next engine."""
        self.index = index
        self.spec = spec
        self.restarts = Restarts()
        self.work = RecentWork()
        self.given_up = ""  # why there will be no engine any more
        self.in_service = False  # the engine has loaded, and been given all it needs
        self.found: EngineInfo | None = None  # by the last engine that has loaded
        self._connect = connect
        self._past_admitted = 0
        self._past_ended = no_ends()
        self._past_tokens = no_tokens()
        self._past_stats = EngineStats(time=0.0)
        self.client = connect()

    def reconnect(self) -> ProcessClient:
        """The client of a further engine in this place; the last one's counts are kept."""
        last = self.client
        self._past_admitted += last.num_admitted
        self._past_ended = self.ended
        self._past_tokens = self.queue_tokens
        self._past_stats = self.stats
        self.in_service = False
        self.client = self._connect()
        return self.client

    def replaced(self) -> None:
        """Another client of the engine has started another one; ours speaks to that now."""
        self._past_stats = self.stats
        self.client.stats = EngineStats(time=0.0)

    # ---- state ----

    @property
    def serves(self) -> bool:
        """Requests may go there."""
        return not self.client.draining and self.problem() is None

    def problem(self) -> str | None:
        """Why no request may go there; None while it makes progress."""
        if problem := self.given_up or self.client.problem():
            if self.spec.joins and self.client.alive and self.client.pid is None:
                return "no node has joined"
            return problem
        return None if self.in_service else "the model is still loading"

    @property
    def info(self) -> EngineInfo | None:
        """Of the engine that serves; None while there is none."""
        return self.client.info if self.client.problem() is None else None

    def load(self, now: float) -> Load:
        client, stats = self.client, self.client.stats
        num_sequences = client.num_open
        if client.seat.count > 1:  # those of other API processes, as of the last step
            num_sequences = max(num_sequences, stats.num_running + stats.num_waiting)
        outstanding = SEQUENCE_TOKENS * num_sequences + client.num_pending_tokens
        return Load(outstanding, self.work.update(computed_tokens(stats), now))

    def facts(self) -> dict[str, Any]:
        """For people and programs that ask how the replica is."""
        info = self.info
        return {
            "index": self.index,
            "problem": self.problem(),
            "place": self.spec.launcher.place,
            "pid": self.client.pid if self.client.alive else None,
            "restarts": self.restarts.count,
            "device": info.device if info else None,
            "num_blocks": info.num_blocks if info else None,
            "num_running": self.client.num_running,
            "num_waiting": self.client.num_waiting,
        }

    # ---- counts, of all engines that were here ----

    @property
    def num_admitted(self) -> int:
        return self._past_admitted + self.client.num_admitted

    @property
    def ended(self) -> dict[str, int]:
        return _added(self._past_ended, self.client.ended)

    @property
    def queue_tokens(self) -> dict[str, int]:
        return _added(self._past_tokens, self.client.queue_tokens)

    @property
    def stats(self) -> EngineStats:
        """The state of the engine that runs now, and running totals over all that were here."""
        now, past = self.client.stats, self._past_stats
        counts = {name: added([getattr(now, name), getattr(past, name)]) for name in RUNNING_TOTALS}
        if not self.client.alive:
            counts.update(dict.fromkeys(LIVE_COUNTS, 0))
        return msgspec.structs.replace(now, **counts)


def _added(past: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    both = Counter(past)
    both.update(now)
    return dict(both)


def computed_tokens(stats: EngineStats) -> int:
    """Tokens that the engine has computed."""
    return stats.prompt_tokens - stats.prompt_tokens_cached + stats.generation_tokens


def added(values: list[Any]) -> Any:
    """The sum of numbers; of lists of them, by place."""
    if values and isinstance(values[0], list):
        return [sum(column) for column in zip_longest(*values, fillvalue=0)]
    return sum(values)


def summed_stats(parts: list[EngineStats]) -> EngineStats:
    """Counts added up. What belongs to one step of one engine is left out."""
    names = (*RUNNING_TOTALS, *LIVE_COUNTS)
    sums = {name: added([getattr(part, name) for part in parts]) for name in names}
    return EngineStats(time=max(part.time for part in parts), **sums)


def common_info(replicas: list[Replica]) -> EngineInfo:
    """What holds for each of those replicas that have loaded: a request that fits this fits any of
    them."""
    loaded = [(replica.found, replica.spec.launcher.place) for replica in replicas]
    found = [(info, place) for info, place in loaded if info is not None]
    infos = [info for info, _ in found]
    first = infos[0]
    if len(infos) == 1:
        return first
    smallest = ("max_model_len", "num_blocks", "max_num_seqs", "kv_cache_bytes")
    least = {name: min(getattr(info, name) for info in infos) for name in smallest}
    places = ", ".join(f"{info.device} ({place})" for info, place in found)
    reasons = {"data_parallel_size": f"{len(infos)} replicas, each with these values: {places}"}
    return msgspec.structs.replace(first, **least, reasons={**first.reasons, **reasons})
