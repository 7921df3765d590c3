"""Families with layers of several kinds, through the whole engine: greedy tokens are transformers',
with prompts in chunks, shared prefixes and preemptions."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.model.running import random_ids, reference_logits, write_checkpoint
from tests.model.test_families import FAMILIES

COUNT = 40


@pytest.mark.parametrize("name", ("gemma2", "gemma3-linear", "opt-after-narrow"))
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    family, changes = FAMILIES[name]
    reference = write_checkpoint(tmp_path, family, **changes)
    stem = random_ids(40)
    prompts = [stem[: 5 + 7 * i] + random_ids(9 * i + 1)[::-1] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    settings = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 16,
        "max_model_len": 128,
        "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 33,
    }
    with closing(LLM(str(tmp_path), **settings)) as llm:
        for _ in range(2):  # the second time from a warm cache
            answers = llm.generate(prompts, params, use_tqdm=False)
            for prompt, answer in zip(prompts, answers):
                tokens = list(answer.outputs[0].token_ids)
                assert len(tokens) == COUNT
                expected = reference_logits(reference, [*prompt, *tokens[:-1]])
                likeliest = expected[len(prompt) - 1 :].argmax(-1)
                assert torch.equal(torch.tensor(tokens), likeliest)
        assert llm.stats.num_preemptions > 0
