"""Experts in all the forms that checkpoints have them in, and those that must be refused."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import ModelConfig
from octavo.model.decoder import Model
from octavo.model.facts import build_spec, read_spec
from octavo.model.families import gpt_oss
from octavo.model.families.gguf_config import config_from_gguf
from octavo.model.loader.load import load_weights, open_source
from octavo.model.loader.upload import Uploader
from octavo.model.moe import Expert
from octavo.ops import moe, registry
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.fixtures.gguf_files import add_geometry, to_gguf_rows
from tests.model.expert_families import DEEPSEEK, FAMILIES, GPT_OSS
from tests.model.running import all_logits, load, random_ids, reference_logits, write_checkpoint
from tests.model.test_loader import edit_config, refuse
from tests.model.test_mxfp4 import decoded

IDS = random_ids(40)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Family -> (directory, transformers' logits), each made once."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def get(family: str) -> tuple[Path, torch.Tensor]:
        if family not in made:
            path = tmp_path_factory.mktemp("original")
            name, changes = FAMILIES[family]
            made[family] = path, reference_logits(write_checkpoint(path, name, **changes), IDS)
        return made[family]

    return get


@pytest.fixture
def copy(originals, tmp_path):
    """(a copy of a family's directory without its weights, its tensors, transformers' logits)."""

    def get(family: str):
        source, expected = originals(family)
        (tmp_path / "config.json").write_text((source / "config.json").read_text())
        return tmp_path, load_file(source / "model.safetensors"), expected

    return get


def stacked(tensors):
    """Qwen's and DeepSeek's as transformers' modules hold them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        experts = [
            [tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for e in range(8)
        ]
        found[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(e[:2]) for e in experts])
        found[f"{layer}.experts.down_proj"] = torch.stack([e[2] for e in experts])
    return found


@pytest.mark.parametrize("family", ("qwen3-moe", "deepseek-v3"))
def test_experts_in_one_tensor_load_equally(family, copy):
    directory, tensors, expected = copy(family)
    save_file(stacked(tensors), directory / "model.safetensors")
    torch.testing.assert_close(all_logits(load(directory), IDS), expected, atol=1e-4, rtol=1e-4)


def in_mxfp4(directory: Path, seed: int = 7):
    """A gpt-oss whose experts are random MXFP4 blocks, as published; its logits by transformers."""
    from transformers.integrations.mxfp4 import dequantize_convertops

    model = write_checkpoint(directory, "GptOss", **GPT_OSS)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 127, shape, generator=generator, dtype=torch.uint8)
            values = dequantize_convertops(blocks, scales, torch.float32)
            first = decoded(blocks[3, 5, 0].tolist(), int(scales[3, 5, 0]))
            assert values[3, :32, 5].tolist() == first  # of output 5
            with torch.no_grad():
                weight.copy_(values)
            stored = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[stored]
            tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    edit_config(directory, quantization_config={"quant_method": "mxfp4"})
    save_file(tensors, directory / "model.safetensors")
    return reference_logits(model, IDS)


def test_mxfp4_experts_are_expanded(tmp_path):
    expected = in_mxfp4(tmp_path)
    torch.testing.assert_close(all_logits(load(tmp_path), IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ("mixtral", "qwen3-moe-stacked", "gpt-oss", "mxfp4", "gguf"))
def test_uploaded_experts_give_the_same_model(kind, copy, tmp_path):
    """Through an uploader's buffers, as to a GPU."""
    if kind == "mxfp4":
        directory, expected = tmp_path, in_mxfp4(tmp_path)
    elif kind == "gguf":
        directory, tensors, expected = copy("qwen3-moe")
        directory = as_gguf(directory, tensors, "qwen3moe", "F32")
    else:
        directory, tensors, expected = copy(kind.removesuffix("-stacked"))
        tensors = stacked(tensors) if kind.endswith("-stacked") else tensors
        save_file(tensors, directory / "model.safetensors")
    source = open_source(directory, ModelConfig())
    source._uploader = Uploader("cpu", readers=3, piece=1000)
    model = Model(source.spec, torch.float32)
    load_weights(model, source, torch.float32, lambda *news: None)
    source.close()
    torch.testing.assert_close(all_logits(model, IDS), expected, atol=1e-4, rtol=1e-4)


def test_missing_experts_are_named_together(copy):
    directory, tensors, _ = copy("mixtral")
    missing = {1: "w1", 2: "w1", 3: "w1", 6: "w1", 4: "w2"}
    prefix = "model.layers.2.block_sparse_moe.experts"
    for expert, name in missing.items():
        del tensors[f"{prefix}.{expert}.{name}.weight"]
    save_file(tensors, directory / "model.safetensors")
    message = refuse(directory)
    assert f"missing: {prefix}.{{1-3,6}}.w1.weight, {prefix}.4.w2.weight" in message
    assert len(message) < 300


def test_other_experts_than_the_config_says_are_refused(copy):
    directory, tensors, _ = copy("mixtral")
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, num_local_experts=7)
    assert "gate.weight is [8, 64], the config says [7, 64]" in refuse(directory)
    edit_config(directory, num_local_experts=8, intermediate_size=90)
    assert "is [96, 64], the config says [90, 64]" in refuse(directory)
    edit_config(directory, intermediate_size=96)
    extra = {
        f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight": torch.ones(96, 64) for e in (8, 9)
    }
    save_file({**tensors, **extra}, directory / "model.safetensors")
    assert "does not use: model.layers.1.block_sparse_moe.experts.{8-9}.w1" in refuse(directory)


def test_bytes_that_are_no_numbers_are_refused(copy):
    directory, tensors, _ = copy("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({**tensors, name: tensors[name].to(torch.uint8)}, directory / "model.safetensors")
    assert f"{name} is U8; this version reads F32" in refuse(directory)


def test_stacked_experts_of_another_count_are_refused(copy):
    directory, tensors, _ = copy("gpt-oss")
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, num_local_experts=6)
    assert "gate_up_proj is [8, 64, 192], the config says [6, 64, 192]" in refuse(directory)


def test_layers_that_predict_further_tokens_are_left_out(copy):
    directory, tensors, expected = copy("deepseek-v3")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    save_file({**tensors, **extra}, directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["num_nextn_predict_layers"] == 1
    torch.testing.assert_close(all_logits(load(directory), IDS), expected, atol=1e-4, rtol=1e-4)
    edit_config(directory, num_nextn_predict_layers=0)
    assert "does not use: model.layers.3.eh_proj.weight" in refuse(directory)


@pytest.mark.parametrize("family", ("mixtral", "deepseek-v3", "gpt-oss"))
def test_weights_are_counted_and_experts_come_one_at_a_time(family, copy):
    directory, tensors, _ = copy(family)
    save_file(tensors, directory / "model.safetensors")
    model = load(directory)
    assert model.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    half = load(directory, dtype="bfloat16")
    exact = [name for name in tensors if name.endswith("correction_bias")]  # stays FP32
    assert half.weight_bytes == model.weight_bytes // 2
    counts = [
        layer.mlp.router.num_experts for layer in model.spec.layers if hasattr(layer.mlp, "router")
    ]
    assert sum(isinstance(part, Expert) for part in model.parts()) == sum(counts)
    assert all(not part.experts._placed for part in model.parts() if isinstance(part, Expert))
    corrections = [getattr(layer.mlp, "correction", None) for layer in half.layers]
    kept = [tensor for tensor in corrections if tensor is not None]
    assert len(kept) == len(exact) and all(tensor.dtype == torch.float32 for tensor in kept)


def test_a_router_rounds_nothing_whatever_the_linears_do(copy, monkeypatch):
    """oneDNN's give logits that are rounded to BF16, but for those near a row's largest."""
    directory, tensors, _ = copy("mixtral")
    save_file(tensors, directory / "model.safetensors")
    runnable = registry.runnable

    def without_native(op, *arguments):
        return [v for v in runnable(op, *arguments) if op != "linear" or v.name != "native"]

    monkeypatch.setattr(registry, "runnable", without_native)
    model = load(directory, dtype="bfloat16")
    if model.implementations["linear"] == "onednn":
        assert model.implementations["router"] == "torch"
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = tensors["model.layers.1.block_sparse_moe.gate.weight"].bfloat16()
    logits = model.layers[1].mlp.router(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5
    )


def test_the_latent_is_cached_and_nothing_else(copy):
    directory, tensors, _ = copy("deepseek-v2")
    save_file(tensors, directory / "model.safetensors")
    model = load(directory, dtype="bfloat16")
    cache = model.allocate_cache(5, 16)
    numbers = DEEPSEEK["kv_lora_rank"] + DEEPSEEK["qk_rope_head_dim"]
    assert [tuple(layer.shape) for layer in cache] == [(5, 16, numbers)] * 3
    assert model.kv_bytes_per_block(16) == 3 * 16 * numbers * 2


@pytest.mark.parametrize("family", ("mixtral", "qwen2-moe", "deepseek-v3", "gpt-oss"))
def test_random_weights_from_a_config_alone(family, copy):
    directory, _, _ = copy(family)
    model = load(directory, load_format="dummy")
    logits = all_logits(model, IDS)
    assert logits.isfinite().all() and logits.std() > 0.1
    assert torch.equal(all_logits(load(directory, load_format="dummy"), IDS), logits)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mixtral", {"num_local_experts": None}, "num_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3-moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ("deepseek-v3", {"n_group": 3}, "n_group is 3"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "n_group is 8"),  # worth: two experts
        ("deepseek-v3", {"topk_group": 5}, "topk_group is 5"),
        ("deepseek-v3", {"topk_group": 1}, "num_experts_per_tok is 4"),
        ("gpt-oss", {"rope_parameters": None}, "rope_scaling is None"),
        ("gpt-oss", {"swiglu_limit": 8.0}, "swiglu_limit is 8.0"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 2}, "layer_types is"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types is"),
    ],
)
def test_config_refusals(family, change, message, copy):
    directory, _, _ = copy(family)
    edit_config(directory, **change)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_spec(directory)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def as_gguf(directory: Path, tensors, arch: str, kind: str, legacy: bool = False) -> Path:
    """As llama.cpp's converter writes it: a layer's experts in one tensor for each of their
    matrices, or, before that, each expert's by itself; Llama's rotary rows as neighbours."""
    config = json.loads((directory / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(str(directory / "m.gguf"), arch)
    config["head_dim"] = config["head_dim"] or 16
    add_geometry(writer, config, config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_expert_count(8)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    stacks: dict[str, list] = {}
    for name, values in tensors.items():
        prefix, _, rest = name.partition(".experts.")
        if not rest:
            stored = table.get_name(name, try_suffixes=(".weight",))
            part = name.split(".")[-2]
            if arch == "llama" and part in heads:
                values = torch.from_numpy(to_gguf_rows(values.numpy(), heads[part]))
            add(
                writer, stored, values, "F32" if values.dim() == 1 or "gate_inp" in stored else kind
            )
        elif legacy:
            expert, part, _ = rest.split(".")
            short = {"w1": "gate", "w2": "down", "w3": "up"}[part]
            add(writer, f"blk.{name.split('.')[2]}.ffn_{short}.{expert}.weight", values, kind)
        else:
            stacks.setdefault(f"{prefix}.experts.{rest.split('.')[1]}", []).append((rest, values))
    for name, experts in stacks.items():
        ordered = [values for _, values in sorted(experts, key=lambda item: item[0])]
        add(writer, f"{table.get_name(name)}.weight", torch.stack(ordered), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "m.gguf"


def add(writer, name: str, values, kind: str) -> None:
    kept = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values.numpy(), kept), raw_dtype=kept)


@pytest.mark.parametrize("legacy", (False, True))
def test_mixtral_from_gguf(legacy, copy):
    directory, tensors, expected = copy("mixtral")
    file = as_gguf(directory, tensors, "llama", "F32", legacy)
    torch.testing.assert_close(all_logits(load(file), IDS), expected, atol=1e-4, rtol=1e-4)


def test_qwen3_moe_from_gguf(copy):
    directory, tensors, expected = copy("qwen3-moe")
    file = as_gguf(directory, tensors, "qwen3moe", "F32")
    torch.testing.assert_close(all_logits(load(file), IDS), expected, atol=1e-4, rtol=1e-4)


def test_quantized_experts_from_gguf(copy):
    """The model whose matrices are what Q8_0 keeps of them; in BF16 they keep their groups."""
    directory, tensors, _ = copy("mixtral")
    q8 = gguf.GGMLQuantizationType.Q8_0
    kept = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(t.numpy(), q8), q8))
        for name, t in tensors.items()
        if t.dim() == 2 and not name.endswith("moe.gate.weight")
    }
    save_file({**tensors, **kept}, directory / "model.safetensors")
    expected = all_logits(load(directory), IDS)
    file = as_gguf(directory, tensors, "llama", "Q8_0")
    torch.testing.assert_close(all_logits(load(file), IDS), expected, atol=1e-4, rtol=1e-4)
    half = load(file, dtype="bfloat16")
    error = (all_logits(half, IDS) - expected).abs()
    assert error.median() < 0.05 * expected.abs().max()


def test_experts_of_other_gguf_architectures_are_refused(copy):
    directory, tensors, _ = copy("qwen3-moe")
    file = as_gguf(directory, tensors, "qwen3moe", "F32")
    renamed = bytes(file.read_bytes()).replace(b"qwen3moe", b"deepseek")
    file.write_bytes(renamed)
    with pytest.raises(ConfigError, match="GGUF architecture 'deepseek' is not supported"):
        load(file)
    with pytest.raises(ConfigError, match=r"qwen3\.expert_count is 8; this version reads experts"):
        config_from_gguf(
            {"general.architecture": "qwen3", "qwen3.expert_count": 8},
            {"token_embd.weight": (320, 64)},
            lambda name: [],
            "m.gguf",
        )


@pytest.mark.skipif(not library.features(), reason="no kernels here")
def test_experts_are_rounded_while_loading(copy):
    """Near the model of the same weights; routers stay exact, or tokens would go elsewhere."""
    directory, tensors, _ = copy("mixtral")
    save_file(tensors, directory / "model.safetensors")
    expected, model = load(directory), load(directory, quantization="int8_weight_only")
    assert model.weight_bytes < 0.45 * expected.weight_bytes
    exact = all_logits(expected, IDS)
    assert 0 < (all_logits(model, IDS) - exact).abs().median() < 0.02 * exact.abs().max()


def test_published_configs_are_read():
    """The keys of DeepSeek's own repositories that transformers does not write."""
    common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320,
              "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
              "ep_size": 1, "moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False,
              "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                               "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                               "type": "yarn"}}  # fmt: skip
    config = {**common, **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"],
              "scoring_func": "sigmoid", "topk_method": "noaux_tc",
              "routed_scaling_factor": 2.5}  # fmt: skip
    spec = build_spec(config, "x")
    mixer = spec.layers[1].mixer
    assert spec.max_position == 163840 and mixer.interleaved
    assert mixer.rope.scaling.attention_factor == 1.0
    magnitude = 0.1 * torch.tensor(40.0).log().item() + 1
    assert mixer.scale == pytest.approx(28**-0.5 * magnitude**2, rel=1e-6)


def test_gpt_oss_admits_the_constants_that_the_kernels_have():
    """Written twice: families never import torch."""
    assert (gpt_oss.ALPHA, gpt_oss.LIMIT) == (moe.SWIGLU_ALPHA, moe.SWIGLU_LIMIT)
