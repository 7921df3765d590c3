"""Loading to a GPU gives the tensors that loading to the CPU gives."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import ModelConfig
from octavo.model.loader.load import open_source
from octavo.model.loader.upload import PIECE
from tests.model.running import write_checkpoint
from tests.model.test_loader import write_gguf

pytestmark = pytest.mark.gpu

TENSORS = {
    "embed.weight": (320, 64),
    "layers.1.down.weight": (64, 96),
    "layers.0.q.weight": (64, 64),
    "norm.weight": (64,),
}


def assert_equal_tensors(path):
    """All are on their way at once, while the GPU is busy with memory given back just before."""
    with torch.inference_mode():
        plain, uploaded = open_source(path, ModelConfig()), open_source(path, ModelConfig(), "cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.randn(64 << 20, device="cuda").mul_(2)
            calls = {n: uploaded.fetch(n, shape, dtype) for n, shape in TENSORS.items()}
            for name, call in calls.items():
                found = call()
                assert found.device.type == "cuda" and found.dtype == dtype
                expected = plain.fetch(name, TENSORS[name], dtype)()
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-3)
                if dtype == torch.float32:
                    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
        uploaded.close()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_safetensors(tmp_path, dtype):
    write_checkpoint(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    assert_equal_tensors(tmp_path)


@pytest.mark.parametrize("kind", ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"))
def test_gguf(tmp_path, kind):
    write_checkpoint(tmp_path, "Llama")
    assert_equal_tensors(write_gguf(tmp_path / "m.gguf", tmp_path, kind))


def test_a_tensor_of_many_pieces(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    rows = 5 * PIECE // (64 * 2) + 3
    big = torch.randint(-100, 100, (rows, 64)).to(torch.bfloat16)
    save_file({**load_file(file), "lm_head.weight": big}, file)
    source = open_source(tmp_path, ModelConfig(), "cuda")
    for _ in range(3):
        found = source.fetch("head.weight", (rows, 64), torch.bfloat16)()
        assert torch.equal(found.cpu(), big)
    source.close()


def test_random_weights_are_made_on_the_gpu_with_the_cpus_statistics(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    config = ModelConfig(load_format="dummy")

    def made():
        source = open_source(tmp_path, config, "cuda")
        return source.fetch("layers.1.down.weight", (4096, 1024), torch.bfloat16)()

    weight = made()
    assert weight.device.type == "cuda" and weight.dtype == torch.bfloat16
    assert abs(weight.float().std() * 32 - 1) < 0.01 and abs(weight.float().mean()) < 1e-3
    assert torch.equal(weight, made())
