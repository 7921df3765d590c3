"""What a worker reports about itself once it has started. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.types import Progress


@dataclass(frozen=True)
class WorkerInfo:
    """Facts found while starting, all resolved."""

    architecture: str
    dtype: str
    device: str  # for people: "cpu", "cuda:0 NVIDIA H200"
    device_kind: str  # for code: "cpu" or "cuda"
    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    implementations: dict[str, str]  # operation -> chosen version
    startup_seconds: dict[str, float]  # phase -> seconds
    reasons: dict[str, str]  # setting -> why, for those nobody asked for


class PhaseClock:
    """Times the phases of start-up and passes them on to whoever shows progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._phase: str | None = None
        self._began = 0.0
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, fraction: float = -1.0, num_bytes: int = 0) -> None:
        """A phase begins, or is ``fraction`` done (``types.Progress``)."""
        if phase != self._phase:
            self._close()
            self._phase, self._began = phase, time.perf_counter()
        self._progress(phase, fraction, num_bytes)

    def finish(self) -> dict[str, float]:
        """Seconds of each phase."""
        self._close()
        self._phase = None
        return dict(self._seconds)

    def _close(self) -> None:
        if self._phase is not None:
            spent = time.perf_counter() - self._began
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + spent
