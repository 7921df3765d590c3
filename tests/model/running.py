"""Checkpoints written by transformers' own classes, and our decoder run over a paged cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from octavo.config import EngineConfig, ModelConfig
from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from tests.fixtures.gguf_files import add_geometry

BLOCK = 16
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


# Where transformers' names are not {name}Config and {name}ForCausalLM.
CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}


def write_checkpoint(directory: Path, name: str, **changes: Any):
    """A random model of transformers' class ``{name}ForCausalLM`` saved in FP32; returns it."""
    import transformers

    values = {**TINY, **changes}
    config_class, model_class = CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config_class)(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():  # norms and biases are constants at birth: make them count
        for parameter in (*model.parameters(), *corrections(model)):
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model


def corrections(model: Any) -> list[torch.Tensor]:
    """Of routers' scores (DeepSeek-V3), which are no parameters."""
    return [tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias")]


def write_gguf(
    file: Path,
    source: Path,
    kind: str,
    *,
    arch: str = "llama",
    tied: bool = False,
    factors: torch.Tensor | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """The Llama of ``source`` as a GGUF file, its matrices in ``kind``, or in what ``kinds`` says
    of their GGUF names (``attn_q``)."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), arch)
    add_geometry(writer, config, config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    short = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
    }
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        values = tensor.float()
        if parts[-2] in ("q_proj", "k_proj"):
            dim = config["head_dim"]
            values = values.view(-1, 2, dim // 2, values.shape[1]).transpose(1, 2)
            values = values.reshape(tensor.shape)
        where = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        if tied and parts[0] == "lm_head":
            continue
        stored = values.numpy()
        of_name = (kinds or {}).get(short[parts[-2]], kind)
        kept = "F32" if values.dim() == 1 else of_name
        quantized = gguf.quants.quantize(stored, gguf.GGMLQuantizationType[kept])
        raw_dtype = gguf.GGMLQuantizationType[kept]
        writer.add_tensor(f"{where}{short[parts[-2]]}.weight", quantized, raw_dtype=raw_dtype)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load(path: Path, dtype: str = "float32", **flags: Any) -> Model:
    config = EngineConfig(model=ModelConfig(dtype=dtype, **flags))
    return load_model(path, config, lambda *news: None)


def make_batch(
    tokens: list[list[int]], past: list[int], tables: torch.Tensor, block_size: int = BLOCK
) -> ForwardBatch:
    """Row i brings ``tokens[i]`` after ``past[i]`` cached ones; rows with one token come first."""
    counts = [len(row) for row in tokens]
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, counts)])
    rows = torch.arange(len(tokens)).repeat_interleave(torch.tensor(counts))
    blocks = tables[rows, positions // block_size].long()
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    lengths = [p + n for p, n in zip(past, counts)]
    return ForwardBatch(
        token_ids=torch.tensor([token for row in tokens for token in row]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_starts_host=starts,
        seq_lens_host=lengths,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        block_size=block_size,
        decode_rows=next((i for i, n in enumerate(counts) if n != 1), len(counts)),
        logit_rows=torch.tensor(starts[1:]) - 1,
    )


def all_logits(model: Model, ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """Logits of every position [len(ids), vocab], computed ``chunk`` tokens at a time (all at once
    by default), with blocks in shuffled order."""
    count = -(-len(ids) // BLOCK)
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(count + 3, generator=generator)[:count][None].int()
    cache = model.allocate_cache(count + 3, BLOCK)
    found = []
    for start in range(0, len(ids), chunk or len(ids)):
        part = ids[start : start + (chunk or len(ids))]
        found.append(model.forward(make_batch([part], [start], tables), cache))
    return model.logits(torch.cat(found))


def reference_logits(model: Any, ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """transformers' logits; ``chunk`` matters to it only where frequencies follow the length."""
    found, cache = [], None
    with torch.no_grad():
        for start in range(0, len(ids), chunk or len(ids)):
            part = torch.tensor([ids[start : start + (chunk or len(ids))]])
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0].float())
    return torch.cat(found)


def random_ids(count: int, vocab: int = 320) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(2)).tolist()
