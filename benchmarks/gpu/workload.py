"""Shapes, workloads and bars of the GPU benchmark.

Prompts are token ids, so that every engine gets the same work whatever its tokenizer. Lengths do
not depend on the repetition; ids do, so that no repetition finds another one's prompts cached.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_workload import Work
from octavo.quant import awq, gptq, squeezellm

SEED = 20261129
FIRST_ID = 10
MAX_MODEL_LEN = 34_000

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "tiny": {
        **_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
# Of checkpoints; random weights are made in their formats.
SCHEMES: dict[str, dict[str, Any]] = {
    "gptq": gptq.config(gptq.GPTQ(4, 128, True)),
    "gptq-act-order": gptq.config(gptq.GPTQ(4, 128, True), act_order=True),
    "gptq-3": gptq.config(gptq.GPTQ(3, 128, True)),
    "gptq-8": gptq.config(gptq.GPTQ(8, 128, True)),
    "awq": awq.config(awq.AWQ(128)),
    "squeezellm-3": squeezellm.config(squeezellm.SqueezeLLM(3)),
    "squeezellm-4": squeezellm.config(squeezellm.SqueezeLLM(4)),
}
GPU_SHAPES = ("llama-8b", "qwen3-0.6b")


@dataclass(frozen=True)
class Row:
    """A workload. ``rate``: its figure is output tokens per second, else seconds. ``cached``: what
    counts are the runs that find all prompts of the first one cached."""

    name: str
    title: str
    make: Callable[[int, int, int], list[Work]]  # (repetition, scale, vocabulary)
    rate: bool = True
    cached: bool = False


@dataclass(frozen=True)
class Bar:
    """vLLM 0.26.0's best of three on one H200, what octavo must reach there, and what it aims at,
    in the unit of the row; None where nothing was agreed on."""

    vllm: float
    least: float | None = None
    aim: float | None = None


def _ids(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    found: list[int] = rng.integers(FIRST_ID, vocabulary, count).tolist()
    return found


def _scaled(length: int, scale: int) -> int:
    return max(1, length // scale)


def _generator(row: int, repetition: int) -> np.random.Generator:
    return np.random.default_rng([SEED, row, repetition])


def batch_1(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    rng = _generator(1, repetition)
    return [Work(_ids(rng, _scaled(128, scale), vocabulary), _scaled(256, scale))]


def batch_8(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    rng = _generator(2, repetition)
    lengths = _scaled(1024, scale), _scaled(256, scale)
    return [Work(_ids(rng, lengths[0], vocabulary), lengths[1]) for _ in range(8)]


def mixed_lengths() -> list[tuple[int, int]]:
    """Of the 512 requests that the other engines were given: 275,638 tokens in, 144,118 out."""
    rng = np.random.default_rng(SEED)
    for count in (128, *[1024] * 8):  # what was drawn before
        rng.integers(10, 100_000, count)
    inputs, outputs = rng.integers(64, 1025, 512), rng.integers(64, 513, 512)
    return list(zip(inputs.tolist(), outputs.tolist()))


def mixed(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    rng = _generator(3, repetition)
    return [
        Work(_ids(rng, _scaled(i, scale), vocabulary), _scaled(o, scale))
        for i, o in mixed_lengths()[: _scaled(512, scale)]
    ]


def prefill(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    return [Work(_ids(_generator(4, repetition), _scaled(8192, scale), vocabulary), 1)]


def shared(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    rng = _generator(5, repetition)
    prefix = _ids(rng, _scaled(2048, scale), vocabulary)
    own, output = _scaled(64, scale), _scaled(16, scale)
    return [
        Work(prefix + _ids(rng, own, vocabulary), output) for _ in range(_scaled(64, scale) + 1)
    ][:64]


def long(repetition: int, scale: int, vocabulary: int) -> list[Work]:
    rng = _generator(6, repetition)
    lengths = _scaled(32_000, scale), _scaled(64, scale)
    return [Work(_ids(rng, lengths[0], vocabulary), lengths[1]) for _ in range(4)]


ROWS = (
    Row("bs1", "batch 1, 128 in / 256 out", batch_1),
    Row("bs8", "8 x 1,024 in / 256 out", batch_8),
    Row("mixed512", "512 mixed (64-1,024 in, 64-512 out)", mixed),
    Row("prefill8k", "prefill of 8,192", prefill, rate=False),
    Row("prefix64", "64 on a cached 2,048 prefix, 16 out", shared, rate=False, cached=True),
    Row("long32k", "4 x 32,000 in / 64 out", long, rate=False),
)
START = "start"  # process start -> ready; measured by the parent

BARS: dict[str, dict[str, Bar]] = {
    "llama-8b": {
        "bs1": Bar(203, 245, 262),
        "bs8": Bar(1344, 1480, 1560),
        "mixed512": Bar(9807, 10300, 11500),
        "prefill8k": Bar(0.211, 0.220, 0.205),
        "prefix64": Bar(0.243, 0.20, 0.15),
        "long32k": Bar(5.23, 5.2, 4.8),
        START: Bar(77, 12, 8),
    },
    "qwen3-0.6b": {
        "bs1": Bar(599, 1100, 1300),
        "bs8": Bar(3695, 5500, 6700),
        "mixed512": Bar(30292, 34000, 40000),
        "prefill8k": Bar(0.0365, 0.033, 0.027),
        "prefix64": Bar(0.170),
        "long32k": Bar(1.39),
        START: Bar(61),
    },
}


def scale_of(shape: str) -> int:
    """Lengths and counts are divided by this."""
    return 32 if shape == "tiny" else 1


def vocabulary_of(shape: str) -> int:
    return min(100_000, int(SHAPES[shape]["vocab_size"]))


def settings_of(shape: str) -> dict[str, Any]:
    """Flags of an engine that runs ``shape`` with random weights."""
    length = min(MAX_MODEL_LEN, int(SHAPES[shape]["max_position_embeddings"]))
    return {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": length}


def model_directory(shape: str, scheme: str = "") -> Path:
    """A directory with the shape's config.json; ``scheme``: one of ``SCHEMES``, or another word."""
    directory = Path(tempfile.gettempdir()) / "octavo-benchmarks" / f"{shape}-{scheme}"
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(SHAPES[shape])
    if scheme in SCHEMES:
        config["quantization_config"] = SCHEMES[scheme]
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory
