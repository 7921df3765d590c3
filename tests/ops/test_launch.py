"""Which versions exist where, and how Triton kernels are launched."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import registry

launch = pytest.importorskip("octavo.ops.triton.launch")


def test_triton_versions_are_chosen_on_cuda_only():
    for dtype in (torch.bfloat16, torch.float16):
        assert launch.available("cuda", dtype)
        assert not launch.available("cpu", dtype)
    assert not launch.available("cuda", torch.float32)


def test_without_triton_cuda_has_the_definitions(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setattr(registry, "_versions", {k: v[:1] for k, v in registry._versions.items()})
    for op in registry.operations():
        assert registry.select(op, "cuda", torch.bfloat16).name == "torch"


def test_dependent_launch_is_asked_for_only_where_it_is_on():
    assert launch.options(4) == {"num_warps": 4}
    assert launch.options(2, launch.EARLY, 6) == {
        "num_warps": 2,
        "num_stages": 6,
        "launch_pdl": True,
    }


def test_dependent_launch_by_rows(monkeypatch):
    monkeypatch.setattr(launch, "has_pdl", lambda: True)
    found = [launch.pdl_for(rows) for rows in (1, 2, 64, 65)]
    assert found == [launch.EARLY, launch.LATE, launch.LATE, launch.OFF]
    monkeypatch.setattr(launch, "has_pdl", lambda: False)
    assert launch.pdl_for(1) == launch.OFF


@pytest.mark.parametrize(("n", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2(n, expected):
    assert launch.next_power_of_2(n) == expected
