"""What a plan says of a start on a CPU is what the start then says of itself, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.ops.native import library
from octavo.plan.checkpoint import read_checkpoint
from octavo.plan.memory import fit_cpu, ranks_of
from tests.model.expert_families import FAMILIES
from tests.model.quantized_checkpoints import KINDS, in_format
from tests.model.running import write_checkpoint, write_gguf

EVEN = {"intermediate_size": 128, "max_position_embeddings": 128, "num_hidden_layers": 2}
CACHE = 3 << 20
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


def family(name: str, **changes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_checkpoint(folder, name, **{**EVEN, **changes})
        return folder

    return write


def quantized(kind: str, name: str = "Llama", **changes: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_checkpoint(folder / "whole", name, **{**EVEN, **changes})
        return in_format(folder / "whole", KINDS[kind], folder)[0]

    return write


def gguf(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_checkpoint(folder / "whole", "Llama", **{**EVEN, "head_dim": 16})
        return write_gguf(folder / "model.gguf", folder / "whole", kind)

    return write


def of_experts(name: str) -> Callable[[Path], Path]:
    title, changes = FAMILIES[name]
    return family(title, **{**changes, "num_hidden_layers": 2})


# name -> (how the files are made, flags).
STARTS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "llama, FP32": (family("Llama"), {}),
    "llama, BF16": (family("Llama"), {"dtype": "bfloat16"}),
    "llama, tied, BF16": (family("Llama", tie_word_embeddings=True), {"dtype": "bfloat16"}),
    "llama, tied, FP16": (family("Llama", tie_word_embeddings=True), {"dtype": "float16"}),
    "llama, INT8 while loading": (family("Llama"), {"quantization": "int8"}),
    "llama, FP8 while loading": (family("Llama"), {"quantization": "fp8"}),
    "llama, INT8 cache": (family("Llama"), {"kv_cache_dtype": "int8"}),
    "qwen3, heads of 24, blocks of 24": (family("Qwen3", head_dim=24), {"block_size": 24}),
    "gemma2, tied, INT8 while loading": (
        family("Gemma2", head_dim=16, tie_word_embeddings=True),
        {"quantization": "int8"},
    ),
    "gpt2": (family("GPT2", **GPT2, tie_word_embeddings=True), {}),
    "qwen3 experts": (of_experts("qwen3-moe"), {}),
    "deepseek, latent attention": (of_experts("deepseek-v3"), {}),
    "GPTQ": (quantized("gptq 4 bits"), {}),
    "AWQ": (quantized("awq"), {}),
    "FP8 by block": (quantized("fp8 by block"), {}),
    "GGUF Q4_0": (gguf("Q4_0"), {"dtype": "auto"}),
    "GGUF Q4_0, kept": (gguf("Q4_0"), {"quantization": "gguf"}),
}


@pytest.mark.skipif(bool(library.problem()), reason="octavo's own kernels decide how caches lie")
@pytest.mark.parametrize("name", STARTS)
def test_figures_are_those_of_the_start(name: str, tmp_path: Path) -> None:
    write, given = STARTS[name]
    path = write(tmp_path)
    flags = {"dtype": "float32", "kv_cache_memory_bytes": CACHE, "cpu_threads": 1, **given}
    flags |= {"skip_tokenizer_init": True, "model": str(path)}
    config = from_flags(EngineConfig, flags)
    checkpoint = read_checkpoint(path, config, "cpu")
    ranks = ranks_of(checkpoint, config, "cpu")
    plan = fit_cpu(config, ranks, 1 << 30).plan
    assert plan is not None
    llm = LLM(**flags)
    try:
        info = llm.info
    finally:
        llm.close()
    assert checkpoint.dtype == info.dtype
    assert ranks[0].weights == info.weight_bytes
    assert plan.kv_cache_bytes == info.kv_cache_bytes
    assert (plan.num_blocks, plan.block_size) == (info.num_blocks, info.block_size)
    assert plan.max_model_len == info.max_model_len
