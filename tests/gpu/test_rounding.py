"""Weights that are rounded while loading: what a GPU's memory needs meanwhile."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.workload import SHAPES
from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.model.loader.load import load_model
from octavo.ops.triton.expand import reserved_bytes

pytestmark = pytest.mark.gpu
LAYERS = 12


@pytest.mark.parametrize(
    "name", ("fp8", "fp8_per_block", "int8", "int8_weight_only", "bitsandbytes")
)
def test_the_peak_stays_near_the_final_size(name: str, tmp_path: Path) -> None:
    """Of a part of Llama-8B, whose embedding and head are a larger share of it than of the whole:
    15 % of the whole model's final size are the limit."""
    config = {**SHAPES["llama-8b"], "num_hidden_layers": LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"model": str(tmp_path), "load_format": "dummy", "quantization": name}
    shared = reserved_bytes()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(tmp_path, from_flags(EngineConfig, flags), lambda *news: None, "cuda")
    peak = torch.cuda.max_memory_allocated() - before - (reserved_bytes() - shared)
    kept = torch.cuda.memory_allocated() - before - (reserved_bytes() - shared)
    rest = model.weight_bytes - model.linear_bytes
    whole = rest + model.linear_bytes * SHAPES["llama-8b"]["num_hidden_layers"] / LAYERS
    print(f"{name}: peak {peak / 2**30:.2f} GiB, kept {kept / 2**30:.2f} GiB")
    assert peak - kept <= 0.15 * whole
    assert kept == pytest.approx(model.weight_bytes, rel=0.03)
