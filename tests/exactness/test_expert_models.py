"""``LLM`` on tiny models with experts and with latent attention: greedy answers are transformers',
with prompts cut into chunks, batched, and continued from the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.model.expert_families import FAMILIES
from tests.model.running import write_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_batched_tokens": 48,  # less than some prompts have
    "max_model_len": 160,
    "cpu_threads": 1,
    "skip_tokenizer_init": True,
}
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """Seven, of which four begin alike."""
    rng = random.Random(20261130)
    stem = [rng.randrange(3, 320) for _ in range(70)]
    tails = [[rng.randrange(3, 320) for _ in range(count)] for count in (1, 9, 30, 45)]
    alone = [[rng.randrange(3, 320) for _ in range(count)] for count in (1, 16, 61)]
    return [*alone, *(stem + tail for tail in tails)]


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=("mixtral", "deepseek-v3-yarn", "gpt-oss"))
def served(request: Any, tmp_path_factory: Any) -> Iterator[tuple[LLM, list[list[int]]]]:
    """The engine, and what transformers answers to the prompts."""
    path: Path = tmp_path_factory.mktemp("checkpoint")
    name, changes = FAMILIES[request.param]
    reference = write_checkpoint(path, name, **changes)
    expected = [by_transformers(reference, prompt) for prompt in make_prompts()]
    with closing(LLM(str(path), **SETTINGS)) as llm:
        yield llm, expected


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_batched_chunked_and_cached_answers_are_those_of_transformers(served: Any) -> None:
    llm, expected = served
    prompts = make_prompts()
    assert answers(llm, prompts) == expected
    before = llm.stats.prefix_hits
    assert answers(llm, prompts[::-1]) == expected[::-1]  # from the cache, in another company
    assert llm.stats.prefix_hits - before >= sum(len(p) for p in prompts) - 16 * len(prompts)
    assert llm.stats.num_copies > 0  # partial blocks were shared too


def test_one_at_a_time_is_the_same(served: Any) -> None:
    llm, expected = served
    llm.reset_prefix_cache()
    assert [answers(llm, [prompt])[0] for prompt in make_prompts()] == expected


def test_the_cache_is_as_large_as_asked_for(served: Any) -> None:
    info = served[0].info
    assert info.num_blocks == (1 << 22) // (info.kv_cache_bytes // info.num_blocks)
    assert "moe_experts" in info.implementations
