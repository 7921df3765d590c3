"""What benchmarks/frontend.py measures, for a moment."""

from __future__ import annotations

import pytest

from benchmarks import frontend


@pytest.mark.parametrize("api_servers", [1, 2])
def test_all_tokens_come_and_what_they_cost_is_told(api_servers):
    found = frontend.measure(16, 60, 0.005, api_servers)
    assert found["api_processes"] == api_servers
    assert found["tokens_per_second"] > 0  # how many is the machine's business
    assert 1.0 <= found["tokens_per_event"] <= 60
    assert found["us_per_token"]["both"] > 0
