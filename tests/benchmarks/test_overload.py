"""What benchmarks/overload.py measures, for some seconds, on the mock engine and a busy machine."""

from __future__ import annotations

import uvloop

from benchmarks import overload


def test_those_who_are_let_in_begin_soon_and_the_others_are_told_at_once():
    with overload.served(mock=True) as (url, pids):
        found = uvloop.run(overload.measure(url, pids, seconds=3.0, factor=10.0))
    assert found["accepted"] > 0
    assert found["refused"] > found["accepted"]
    # Were all let in, half of them would wait for a quarter of a minute. On an idle machine the
    # limits hold as they are.
    assert found["accepted_first_token_ms"]["p50"] < found["limit_ms"] + 5000
    assert found["refused_ms"]["p50"] < 2000
    assert min(found["retry_after_seconds"]) >= 1
    assert not found["failed"]
