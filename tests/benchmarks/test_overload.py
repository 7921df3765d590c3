"""What benchmarks/overload.py measures, for some seconds, on the mock engine and a busy machine."""

from __future__ import annotations

import uvloop

from benchmarks import overload


def test_those_who_are_let_in_begin_soon_and_the_others_are_told_at_once():
    with overload.served(mock=True) as (url, pids):
        found = uvloop.run(overload.measure(url, pids, seconds=6.0, factor=10.0))
    assert found["accepted"] > 20
    assert found["refused"] > 5 * found["accepted"]
    assert found["accepted_first_token_ms"]["p95"] < found["limit_ms"] + 400
    assert found["accepted_first_token_ms"]["p50"] < found["limit_ms"]
    assert found["refused_ms"]["p50"] < 50
    assert min(found["retry_after_seconds"]) >= 1
    assert not found["failed"]
