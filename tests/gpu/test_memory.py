"""Once a GPU's engine is warm, no load makes it take memory from the device."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.load import Load
from octavo import LLM
from octavo.worker.gpu_memory import MARGIN
from tests.fixtures import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WARM_SECONDS = 3.0
# What a start may leave to the first requests: tables that are made when they are first needed.
LEFT_TO_THE_FIRST = 32 << 20


def taken() -> dict[str, int]:
    """What the allocator has asked the device for, ever and now."""
    stats = torch.cuda.memory_stats()
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
    held = ("segment.all.current", "reserved_bytes.all.current")
    return {name: int(stats.get(name, 0)) for name in (*names, *held)}


@pytest.mark.parametrize(
    "model,seconds,settings",
    [
        ("L64", 20.0, {"max_num_seqs": 96, "max_num_batched_tokens": 2048}),
        ("Q128", 8.0, {"max_num_seqs": 200, "max_num_batched_tokens": 512, "enforce_eager": True}),
        ("L64", 8.0, {"max_num_seqs": 40, "num_gpu_blocks_override": 40, "block_size": 16}),
    ],
    ids=["graphs", "eager", "preemptions"],
)
def test_a_warm_engine_takes_no_memory_under_any_load(
    model: str, seconds: float, settings: dict[str, Any]
) -> None:
    flags = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
    if "num_gpu_blocks_override" in settings:
        del flags["kv_cache_memory_bytes"]
    with closing(LLM(str(models.path(model)), dtype="bfloat16", **flags, **settings)) as llm:
        assert llm.stats.graphs_pending == 0
        started = taken()
        Load(llm, [], random.Random(1)).run(WARM_SECONDS)
        warm, free = taken(), torch.cuda.mem_get_info()[0]
        load = Load(llm, [], random.Random(2))
        load.run(seconds)
        after, lost = taken(), free - torch.cuda.mem_get_info()[0]
        preemptions = llm.stats.num_preemptions
    grown = warm["reserved_bytes.all.current"] - started["reserved_bytes.all.current"]
    print(
        f"\n{model} {settings}: {load.num_steps} steps, {dict(load.counts)}, {preemptions} "
        f"preemptions; the first requests took {grown >> 20} MiB, graphs and kernels since "
        f"{lost >> 20} MiB beside the allocator"
    )
    assert not load.problems, load.problems[:5]
    assert load.num_steps > 200 and load.counts["abort"] > 0
    assert (preemptions > 0) or "num_gpu_blocks_override" not in settings
    assert after == warm
    assert grown <= LEFT_TO_THE_FIRST
    assert lost < MARGIN // 2
