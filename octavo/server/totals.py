"""What one API process has counted, and the sum over several of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.types import FinishReason

Counts = tuple[list[int], float]  # of a histogram's buckets, and the sum of its values


class Totals(msgspec.Struct):
    """In each process, and hence in the sum, the requests admitted equal those that ended, were
    refused by the engine, run and wait."""

    num_in_flight: int = 0  # HTTP requests
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_admitted: int = 0
    num_timed_out: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    ended: dict[str, int] = {}  # by reason
    refused: dict[str, int] = {}  # by HTTP status
    histograms: dict[str, Counts] = {}

    def after_death(self) -> Totals:
        """The last counts of a process that died: what it had open counts as aborted."""
        ended = dict(self.ended)
        aborted = FinishReason.ABORT.value
        ended[aborted] = ended.get(aborted, 0) + self.num_running + self.num_waiting
        return msgspec.structs.replace(
            self, num_in_flight=0, num_running=0, num_waiting=0, num_waiting_tokens=0, ended=ended
        )


def summed(parts: Iterable[Totals]) -> Totals:
    total = Totals()
    for part in parts:
        for name in Totals.__struct_fields__:
            ours, theirs = getattr(total, name), getattr(part, name)
            if isinstance(ours, int):
                setattr(total, name, ours + theirs)
        for counts, more in ((total.ended, part.ended), (total.refused, part.refused)):
            for key, count in more.items():
                counts[key] = counts.get(key, 0) + count
        for name, (buckets, value) in part.histograms.items():
            known, sum_so_far = total.histograms.get(name, ([0] * len(buckets), 0.0))
            if len(known) == len(buckets):
                both = [a + b for a, b in zip(known, buckets)]
                total.histograms[name] = (both, sum_so_far + value)
    return total
