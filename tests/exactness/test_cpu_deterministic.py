"""On a CPU with kernels of our own, requests get the same bits alone and in any batch, however
their prompts are cut, from a warm cache or after a preemption, and with any number of threads: in
BF16 and FP32, on dense and on quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.ops import registry
from tests.exactness.same_bits import (
    PARAMS,
    PROMPTS,
    Facts,
    engine,
    facts,
    write_checkpoint,
    write_gguf,
)

WAYS: dict[str, dict[str, Any]] = {
    "a batch of 40": {},
    "one thread": {"cpu_threads": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "100 blocks": {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 100},
    "no overlap": {"async_scheduling": False},
}
# What a checkpoint is written by, and how it is loaded.
KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "BF16": (write_checkpoint, {"dtype": "bfloat16"}),
    "FP32": (write_checkpoint, {"dtype": "float32"}),
    "GGUF": (write_gguf, {"dtype": "auto", "quantization": "gguf"}),
    "INT8": (write_checkpoint, {"dtype": "float32", "quantization": "int8"}),
}
# All ways in BF16; those that change the kernels' work elsewhere.
CASES = [("BF16", way) for way in WAYS] + [
    (kind, way) for kind in ("FP32", "GGUF", "INT8") for way in ("a batch of 40", "chunks of 7")
]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    or any(
        registry.select(op, "cpu", torch.bfloat16).name != "native"
        for op in ("linear", "paged_attention", "rms_norm")
    ),
    reason="needs a CPU that runs all kernels of our own in BF16",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a kind."""

    @cache
    def written(write: Callable[[Path], Path]) -> Path:
        return write(tmp_path_factory.mktemp("deterministic"))

    return lambda kind: written(KINDS[kind][0])


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Callable[[str], list[Facts]]:
    """Of a kind: one request at a time, on one thread."""

    @cache
    def answers(kind: str) -> list[Facts]:
        settings = {**KINDS[kind][1], "enable_prefix_caching": False, "cpu_threads": 1}
        with engine(checkpoint(kind), **settings) as llm:
            return [
                facts(llm.generate(prompt, params, use_tqdm=False)[0])
                for prompt, params in zip(PROMPTS, PARAMS)
            ]

    return answers


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_log_probabilities_are_the_same_bits(
    kind: str,
    way: str,
    checkpoint: Callable[[str], Path],
    expected: Callable[[str], list[Facts]],
) -> None:
    alone = expected(kind)
    llm: LLM
    with engine(checkpoint(kind), **KINDS[kind][1], **WAYS[way]) as llm:
        for _ in range(2):  # the second time from a warm cache
            answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [facts(answer) for answer in answers] == alone
        assert ("num_gpu_blocks_override" in WAYS[way]) == (llm.stats.num_preemptions > 0)


def test_the_kinds_differ(expected: Callable[[str], list[Facts]]) -> None:
    """So that each is a case of its own."""
    answers = [expected(kind) for kind in KINDS]
    assert all(one != other for i, one in enumerate(answers) for other in answers[:i])


def test_it_is_so_without_being_asked_for(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[Facts]]
) -> None:
    with engine(checkpoint("BF16"), deterministic=False) as llm:
        answers = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [facts(answer) for answer in answers] == expected("BF16")
