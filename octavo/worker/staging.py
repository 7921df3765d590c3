"""Copies between host and device that nobody waits for: pinned buffers in turns.

A buffer is used again only when the copy that last used it is done; with one buffer more than
plans in flight that is always the case already.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PLANS_IN_FLIGHT = 2  # that the engine issues at most (engine.engine)


class Mark:
    """A place in the device's work; on a CPU everything before it is done already."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    @property
    def reached(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Blocks this thread until the device has come here."""
        if self._event is not None:
            self._event.synchronize()


class Uploads:
    """int32 values to the device, at most ``capacity`` of them at a time."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.capacity = capacity
        self._ring = [
            (torch.empty(capacity, dtype=torch.int32, pin_memory=pinned), Mark(device))
            for _ in range(PLANS_IN_FLIGHT + 1)
        ]
        self._next = 0

    def send(self, values: NDArray[np.int32], target: Tensor) -> Tensor:
        """Copies into the start of ``target`` (int32) and returns that part."""
        pinned, mark = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        mark.wait()
        pinned.numpy()[: len(values)] = values
        part = target[: len(values)]
        part.copy_(pinned[: len(values)], non_blocking=True)
        mark.record()
        return part


class Downloads:
    """int32 values from the device, into buffers that stay untouched for the plans in flight."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._ring = [
            torch.empty(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(PLANS_IN_FLIGHT + 1)
        ]
        self._next = 0

    def fetch(self, values: Tensor) -> tuple[NDArray[np.int32], Mark]:
        """The host array that holds ``values`` once the mark has been waited for."""
        target = self._ring[self._next][: len(values)]
        self._next = (self._next + 1) % len(self._ring)
        target.copy_(values, non_blocking=True)
        mark = Mark(self._device)
        mark.record()
        return target.numpy(), mark
