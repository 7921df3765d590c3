"""Which layers each pipeline stage holds. Never imports torch.

A stage is a range of layers. The first one has the embedding besides, the last one the norm and the
head. What the stages take in memory is balanced, since a decoding step reads each weight once: the
largest stage then also takes the longest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from octavo.types import ConfigError

Range = tuple[int, int]  # first, and one after the last


@dataclass(frozen=True)
class Stage:
    """Stage ``index`` of ``count``: the layers from ``first_layer`` on, before ``end_layer``."""

    index: int
    count: int
    first_layer: int
    end_layer: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding: token ids go in, otherwise hidden states."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the norm and the head: logits come out, otherwise hidden states."""
        return self.index == self.count - 1

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer


def all_layers(count: int) -> Stage:
    """The one stage of a model that is not divided."""
    return Stage(0, 1, 0, count)


def divide(
    bytes_per_layer: Sequence[int], first_extra: int, last_extra: int, stages: int
) -> list[Stage]:
    """As ``layer_ranges``, the stages in order."""
    ranges = layer_ranges(bytes_per_layer, first_extra, last_extra, stages)
    return [Stage(index, stages, *own) for index, own in enumerate(ranges)]


def check_stages(num_layers: int, stages: int) -> None:
    """Raises ConfigError for more stages than layers."""
    if stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has {num_layers} layers, and a stage "
            f"needs one at least; use 1 to {num_layers}"
        )


def layer_ranges(
    bytes_per_layer: Sequence[int], first_extra: int, last_extra: int, stages: int
) -> list[Range]:
    """Contiguous ranges of layers, one at least for each stage, whose largest stage takes as few
    bytes as can be; among those, with the least sum of squares, so that the others are even too.

    ``first_extra``: bytes of what the first stage has besides (embedding), ``last_extra``: the last
    one (norm, head). Raises ConfigError for more stages than layers.
    """
    count = len(bytes_per_layer)
    check_stages(count, stages)
    sizes = list(bytes_per_layer)
    sizes[0] += first_extra
    sizes[-1] += last_extra
    before = [0, *accumulate(sizes)]
    largest = _least_largest(sizes, stages)
    # Of each stage: where it may end -> (least sum of squares so far, its first layer).
    ends: list[dict[int, Range]] = [{0: (0, 0)}]
    for stage in range(1, stages + 1):
        found: dict[int, Range] = {}
        for first, (squares, _) in ends[-1].items():
            for end in range(first + 1, count - (stages - stage) + 1):
                size = before[end] - before[first]
                if size > largest:
                    break
                candidate = (squares + size**2, first)
                found[end] = min(found.get(end, candidate), candidate)
        ends.append(found)
    ranges: list[Range] = []
    end = count
    for found in reversed(ends[1:]):
        first = found[end][1]
        ranges.append((first, end))
        end = first
    return ranges[::-1]


def _least_largest(sizes: Sequence[int], stages: int) -> int:
    """The largest stage where they are divided best: by bisection, the least with which so many
    stages, filled one after the other, hold all layers. Each can then have one at least, since
    dividing a stage further makes none larger."""

    def suffices(most: int) -> bool:
        used, left = 1, most
        for size in sizes:
            if size > left:
                used, left = used + 1, most
            left -= size
        return used <= stages

    low = max(sizes)
    return low + bisect_left(range(low, sum(sizes)), True, key=suffices)
