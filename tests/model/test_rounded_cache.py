"""--kv-cache-dtype int8 on a CPU: what it costs, what it saves, where it is refused."""

from __future__ import annotations

import pytest
import torch

from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.model.loader.load import load_model
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.model.running import all_logits, load, random_ids, write_checkpoint

has_kernels = pytest.mark.skipif(not library.features(), reason="no kernels here")


def load_rounded(path, dtype="float32", **flags):
    config = from_flags(EngineConfig, {"dtype": dtype, "kv_cache_dtype": "int8", **flags})
    return load_model(path, config, lambda *reported: None)


@has_kernels
@pytest.mark.parametrize("name", ("Llama", "Qwen3", "Gemma2"))
def test_logits_stay_close_and_are_the_same_bits_in_chunks(tmp_path, name):
    write_checkpoint(tmp_path, name, head_dim=32, initializer_range=0.05)
    ids = random_ids(150)
    exact, rounded = all_logits(load(tmp_path), ids), load_rounded(tmp_path)
    found = all_logits(rounded, ids)
    error = (found - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.02
    assert torch.equal(all_logits(rounded, ids, 7), found) or name == "Gemma2"  # ATen's GELU


@has_kernels
def test_a_block_takes_half_of_bf16(tmp_path):
    write_checkpoint(tmp_path, "Llama", head_dim=128)
    plain = load(tmp_path, "bfloat16").kv_bytes_per_block(16)
    rounded = load_rounded(tmp_path, "bfloat16")
    assert rounded.kv_bytes_per_block(16) / plain == (128 + 4) / 256
    assert rounded.allocate_cache(2, 16)[0].nbytes * 3 == 2 * rounded.kv_bytes_per_block(16)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_refused_without_the_kernels(tmp_path, monkeypatch, dtype):
    write_checkpoint(tmp_path, "Llama")
    monkeypatch.setattr(library, "features", lambda: library.Features(0))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8: .*own kernels alone"):
        load_rounded(tmp_path, dtype)


def test_refused_for_latent_attention(tmp_path):
    sizes = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    write_checkpoint(tmp_path, "DeepseekV2", first_k_dense_replace=1, **sizes)
    with pytest.raises(ConfigError, match="int8: not for latent attention"):
        load_rounded(tmp_path)
