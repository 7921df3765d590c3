"""--kv-cache-dtype in 8 bits: what it costs, what it saves, its scales, where it is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.model import versions
from octavo.model.kv_cache import E4M3, E5M2, INT8, choose_cache_dtype
from octavo.model.loader.load import load_model
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.model.running import all_logits, load, random_ids, write_checkpoint

has_kernels = pytest.mark.skipif(not library.features(), reason="no kernels here")
# Relative error of logits, least and most.
COST = {"int8": (1e-5, 0.02), "fp8": (1e-3, 0.08), "fp8_e5m2": (1e-3, 0.15)}
kinds = pytest.mark.parametrize("kind", COST)


def load_kept(path, kind, dtype="float32", **flags):
    config = from_flags(EngineConfig, {"dtype": dtype, "kv_cache_dtype": kind, **flags})
    return load_model(path, config, lambda *reported: None)


def error_of(found, exact):
    return float((found - exact).norm() / exact.norm())


@has_kernels
@kinds
@pytest.mark.parametrize("name", ("Llama", "Qwen3", "Gemma2"))
def test_logits_stay_close_and_are_the_same_bits_in_chunks(tmp_path, name, kind):
    write_checkpoint(tmp_path, name, head_dim=32, initializer_range=0.05)
    ids = random_ids(150)
    exact, model = all_logits(load(tmp_path), ids), load_kept(tmp_path, kind)
    found = all_logits(model, ids)
    least, most = COST[kind]
    assert least < error_of(found, exact) < most
    assert torch.equal(all_logits(model, ids, 7), found) or name == "Gemma2"  # ATen's GELU


@has_kernels
@pytest.mark.parametrize(
    ("kind", "share"), (("int8", 132 / 256), ("fp8", 0.5), ("fp8_e4m3", 0.5), ("fp8_e5m2", 0.5))
)
def test_a_token_takes_half_of_bf16_and_the_start_says_so(tmp_path, kind, share):
    write_checkpoint(tmp_path, "Llama", head_dim=128)
    plain = load(tmp_path, "bfloat16").kv_bytes_per_block(16)
    model = load_kept(tmp_path, kind, "bfloat16")
    assert model.kv_bytes_per_block(16) / plain == share
    assert model.allocate_cache(2, 16)[0].nbytes * 3 == 2 * model.kv_bytes_per_block(16)
    assert f"{share:.2f} of bfloat16's {plain // 16:,}" in model.reasons["kv_cache_dtype"]


@has_kernels
@kinds
def test_copied_blocks_are_the_same(tmp_path, kind):
    write_checkpoint(tmp_path, "Llama")
    model = load_kept(tmp_path, kind)
    cache = model.allocate_cache(4, 16)
    for layer in cache:
        layer.view(torch.uint8).copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8))
    before = [layer.view(torch.uint8).clone() for layer in cache]
    model.copy_blocks(cache, torch.tensor([[2, 0]]))
    for layer, old in zip(cache, before):
        assert torch.equal(layer.view(torch.uint8), old[[2, 1, 2, 3]])


NAMES = {
    "llm-compressor": ("self_attn.k_scale", "self_attn.v_scale"),
    "vllm": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "autofp8": ("self_attn.kv_scale",),
}


def add(path, tensors):
    file = path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def scaled_checkpoint(path, names, scale, layers=range(3), shape=()):
    """Values a thousand times as large as usual, which leave the layers as they were."""
    write_checkpoint(path, "Llama", head_dim=32, initializer_range=0.05)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "v_proj.weight" in name:
            tensors[name] *= 8192
        if "o_proj.weight" in name:
            tensors[name] /= 8192
    save_file(tensors, path / "model.safetensors")
    scales = {
        f"model.layers.{i}.{name}": torch.full(shape, scale) for i in layers for name in names
    }
    add(path, scales)


SHAPES = {"llm-compressor": (), "vllm": (1,), "modelopt": (2,), "outputs": (2, 1, 1), "autofp8": ()}


@has_kernels
@pytest.mark.parametrize("origin", NAMES)
def test_scales_of_the_checkpoint_keep_large_values(tmp_path, origin, caplog):
    scaled_checkpoint(tmp_path, NAMES[origin], 64.0, shape=SHAPES[origin])
    ids = random_ids(40)
    exact, model = all_logits(load(tmp_path), ids), load_kept(tmp_path, "fp8")
    assert error_of(all_logits(model, ids), exact) < COST["fp8"][1]
    assert "scales of the checkpoint" in model.reasons["kv_cache_dtype"] and not caplog.records
    assert all(torch.equal(x.mixer.kv_scales, torch.full((2, 2), 64.0)) for x in model.layers)
    for kind in ("int8", "fp8_e5m2") if origin == "vllm" else ():  # need none
        model = load_kept(tmp_path, kind)
        assert error_of(all_logits(model, ids), exact) < COST[kind][1]
        assert all(layer.mixer.kv_scales is None for layer in model.layers)


@has_kernels
def test_without_scales_values_are_cut_off_and_one_warning_says_so(tmp_path, caplog):
    scaled_checkpoint(tmp_path, (), 1.0)
    ids = random_ids(40)
    exact = all_logits(load(tmp_path), ids)
    with caplog.at_level(logging.WARNING):
        model = load_kept(tmp_path, "fp8")
        found = all_logits(model, ids)
    assert error_of(found, exact) > 0.2
    (record,) = caplog.records
    assert "--kv-cache-dtype fp8: the checkpoint holds no scales for it: 1.0" in record.getMessage()
    assert "beyond 448 are cut off" in model.reasons["kv_cache_dtype"]


@has_kernels
def test_layers_without_scales_are_counted_and_heads_may_differ(tmp_path, caplog):
    scaled_checkpoint(tmp_path, NAMES["llm-compressor"], 64.0, layers=(0, 2))
    each = torch.tensor([32.0, 128.0], dtype=torch.bfloat16)
    add(tmp_path, {"model.layers.2.self_attn.v_scale": each})
    model = load_kept(tmp_path, "fp8")
    assert "no scales for 1 of 3 layers" in caplog.text
    assert model.layers[1].mixer.kv_scales is None
    assert model.layers[2].mixer.kv_scales.tolist() == [[64.0, 64.0], [32.0, 128.0]]


@has_kernels
@pytest.mark.parametrize("values", ([0.0], [-1.0], [float("nan")], [1.0, 1.0, 1.0]), ids=str)
def test_scales_that_mean_nothing_are_refused(tmp_path, values):
    write_checkpoint(tmp_path, "Llama")
    add(tmp_path, {"model.layers.1.self_attn.k_scale": torch.tensor(values)})
    load(tmp_path)  # which has no use for them
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_scale holds \d number"):
        load_kept(tmp_path, "fp8")


@kinds
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_refused_without_the_kernels(tmp_path, monkeypatch, dtype, kind):
    write_checkpoint(tmp_path, "Llama")
    monkeypatch.setattr(library, "features", lambda: library.Features(0))
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {kind}: .*own kernels.*use auto"):
        load_kept(tmp_path, kind, dtype)


@kinds
def test_refused_for_float16_on_a_cpu(tmp_path, kind):
    write_checkpoint(tmp_path, "Llama")
    with pytest.raises(ConfigError, match=rf"{kind}: .*--dtype float32 or bfloat16"):
        load_kept(tmp_path, kind, "float16")


@kinds
def test_refused_for_latent_attention(tmp_path, kind):
    sizes = {"q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    write_checkpoint(tmp_path, "DeepseekV2", first_k_dense_replace=1, **sizes)
    with pytest.raises(ConfigError, match=f"{kind}: not for latent attention"):
        load_kept(tmp_path, kind)


def test_fp8_needs_a_gpu_that_has_it(monkeypatch):
    for capability, found in (((8, 9), E4M3), ((9, 0), E4M3), ((12, 0), E4M3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert choose_cache_dtype("fp8", torch.bfloat16, "cuda") == found
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose_cache_dtype("int8", torch.bfloat16, "cuda") == INT8
    for kind in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        with pytest.raises(ConfigError, match=f"{kind}: needs .* 8.9, this one has 8.0; use int8"):
            choose_cache_dtype(kind, torch.float16, "cuda")


@pytest.mark.parametrize(
    ("asked", "found"),
    (("auto", None), ("bfloat16", None), ("fp8", E4M3), ("fp8_e5m2", E5M2), ("int8", INT8)),
)
def test_names_of_what_the_cache_is_kept_in(asked, found):
    assert choose_cache_dtype(asked, torch.bfloat16, "cpu") == found


def test_what_reads_no_8_bits_is_set_aside(tmp_path, monkeypatch):
    """FlashAttention-3 on a GPU: Triton's own attention instead."""
    write_checkpoint(tmp_path, "Llama")
    spec = load(tmp_path).spec
    runnable = versions.registry.runnable

    def fake(op, device, dtype, deterministic):
        found = runnable(op, "cpu", dtype, deterministic)
        if op == "paged_attention":
            all_of_them = {v.name: v for v in versions.registry.versions(op, "cuda")}
            found = [all_of_them[name] for name in ("torch", "triton", "fa3")]
        return found

    pytest.importorskip("triton")
    monkeypatch.setattr(versions.registry, "runnable", fake)
    for kind, name in ((None, "fa3"), (E4M3, "triton"), (INT8, "triton")):
        chosen = versions.choose_versions(spec, torch.bfloat16, "cuda", False, kind)
        assert chosen["paged_attention"].name == name
    assert versions.attention_set_aside("cuda", torch.bfloat16) == ["fa3"]
