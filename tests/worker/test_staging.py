"""Rings of host buffers: what is on its way is not overwritten, and is waited for only then."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker import staging
from octavo.worker.staging import PLANS_IN_FLIGHT, Downloads, Uploads
from tests.worker.plans import int32

CPU = torch.device("cpu")


class SlowMark:
    """Comes when it is waited for: until then, what was recorded before it is not done."""

    log: list[str]

    def __init__(self, device: torch.device) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True
        self.log.append("recorded")

    def wait(self) -> None:
        self.log.append("waited" if self.recorded else "nothing to wait for")
        self.recorded = False


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(staging, "Mark", SlowMark)
    SlowMark.log = []
    return SlowMark.log


def test_uploads_come_into_the_beginning_of_the_target() -> None:
    uploads, target = Uploads(8, CPU), torch.full((8,), -1, dtype=torch.int32)
    part = uploads.send(int32([4, 5, 6]), target)
    assert part.tolist() == [4, 5, 6] and target.tolist() == [4, 5, 6, -1, -1, -1, -1, -1]
    assert part.data_ptr() == target.data_ptr()
    assert len(uploads.send(int32([]), target)) == 0


def test_more_than_the_capacity_is_refused() -> None:
    uploads = Uploads(4, CPU)
    with pytest.raises(ValueError):
        uploads.send(int32(range(5)), torch.zeros(8, dtype=torch.int32))


def test_a_buffer_is_used_again_only_once_its_copy_is_done(log: list[str]) -> None:
    uploads, target = Uploads(4, CPU), torch.zeros(4, dtype=torch.int32)
    for _ in range(PLANS_IN_FLIGHT + 1):
        uploads.send(int32([1]), target)
    assert "waited" not in log
    uploads.send(int32([2]), target)
    assert log.count("waited") == 1 and log[-2:] == ["waited", "recorded"]


def test_downloads_stay_as_they_are_for_the_plans_in_flight(log: list[str]) -> None:
    downloads = Downloads(4, CPU)
    fetched = [downloads.fetch(torch.tensor([n, n], dtype=torch.int32)) for n in range(6)]
    alive = fetched[-PLANS_IN_FLIGHT - 1 :]
    assert [values.tolist() for values, _ in alive] == [[3, 3], [4, 4], [5, 5]]
    assert all(mark.recorded for _, mark in fetched) and "waited" not in log
    assert len({values.ctypes.data for values, _ in fetched}) == PLANS_IN_FLIGHT + 1
    assert all(values.dtype == np.int32 for values, _ in alive)
