"""Which numbers a model is computed with, on a CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import ModelConfig
from octavo.model.dtype import choose_dtype
from octavo.model.loader.load import open_source
from octavo.ops.cpu.linear import has_bf16
from octavo.types import ConfigError
from tests.model.running import write_checkpoint
from tests.model.test_loader import write_gguf


def test_dtype_is_bf16_where_the_cpu_has_it():
    dtype, reason = choose_dtype("auto")
    assert dtype == (torch.bfloat16 if has_bf16() else torch.float32) and "BF16" in reason
    assert choose_dtype("half")[0] == torch.float16


@pytest.mark.parametrize(
    ("stored", "asked", "dtype", "reason"),
    [
        (torch.bfloat16, "auto", torch.bfloat16, "the checkpoint's"),
        (torch.float16, "auto", torch.float16, "the checkpoint's"),
        (torch.float32, "auto", torch.bfloat16, "the checkpoint's float32 is rounded"),
        (None, "auto", torch.bfloat16, "default on a GPU"),
        (torch.float16, "bfloat16", torch.bfloat16, "--dtype bfloat16"),
    ],
)
def test_dtype_on_a_gpu_is_the_checkpoints(stored, asked, dtype, reason):
    found, why = choose_dtype(asked, "cuda", stored)
    assert found == dtype and reason in why


def test_fp32_on_a_gpu_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"--dtype float32: .* use bfloat16 or float16"):
        choose_dtype("float32", "cuda", torch.float32)


def test_a_checkpoint_is_of_the_dtype_of_most_of_its_bytes(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        mixed = {n: t if t.dim() == 1 else t.to(kind) for n, t in tensors.items()}
        save_file(mixed, tmp_path / "model.safetensors")
        assert open_source(tmp_path, ModelConfig()).dtype == kind


def test_random_weights_are_of_the_dtype_the_config_states(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    for stated, dtype in (
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "odd"}, None),
    ):
        config = ModelConfig(load_format="dummy", hf_overrides=stated)
        assert open_source(tmp_path, config).dtype == dtype


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("Q8_0", None)])
def test_gguf_says_what_it_is_stored_in(tmp_path, kind, dtype):
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, kind)
    assert open_source(file, ModelConfig()).dtype == dtype
