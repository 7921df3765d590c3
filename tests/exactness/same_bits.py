"""An engine asked alone and in company, for tests that its answers are the same bits."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from tests.fixtures import gguf_files, models, tokenizers

CONFIG = dict(
    models.R_CONFIG,
    hidden_size=256,
    intermediate_size=720,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=2051,
)
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "deterministic": True,
    "skip_tokenizer_init": True,
    "max_model_len": 320,
    "max_num_seqs": 48,
    "block_size": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
NUM_TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Half of them share a beginning."""
    rng = random.Random(20261130)
    stem = [rng.randrange(2, 2051) for _ in range(75)]
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 129, 200, *(rng.randrange(1, 200) for _ in range(10))]
    alone = [[rng.randrange(2, 2051) for _ in range(n)] for n in lengths]
    return alone + [stem + [rng.randrange(2, 2051) for _ in range(n // 2 + 1)] for n in lengths]


PROMPTS = make_prompts()
PARAMS = [
    SamplingParams(
        temperature=0.8,
        seed=i,
        logprobs=3,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    for i in range(len(PROMPTS))
]

Facts = list[tuple[int, dict[int, float]]]


def facts(output: RequestOutput) -> Facts:
    """Of each token: its id, and the log-probabilities reported, bit for bit."""
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.token_ids) == len(answer.logprobs)
    return [
        (token, {candidate: entry.logprob for candidate, entry in reported.items()})
        for token, reported in zip(answer.token_ids, answer.logprobs)
    ]


def write_checkpoint(directory: Path) -> Path:
    models.write_llama(directory, CONFIG, models.random_llama(CONFIG, seed=20261130))
    return directory


def write_gguf(directory: Path) -> Path:
    """A model of nearly that size, its matrices in Q4_1, in groups of 32 inputs."""
    config = dict(CONFIG, intermediate_size=736)
    specials, tokens, merges = tokenizers.small_vocabulary()
    filler = [f"<{i}>" for i in range(CONFIG["vocab_size"] - len(specials) - len(tokens))]
    file = directory / "model.gguf"
    gguf_files.write_llama(
        file,
        config,
        models.random_llama(config, seed=20261130),
        "Q4_1",
        specials=specials,
        tokens=[*tokens, *filler],
        merges=merges,
        chat_template=None,
    )
    return file


def engine(checkpoint: Path, **settings: Any) -> closing[LLM]:
    given = {**SETTINGS, **settings}
    return closing(LLM(str(checkpoint), **{k: v for k, v in given.items() if v is not None}))
