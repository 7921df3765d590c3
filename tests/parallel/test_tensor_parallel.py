"""Ranks that share each layer compute what one rank does: every family, every format, shares that
come out uneven, and more ranks than KV heads. The ranks are threads (``ranks``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import EngineConfig, ModelConfig
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.model.shard import TensorParallel
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.model import expert_families
from tests.model.quantized_checkpoints import KINDS, in_format
from tests.model.running import all_logits, random_ids, write_gguf
from tests.model.test_families import FAMILIES
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = random_ids(50)
ALL = {**FAMILIES, **expert_families.FAMILIES}


def logits_on(path: Path, size: int, dtype: str = "float32", **flags: Any) -> list[Tensor]:
    """Of all ranks."""

    def run(ranks: TensorParallel) -> Tensor:
        return all_logits(share_of(path, ranks, dtype, **flags), IDS, 17)

    return on_ranks(size, run)


def share_of(path: Path, ranks: TensorParallel, dtype: str = "float32", **flags: Any) -> Model:
    config = EngineConfig(model=ModelConfig(dtype=dtype, **flags))
    return load_model(path, config, lambda *news: None, ranks=ranks)


def check(path: Path, size: int, tolerance: float = 1e-3, **flags: Any) -> None:
    (alone,) = logits_on(path, 1, **flags)
    for found in logits_on(path, size, **flags):
        assert (found - alone).abs().max() < tolerance
        assert torch.equal(found.argmax(1), alone.argmax(1))


@pytest.mark.parametrize("family", ALL)
def test_two_ranks_give_every_familys_logits(family: str, written: Any) -> None:
    name, changes = ALL[family]
    check(written(name, **changes), 2)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True}),
        ("Olmo2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("Qwen3Moe", {**expert_families.QWEN, "head_dim": 32}),
        ("GptOss", expert_families.GPT_OSS),
        ("DeepseekV3", expert_families.DEEPSEEK),
    ],
    ids=["uneven", "one-kv-head", "norm-over-projections", "qwen3-moe", "gpt-oss", "latent"],
)
def test_shares_may_be_uneven_and_kv_heads_replicated(
    name: str, changes: dict[str, Any], size: int, written: Any
) -> None:
    check(written(name, **changes), size)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_every_formats_logits(kind: str, written: Any, tmp_path: Path) -> None:
    """Three groups of 32 in the inputs of attention, five in those of ``down``: cut between two."""
    if not library.features():
        pytest.skip("no kernels here")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    dense = written("Llama", num_attention_heads=3, num_key_value_heads=3, **sizes)
    path, _ = in_format(dense, KINDS[kind], tmp_path)
    check(path, 2)


@pytest.mark.parametrize("kind", ["gptq act-order", "awq", "fp8 by block", "nf4", "llm.int8"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gemma2"])
def test_formats_of_other_families(kind: str, family: str, written: Any, tmp_path: Path) -> None:
    if not library.features():
        pytest.skip("no kernels here")
    name, changes = ALL[family]
    inner = {"moe_intermediate_size": 96, "intermediate_size": 160, "hidden_size": 96}
    path, _ = in_format(written(name, **{**changes, **inner}), KINDS[kind], tmp_path)
    check(path, 2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1", "Q4_1"])
def test_gguf_groups(kind: str, written: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    source = written("Llama", num_attention_heads=3, num_key_value_heads=3, **sizes)
    file = write_gguf(tmp_path / "model.gguf", source, kind, tied=kind == "Q8_0")
    check(file, 2)


@pytest.mark.parametrize("rounding", ["fp8", "int8", "bitsandbytes", "int8_weight_only"])
def test_weights_that_are_rounded_while_loading_are_the_same_on_more_ranks(
    rounding: str, written: Any
) -> None:
    # INT8 rounds inputs too: a sum's last bit may send one to the next code.
    tolerance = 0.2 if rounding == "int8" else 1e-3
    path = written("Llama", hidden_size=128, intermediate_size=256)
    check(path, 2, tolerance, quantization=rounding)


def test_a_rank_holds_its_share_alone(written: Any) -> None:
    """And says so before anything is loaded: the bytes are those of the tensors it keeps."""
    path = written("Llama", vocab_size=512, hidden_size=128, intermediate_size=512)
    whole = share_of(path, TensorParallel())
    halves = on_ranks(2, lambda ranks: share_of(path, ranks))
    norms = (2 * 3 + 1) * 128 * 4
    for half in halves:
        assert half.weight_bytes - norms == (whole.weight_bytes - norms) // 2
        assert half.kv_bytes_per_block(16) == whole.kv_bytes_per_block(16) // 2
    assert 2 * halves[0].linear_bytes == whole.linear_bytes


def test_what_cannot_be_divided_is_refused_with_the_sizes(written: Any) -> None:
    path = written("Llama")
    with pytest.raises(ConfigError, match=r"5: the model has 4 attention heads.*use 1 to 4"):
        on_ranks(5, lambda ranks: share_of(path, ranks))
