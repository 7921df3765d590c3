"""Checkpoints of every format through the loader: the weights are those the format means, and the
logits are the dense model's of the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.config import ModelConfig
from octavo.model.loader.load import open_source
from octavo.ops.float8 import quantize_float8
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.model.expert_families import DEEPSEEK
from tests.model.quantized_checkpoints import KINDS, in_format, of_gptq
from tests.model.running import all_logits, load, random_ids, write_checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.features(), reason="no kernels here"),
]
IDS = random_ids(60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of a class, with three groups of 32 in its inputs."""
    found: dict[tuple[Any, ...], Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in found:
            found[key] = tmp_path_factory.mktemp("dense")
            sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
            write_checkpoint(found[key], name, **{"initializer_range": 0.1, **sizes, **changes})
        return found[key]

    return make


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).pow(2).mean().sqrt() / exact.std())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_dense_models_of_the_same_numbers(
    kind: str, checkpoints: Any, tmp_path: Path
) -> None:
    """In FP32 inputs are as they are. In BF16 those of 4 and 8 bits are rounded to 8 bits on a CPU,
    by group (relative RMS error up to 4 %; expected of BF16 alone: 1 %)."""
    path, dense = in_format(checkpoints("Llama"), KINDS[kind], tmp_path)
    exact = all_logits(load(dense), IDS)
    model = load(path)
    assert model.reasons["quantization"].startswith(f"{KINDS[kind].format.name}: the checkpoint's")
    assert error(all_logits(model, IDS), exact) < 1e-5
    half = load(path, "bfloat16")
    assert error(all_logits(half, IDS), exact) < 0.05
    dense_bytes = load(dense, "bfloat16").linear_bytes
    bits = KINDS[kind].round(torch.randn(160, 96)).bits if "fp8" not in kind else 8
    tables = 5 if "squeezellm" in kind else 0  # of each output: a lot for 96 inputs
    assert half.linear_bytes < (bits + 1.4 + tables) / 16 * dense_bytes


SOME = (
    *("gptq 4 bits", "gptq 3 bits", "gptq act-order", "awq", "w4a16", "w8a8 int8", "fp8 by tensor"),
    *("fp8 by block", "nf4", "llm.int8", "squeezellm 3 bits", "squeezellm 4 bits, sparse"),
)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen2", {"head_dim": None}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Phi3", {"head_dim": None}),
        ("Mixtral", {"num_local_experts": 4}),
    ],
    ids=("biases of q, k, v", "tied head", "all biases", "fused in the file", "experts"),
)
def test_models_of_other_shapes(
    kind: str, name: str, changes: dict[str, Any], checkpoints: Any, tmp_path: Path
) -> None:
    changes = {k: v for k, v in changes.items() if v is not None}
    if name in ("Qwen2", "Phi3"):
        changes["num_attention_heads"], changes["num_key_value_heads"] = 6, 2
    path, dense = in_format(checkpoints(name, **changes), KINDS[kind], tmp_path)
    assert error(all_logits(load(path), IDS), all_logits(load(dense), IDS)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_gives_the_weight_that_was_written(
    kind: str, checkpoints: Any, tmp_path: Path
) -> None:
    directory = checkpoints("Llama")
    path, _ = in_format(directory, KINDS[kind], tmp_path)
    stored = load_file(directory / "model.safetensors")
    source = open_source(path, ModelConfig())
    for ours, theirs in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
        dense = stored[f"model.layers.1.{theirs}.weight"]
        found = source.fetch(f"layers.1.{ours}.weight", tuple(dense.shape), torch.float32)()
        assert torch.equal(found.dense(), KINDS[kind].round(dense).dense())


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("stored", ("gptq", "gptq_v2"))
@pytest.mark.parametrize("said", ("gptq", "gptq_v2", None))
def test_zeros_of_gptq_whatever_the_config_says(
    bits: int, stored: str, said: str | None, checkpoints: Any, tmp_path: Path
) -> None:
    """T48: symmetric zeros are the middle whether they are stored minus one or not; a field that
    says otherwise is told at start."""
    kind = of_gptq(bits, 32, True, version=stored)
    path, dense = in_format(checkpoints("Llama"), kind, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = said
    (path / "config.json").write_text(json.dumps(config))
    model = load(path)
    assert error(all_logits(model, IDS), all_logits(load(dense), IDS)) < 1e-5
    told = "zero points are stored" in model.reasons.get("checkpoint", "")
    assert told == ((said or "gptq") != stored)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(
    checkpoints: Any, tmp_path: Path
) -> None:
    """AutoGPTQ writes one for every projection. One that is not zero is refused."""
    path, dense = in_format(checkpoints("Llama"), KINDS["gptq symmetric"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(160)}, path / "model.safetensors")
    assert error(all_logits(load(path), IDS), all_logits(load(dense), IDS)) < 1e-5
    save_file({**tensors, name: torch.ones(160)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"does not use: {name}"):
        load(path)


def test_zero_points_of_symmetric_weights_are_left_out(checkpoints: Any, tmp_path: Path) -> None:
    """Early versions of compressed-tensors write them. Others than zeros are refused."""
    path, dense = in_format(checkpoints("Llama"), KINDS["w8a8 int8"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    zeros = torch.zeros(160, 1, dtype=torch.int8)
    save_file({**tensors, name: zeros}, path / "model.safetensors")
    assert error(all_logits(load(path), IDS), all_logits(load(dense), IDS)) < 1e-5
    save_file({**tensors, name: zeros + 1}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"does not use: {name}"):
        load(path)


BROKEN = {
    "codes of another width": (
        {"qweight": torch.zeros(96 // 4, 96, dtype=torch.int32)},
        {},
        r"q_proj.qweight is \[24, 96\], the config says \[12, 64\]",
    ),
    "a missing tensor": ({"scales": None}, {}, "tensors are missing: .*q_proj.scales"),
    "floats for codes": (
        {"qweight": torch.zeros(12, 96)},
        {},
        "q_proj.qweight is F32, where I32 belongs",
    ),
    "a group that does not divide": ({}, {"group_size": 64}, r"q_proj: .*64.*96"),
    "an input of no group": (
        {"g_idx": torch.full((96,), 7, dtype=torch.int32)},
        {},
        "q_proj: .*g_idx",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused(case: str, checkpoints: Any, tmp_path: Path) -> None:
    changes, fields, message = BROKEN[case]
    path, _ = in_format(checkpoints("Llama"), KINDS["gptq symmetric"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    for suffix, tensor in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{suffix}"
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= fields
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_numbers_that_are_none_are_refused(checkpoints: Any, tmp_path: Path) -> None:
    path, _ = in_format(checkpoints("Llama"), KINDS["fp8 by tensor"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 127
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.down_proj: weight holds 1 numbers that are not finite"
    ):
        load(path)


@pytest.mark.parametrize("kind", ("fp8 by block", "gptq 4 bits", "nf4"))
def test_latent_attention_absorbs_a_dense_copy(kind: str, checkpoints: Any, tmp_path: Path) -> None:
    """Whose bytes are those of the model's dtype."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "first_k_dense_replace": 3, "head_dim": 32}
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    path, dense = in_format(
        checkpoints("DeepseekV3", **DEEPSEEK | sizes | heads), KINDS[kind], tmp_path
    )
    model, exact = load(path), load(dense)
    assert error(all_logits(model, IDS), all_logits(exact, IDS)) < 1e-5
    mixers = [layer.mixer for layer in model.layers]
    absorbed = sum(mixer.key_up.nbytes + mixer.value_up.nbytes for mixer in mixers)
    tensors = load_file(path / "model.safetensors")
    ups = {name: tensor for name, tensor in tensors.items() if ".kv_b_proj." in name}
    assert absorbed > 2 * sum(tensor.nbytes for tensor in ups.values())
    linears = (linear.apply for layer in model.layers for linear in layer.linears())
    packed = sum(
        one._panels.nbytes for apply in linears for one in getattr(apply, "parts", [apply])
    )
    assert abs(model.linear_bytes / (absorbed + packed) - 1) < 0.03


def test_dummy_weights_in_the_format_of_the_config(checkpoints: Any, tmp_path: Path) -> None:
    path, _ = in_format(checkpoints("Llama"), KINDS["gptq 4 bits"], tmp_path)
    (path / "model.safetensors").unlink()
    model = load(path, "bfloat16", load_format="dummy")
    assert model.quantization == "gptq" and all_logits(model, IDS).isfinite().all()
    assert model.linear_bytes < 0.35 * load(path.parent / "dense", "bfloat16").linear_bytes


@pytest.mark.parametrize("kind", ("gptq 4 bits", "fp8 by channel", "w8a8 int8", "llm.int8"))
def test_torchs_files_hold_quantized_tensors_too(
    kind: str, checkpoints: Any, tmp_path: Path
) -> None:
    path, _ = in_format(checkpoints("Llama"), KINDS[kind], tmp_path)
    expected = all_logits(load(path), IDS)
    file = path / "model.safetensors"
    torch.save(load_file(file), path / "pytorch_model.bin")
    file.unlink()
    assert torch.equal(all_logits(load(path), IDS), expected)


def test_squeezellms_own_files(checkpoints: Any, tmp_path: Path) -> None:
    """Their name, the bits in quant_config.json, and counts of outliers among the tensors."""
    path, _ = in_format(checkpoints("Llama"), KINDS["squeezellm 4 bits, sparse"], tmp_path)
    expected = all_logits(load(path), IDS)
    file = path / "model.safetensors"
    counts = {"sparse_threshold.model.layers.0.mlp.up_proj": 7}
    torch.save({**load_file(file), **counts}, path / "sq-tiny-w4-s45.pt")
    file.unlink()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "quant_config.json").write_text(json.dumps({"wbits": 4}))
    assert torch.equal(all_logits(load(path), IDS), expected)


def test_fused_projections_with_a_scale_for_each(checkpoints: Any, tmp_path: Path) -> None:
    """Phi-3 in FP8: three scales of qkv_proj, two of gate_up_proj."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    path, dense = in_format(checkpoints("Phi3", **sizes), KINDS["fp8 by tensor"], tmp_path)
    tensors, exact = load_file(path / "model.safetensors"), load_file(dense / "model.safetensors")
    for name in [name for name in exact if "qkv_proj" in name or "gate_up_proj" in name]:
        parts = exact[name].split((96, 32, 32) if "qkv" in name else (160, 160))
        rounded = [quantize_float8(part * (n + 1), (0, 0)) for n, part in enumerate(parts)]
        tensors[name] = torch.cat([part.values.view(torch.uint8) for part in rounded])
        tensors[name] = tensors[name].view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.cat([part.scales.flatten() for part in rounded])
        exact[name] = torch.cat([part.dense() for part in rounded])
    save_file(tensors, path / "model.safetensors")
    save_file(exact, dense / "model.safetensors")
    assert error(all_logits(load(path), IDS), all_logits(load(dense), IDS)) < 1e-5


def test_a_sparse_part_may_be_empty(checkpoints: Any, tmp_path: Path) -> None:
    """Of a matrix without outliers the file has tensors of no numbers."""
    path, _ = in_format(checkpoints("Llama"), KINDS["squeezellm 4 bits, sparse"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    tensors[f"{module}.rows"] = torch.zeros_like(tensors[f"{module}.rows"])
    for suffix in ("cols", "vals"):
        tensors[f"{module}.{suffix}"] = tensors[f"{module}.{suffix}"][:0].clone()
    save_file(tensors, path / "model.safetensors")
    weight = open_source(path, ModelConfig()).fetch("layers.0.q.weight", (64, 96), torch.float32)()
    assert weight.outliers is None
    assert all_logits(load(path), IDS).isfinite().all()


def test_inputs_that_were_to_be_rounded_and_are_not_are_refused(
    checkpoints: Any, tmp_path: Path
) -> None:
    """compressed-tensors holds weights of both kinds: what a CPU rounds inputs of, and FP8."""
    flags = {"quantized_activations": "always"}
    path, _ = in_format(checkpoints("Llama"), KINDS["w8a8 fp8"], tmp_path / "fp8")
    with pytest.raises(
        ConfigError, match=r"--quantized-activations always: no linear of .* rounds"
    ):
        load(path, "bfloat16", **flags)
    path, _ = in_format(checkpoints("Llama"), KINDS["w8a8 int8"], tmp_path / "int8")
    assert "quantized_linear" in load(path, "bfloat16", **flags).implementations
