"""The routing benchmark on a small workload: real engines, a random router, its verdict."""

from __future__ import annotations

import asyncio

from benchmarks.routing import RandomRouter, Workload, config_of, serve, verdict
from octavo.engine.routing import Router

SMALL = Workload(
    conversations=6, groups=2, turns=2, text=(100, 200), think_seconds=(0.0, 0.01), seed=3
)


def test_workload_is_the_same_each_time_and_its_tokens_are_counted():
    assert SMALL.script(4) == SMALL.script(4) != SMALL.script(5)
    turns = [turn for index in range(6) for turn in SMALL.script(index)]
    said = sum(len(turn.said) + turn.answer for turn in turns)
    assert SMALL.num_tokens == said + sum(map(len, SMALL.systems()))


def test_two_replicas_serve_it_and_tell_their_shares(model_r, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    row = asyncio.run(serve(config_of(model_r, 2, 400), RandomRouter, SMALL))
    assert 0 < row["hit_rate"] < 1
    assert len(row["work_shares"]) == 2 and abs(sum(row["work_shares"]) - 1) < 0.001
    assert RandomRouter.choose is not Router.choose


def test_verdict_is_about_tight_caches():
    rows = {
        "prefix": {"of_one": 0.95, "work_shares": [0.55, 0.45]},
        "random": {"of_one": 0.7, "work_shares": [0.5, 0.5]},
    }
    assert verdict({"tight": {"rows": rows}}) == {
        "prefix": True, "random": False, "most_work": True,
    }  # fmt: skip
