"""What /metrics says of a pipeline's stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.accounts import no_tokens
from octavo.engine.messages import REJECTED, RETRIED, EngineStats
from octavo.flags import from_flags
from octavo.server.metrics import Metrics
from octavo.types import FinishReason


def samples(num_stages: int, kind: str, *stats: EngineStats) -> dict[str, float]:
    """Those with ``kind`` in their name, of a server whose engines say ``stats``."""
    replicas = [
        SimpleNamespace(
            index=index,
            stats=found,
            serves=True,
            info=None,
            restarts=SimpleNamespace(count=0),
            client=SimpleNamespace(
                num_running=0, num_waiting=0, num_waiting_tokens=0, step_age=0.0
            ),
            num_admitted=0,
            queue_tokens=no_tokens(),
            ended=dict.fromkeys([*(reason.value for reason in FinishReason), REJECTED, RETRIED], 0),
        )
        for index, found in enumerate(stats)
    ]
    config = from_flags(EngineConfig, {"pipeline_parallel_size": num_stages})
    client: Any = SimpleNamespace(replicas=replicas, config=config)
    text = Metrics(client, "toy").page("")[0].decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines if kind in name}


def page(num_stages: int, *stats: EngineStats) -> dict[str, float]:
    return samples(num_stages, "pipeline", *stats)


def test_each_engine_has_a_bubble_and_the_busy_seconds_of_its_stages():
    first = EngineStats(1.0, stage_busy_seconds=[6.0, 4.0], work_seconds=8.0, bubble=0.375)
    second = EngineStats(1.0, stage_busy_seconds=[1.0, 2.0], work_seconds=2.0, bubble=0.25)
    found = page(2, first, second)
    labels = 'engine="{}",model_name="toy"'
    ratio, busy = "octavo_pipeline_bubble_ratio", "octavo_pipeline_stage_busy_seconds_total"
    assert found[f"{ratio}{{{labels.format(0)}}}"] == 0.375
    assert found[f"{ratio}{{{labels.format(1)}}}"] == 0.25
    assert found[f'{busy}{{engine="0",model_name="toy",stage="1"}}'] == 4.0
    assert found[f'{busy}{{engine="1",model_name="toy",stage="0"}}'] == 1.0
    assert found[f"octavo_pipeline_work_seconds_total{{{labels.format(0)}}}"] == 8.0


def test_one_stage_says_nothing_of_pipelines():
    assert page(1, EngineStats(1.0)) == {}
