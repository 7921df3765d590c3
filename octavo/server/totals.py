"""What one API process has counted, and the sum over several of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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

    def after_death(self) -> EngineTotals:
        """What was open in a process that died counts as aborted."""
        aborted = FinishReason.ABORT.value
        num_open = self.num_running + self.num_waiting
        ended = {**self.ended, aborted: self.ended.get(aborted, 0) + num_open}
        return EngineTotals(num_admitted=self.num_admitted, ended=ended)

    def add(self, more: EngineTotals) -> None:
        for name in ("num_running", "num_waiting", "num_waiting_tokens", "num_admitted"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for reason, count in more.ended.items():
            self.ended[reason] = self.ended.get(reason, 0) + count


class Totals(msgspec.Struct):
    """Of one API process, or the sum of several."""

    engines: dict[int, EngineTotals] = {}  # by replica
    num_in_flight: int = 0  # HTTP requests
    num_timed_out: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    refused: dict[str, int] = {}  # by HTTP status
    histograms: dict[str, Counts] = {}

    @property
    def num_running(self) -> int:
        """Sequences, over all engines."""
        return sum(engine.num_running for engine in self.engines.values())

    @property
    def num_waiting(self) -> int:
        return sum(engine.num_waiting for engine in self.engines.values())

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
        for name, (buckets, value) in part.histograms.items():
            known, sum_so_far = total.histograms.get(name, ([0] * len(buckets), 0.0))
            if len(known) == len(buckets):
                both = [a + b for a, b in zip(known, buckets)]
                total.histograms[name] = (both, sum_so_far + value)
    return total
