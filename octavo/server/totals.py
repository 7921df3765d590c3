"""What one API process has counted, and the sum over several of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.engine.messages import DROPPED
from octavo.types import FinishReason

Counts = tuple[list[int], float]  # of a histogram's buckets, and the sum of its values


class EngineTotals(msgspec.Struct):
    """Sequences that one engine was given. Those admitted equal those that ended (by whatever
    reason; refused by the engine and retried on another one are reasons), run and wait."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_admitted: int = 0
    ended: dict[str, int] = {}  # by reason
    queue_tokens: dict[str, int] = {}  # of prompts: engine.accounts
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    histograms: dict[str, Counts] = {}

    def after_death(self) -> EngineTotals:
        """What was open in a process that died counts as aborted."""
        aborted = FinishReason.ABORT.value
        num_open = self.num_running + self.num_waiting
        ended = {**self.ended, aborted: self.ended.get(aborted, 0) + num_open}
        dropped = self.queue_tokens.get(DROPPED, 0) + self.num_waiting_tokens
        return msgspec.structs.replace(
            self,
            **dict.fromkeys(("num_running", "num_waiting", "num_waiting_tokens"), 0),
            ended=ended,
            queue_tokens={**self.queue_tokens, DROPPED: dropped},
        )

    def add(self, more: EngineTotals) -> None:
        for name in EngineTotals.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(more, name)
            if isinstance(ours, int):
                setattr(self, name, ours + theirs)
        for counts, more_counts in (
            (self.ended, more.ended),
            (self.queue_tokens, more.queue_tokens),
        ):
            for key, count in more_counts.items():
                counts[key] = counts.get(key, 0) + count
        for name, (buckets, value) in more.histograms.items():
            known, sum_so_far = self.histograms.get(name, ([0] * len(buckets), 0.0))
            if len(known) == len(buckets):
                both = [a + b for a, b in zip(known, buckets)]
                self.histograms[name] = (both, sum_so_far + value)


class Totals(msgspec.Struct):
    """Of one API process, or the sum of several."""

    engines: dict[int, EngineTotals] = {}  # by replica
    num_in_flight: int = 0  # HTTP requests
    num_timed_out: int = 0
    refused: dict[str, int] = {}  # by HTTP status

    @property
    def num_running(self) -> int:
        """Sequences, over all engines."""
        return sum(engine.num_running for engine in self.engines.values())

    @property
    def num_waiting(self) -> int:
        return sum(engine.num_waiting for engine in self.engines.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(engine.num_prompt_tokens for engine in self.engines.values())

    @property
    def num_generated_tokens(self) -> int:
        return sum(engine.num_generated_tokens for engine in self.engines.values())

    def after_death(self) -> Totals:
        """The last counts of a process that died."""
        engines = {index: engine.after_death() for index, engine in self.engines.items()}
        return msgspec.structs.replace(self, num_in_flight=0, engines=engines)


def summed(parts: Iterable[Totals]) -> Totals:
    total = Totals()
    for part in parts:
        for name in Totals.__struct_fields__:
            ours, theirs = getattr(total, name), getattr(part, name)
            if isinstance(ours, int):
                setattr(total, name, ours + theirs)
        for index, engine in part.engines.items():
            total.engines.setdefault(index, EngineTotals()).add(engine)
        for key, count in part.refused.items():
            total.refused[key] = total.refused.get(key, 0) + count
    return total
