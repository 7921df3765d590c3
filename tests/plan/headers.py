"""Checkpoints of any size that take no room: a header, and a hole where the numbers would be."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from octavo.model.facts import build_spec
from octavo.model.families.catalogue import family_of
from octavo.model.families.names import find
from octavo.model.structure import structure_of

# The guide's example.
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
# What benchmarks/gpu measures.
LLAMA_8B = {
    **LLAMA_70B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_hollow(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of 16-bit numbers that are nowhere."""
    write_config(folder, config)
    names = family_of(config, str(folder)).hf_names
    kind = {"float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    header, end = {}, 0
    for name, shape in structure_of(build_spec(config, folder)).wanted().items():
        size = 2 * math.prod(shape)
        place = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        header[find(name, names).name] = place
        end += size
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    return folder
