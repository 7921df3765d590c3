"""On a CPU with kernels of our own, requests get the same bits alone and in any batch, however
their prompts are cut, from a warm cache or after a preemption, and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.ops import registry
from tests.exactness.same_bits import PARAMS, PROMPTS, Facts, engine, facts, write_checkpoint

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or any(
        registry.select(op, "cpu", torch.bfloat16).name != "native"
        for op in ("linear", "paged_attention", "rms_norm")
    ),
    reason="needs a CPU that runs all kernels of our own in BF16",
)
WAYS: dict[str, dict[str, Any]] = {
    "a batch of 40": {},
    "one thread": {"cpu_threads": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "100 blocks": {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 100},
    "no overlap": {"async_scheduling": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deterministic"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[list[Facts]]:
    """One request at a time."""
    with engine(checkpoint, enable_prefix_caching=False) as llm:
        yield [
            facts(llm.generate(prompt, params, use_tqdm=False)[0])
            for prompt, params in zip(PROMPTS, PARAMS)
        ]


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_the_same_bits(
    way: str, checkpoint: Path, expected: list[Facts]
) -> None:
    llm: LLM
    with engine(checkpoint, **WAYS[way]) as llm:
        for _ in range(2):  # the second time from a warm cache
            answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [facts(answer) for answer in answers] == expected
        assert ("num_gpu_blocks_override" in WAYS[way]) == (llm.stats.num_preemptions > 0)


def test_it_is_so_without_being_asked_for(checkpoint: Path, expected: list[Facts]) -> None:
    with engine(checkpoint, deterministic=False) as llm:
        answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [facts(answer) for answer in answers] == expected
