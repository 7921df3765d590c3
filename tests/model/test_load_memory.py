"""What loading takes beyond the weights: pages of the files are given back on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model.running import TINY, write_checkpoint

# Peak of resident memory while a model loads, above what was there before, in bytes.
MEASURE = """
import json, sys
from pathlib import Path
from octavo.config import EngineConfig, ModelConfig, prepare_torch
prepare_torch()
from octavo.model.loader.load import load_model

def load(path):
    config = EngineConfig(model=ModelConfig(dtype=sys.argv[3], load_format=sys.argv[4]))
    return load_model(path, config, lambda *news: None)

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(key)))

load(sys.argv[1])  # imports, thread teams, allocators
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
before = memory("VmRSS")
model = load(sys.argv[2])
print(json.dumps({"peak": memory("VmHWM") - before, "weights": model.weight_bytes}))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A checkpoint of both kinds, for ``--load-format`` to choose from."""
    path = tmp_path_factory.mktemp("tiny")
    torch.save(dict(write_checkpoint(path, "Llama").state_dict()), path / "pytorch_model.bin")
    return path


def write_large(directory: Path, tiny: Path, kind: str, shard_bytes: int) -> int:
    """A Llama of BF16 zeros in three shards of about so many bytes. Returns the largest's bytes."""
    hidden, inner = 256, 1024
    layer_bytes = 2 * (3 * hidden * inner + 2 * hidden * hidden + 2 * hidden * hidden // 2)
    num_layers, vocab = 3 * max(1, round(shard_bytes / layer_bytes)), 1000
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        **TINY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
    }
    (directory / "config.json").write_text(json.dumps(config))

    def matrix(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    shards[0]["model.embed_tokens.weight"] = matrix(vocab, hidden)
    shards[2] |= {"model.norm.weight": matrix(hidden), "lm_head.weight": matrix(vocab, hidden)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shards[layer * 3 // num_layers] |= {
            f"{prefix}.input_layernorm.weight": matrix(hidden),
            f"{prefix}.post_attention_layernorm.weight": matrix(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(hidden // 2, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(hidden // 2, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    single = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    files = [directory / f"part-{number}.{kind}" for number in range(3)]
    for file, tensors in zip(files, shards):
        (save_file if kind == "safetensors" else torch.save)(tensors, file)
    places = {name: file.name for file, part in zip(files, shards) for name in part}
    (directory / f"{single}.index.json").write_text(json.dumps({"weight_map": places}))
    return max(file.stat().st_size for file in files)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_loading_takes_the_weights_and_little_more(tmp_path, tiny, kind) -> None:
    """Beyond the weights at most 1.2 times the largest shard."""
    load_format = "pt" if kind == "bin" else kind
    largest = write_large(tmp_path, tiny, kind, 60_000_000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(tmp_path), "bfloat16", load_format],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    extra = found["peak"] - found["weights"]
    print(f"{kind}: weights {found['weights'] / 1e6:.0f} MB, {extra / 1e6:.0f} MB more")
    assert extra < 1.2 * largest, f"{extra / 1e6:.0f} MB, largest shard {largest / 1e6:.0f} MB"
    assert found["peak"] > 0.9 * found["weights"]  # the measure sees what it should
