"""Stages of a model, run one after the other, give the whole model's logits, bit for bit: every
family, every way in which weights are kept, ends that are tied or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model
from octavo.model.loader.load import load_model
from octavo.model.shard import TensorParallel
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.fixtures import models
from tests.model import expert_families
from tests.model.quantized_checkpoints import KINDS, in_format
from tests.model.running import all_logits, make_batch, random_ids, write_gguf
from tests.model.test_families import FAMILIES
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = random_ids(50)
ALL = {**FAMILIES, **expert_families.FAMILIES}


class Chain:
    """The stages of a model, each with its part of the cache."""

    def __init__(self, stages: list[Model]) -> None:
        self.stages = stages
        self.spec = stages[0].spec

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[list[Tensor]]:
        return [stage.allocate_cache(num_blocks, block_size) for stage in self.stages]

    def copy_blocks(self, caches: list[list[Tensor]], pairs: Tensor) -> None:
        for stage, cache in zip(self.stages, caches):
            stage.copy_blocks(cache, pairs)

    def forward(
        self, batch: ForwardBatch, caches: list[list[Tensor]], last: bool = False
    ) -> Tensor:
        hidden = None
        for stage, cache in zip(self.stages, caches):
            run = stage.forward_last if last else stage.forward
            hidden = run(batch, cache, hidden)
        assert hidden is not None
        return hidden

    def forward_last(self, batch: ForwardBatch, caches: list[list[Tensor]]) -> Tensor:
        return self.forward(batch, caches, last=True)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)

    def most_likely(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].most_likely(hidden)


def load_stages(path: Path, count: int, dtype: str = "float32", **flags: Any) -> list[Model]:
    """``kv_cache_dtype`` among the flags is of the cache."""
    cache = CacheConfig(kv_cache_dtype=flags.pop("kv_cache_dtype", "auto"))
    config = EngineConfig(model=ModelConfig(dtype=dtype, **flags), cache=cache)
    return [
        load_model(path, config, lambda *news: None, stage=stage, num_stages=count)
        for stage in range(count)
    ]


def check(path: Path, count: int, **flags: Any) -> None:
    (whole,), chain = load_stages(path, 1, **flags), Chain(load_stages(path, count, **flags))
    assert torch.equal(all_logits(chain, IDS, 17), all_logits(whole, IDS, 17))  # type: ignore
    assert last_tokens(chain) == last_tokens(whole)
    assert sum(stage.kv_bytes_per_block(16) for stage in chain.stages) == (
        whole.kv_bytes_per_block(16)
    )
    assert sum(stage.linear_bytes for stage in chain.stages) == whole.linear_bytes


def last_tokens(model: Any) -> list[list[int]]:
    """Two rows, one that decodes and one with a chunk; a block is copied between two steps."""
    cache = model.allocate_cache(8, 16)
    tables = torch.tensor([[0, 1, 2], [5, 3, 4]], dtype=torch.int32)
    first = make_batch([IDS[:20], IDS[20:41]], [0, 0], tables)
    model.forward(first, cache)
    model.copy_blocks(cache, torch.tensor([[1, 6]]))
    tables[0, 1] = 6
    hidden = model.forward_last(make_batch([IDS[:1], IDS[:9]], [20, 21], tables), cache)
    assert hidden.shape == (2, model.spec.hidden_size)
    return [model.logits(hidden).flatten().tolist(), model.most_likely(hidden).tolist()]


@pytest.mark.parametrize("family", ALL)
def test_two_stages_give_every_familys_logits(family: str, written: Any) -> None:
    name, changes = ALL[family]
    check(written(name, **changes), 2)


THREE = ("llama", "llama-tied", "gpt2", "gemma2", "opt-after-narrow", "qwen3-moe", "gpt-oss")


@pytest.mark.parametrize("family", [*THREE, "deepseek-v3-yarn", "gemma3", "granite"])
def test_three_stages_of_which_one_has_no_end(family: str, written: Any) -> None:
    name, changes = ALL[family]
    check(written(name, **changes), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_quantized_checkpoints(kind: str, written: Any, tmp_path: Path) -> None:
    if not library.features():
        pytest.skip("no kernels here")
    path, _ = in_format(written("Llama", intermediate_size=128), KINDS[kind], tmp_path)
    check(path, 3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_gguf_files(kind: str, tied: bool, written: Any, tmp_path: Path) -> None:
    """The embedding's rows are read from groups, by the first stage; a tied head multiplies with
    the same groups in the last."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    source = written("Llama", **sizes)
    file = write_gguf(tmp_path / "model.gguf", source, kind, tied=tied, factors=torch.rand(32) + 1)
    check(file, 3, quantization=None)
    if library.features():
        check(file, 2, quantization="gguf")


@pytest.mark.parametrize("name", ["R", "R-bf16", "R-Q8_0", "Q128"])
def test_stages_of_the_fixtures(name: str) -> None:
    dtype = "bfloat16" if name == "R-bf16" else "float32"
    check(models.path(name), 2, dtype=dtype)


@pytest.mark.parametrize("rounding", ["fp8", "int8", "bitsandbytes"])
def test_stages_rounded_while_loading(rounding: str, written: Any) -> None:
    path = written("Llama", hidden_size=128, intermediate_size=256)
    check(path, 2, quantization=rounding)
    if rounding == "int8":
        tied = written("Llama", tie_word_embeddings=True, hidden_size=128)
        check(tied, 3, quantization=rounding, quantize_head=True)


def test_dummy_weights_are_the_same_in_every_stage(written: Any) -> None:
    check(written("Llama", tie_word_embeddings=True), 3, load_format="dummy")


def test_stages_have_their_layers_scales_of_the_kv_cache(written: Any, tmp_path: Path) -> None:
    if not library.features():
        pytest.skip("no kernels here")
    source = written("Llama")
    tensors = load_file(source / "model.safetensors")
    for layer in range(3):
        for kind in "kv":
            scale = torch.tensor(0.01 * (layer + 1))
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    check(tmp_path, 3, kv_cache_dtype="fp8")


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_loads_its_own_layers_and_says_what_they_take(tied: bool, written: Any) -> None:
    """The vocabulary is as large as two layers: it decides how many an end's stage has."""
    path = written("Llama", vocab_size=1024, num_hidden_layers=8, tie_word_embeddings=tied)
    stages = load_stages(path, 3)
    ranges = [(s.stage.first_layer, s.stage.end_layer) for s in stages]
    assert [end - first for first, end in ranges] == [2, 4, 2]
    embedding, hidden = 1024 * 64 * 4, 64 * 4
    layer = (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) * 4
    assert [stage.weight_bytes for stage in stages] == [
        2 * layer + embedding,
        4 * layer,
        2 * layer + embedding + hidden,
    ]
    wanted = [{name for part in s.parts() for name, _ in part.wanted()} for s in stages]
    assert "embed.weight" in wanted[0] and ("embed.weight" in wanted[2]) == tied
    assert not wanted[0] & wanted[1] and {"layers.2.q.weight"} <= wanted[1]


def test_a_damaged_checkpoint_is_refused_alike_by_every_stage(written: Any, tmp_path: Path) -> None:
    source = written("Llama")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    config = EngineConfig(model=ModelConfig(dtype="float32"))
    told = set()
    for stage in range(3):
        with pytest.raises(ConfigError, match=r"missing: model\.layers\.2\.mlp\.up_proj") as error:
            load_model(tmp_path, config, lambda *news: None, stage=stage, num_stages=3)
        told.add(str(error.value))
    assert len(told) == 1
    with pytest.raises(ConfigError, match=r"size 4: the model has 3 layers.*use 1 to 3"):
        load_model(source, config, lambda *news: None, stage=0, num_stages=4)


def test_hidden_states_go_into_later_stages_alone(written: Any) -> None:
    first, last = load_stages(written("Llama"), 2)
    batch = make_batch([[1, 2]], [0], torch.tensor([[0]], dtype=torch.int32))
    hidden = first.forward(batch, first.allocate_cache(1, 16))
    with pytest.raises(ValueError, match="not the first"):
        last.forward(batch, last.allocate_cache(1, 16))
    with pytest.raises(ValueError, match="no other"):
        first.forward(batch, first.allocate_cache(1, 16), hidden)


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe", "deepseek-v3", "opt-after-narrow"])
def test_ranks_that_share_the_layers_of_stages(family: str, written: Any) -> None:
    name, changes = ALL[family]
    path = written(name, **changes)
    config = EngineConfig(model=ModelConfig(dtype="float32"))
    whole = all_logits(load_model(path, config, lambda *news: None), IDS, 17)

    def run(ranks: TensorParallel) -> Tensor:
        stages = [
            load_model(path, config, lambda *news: None, ranks=ranks, stage=stage, num_stages=2)
            for stage in range(2)
        ]
        return all_logits(Chain(stages), IDS, 17)  # type: ignore[arg-type]

    for found in on_ranks(2, run):
        assert (found - whole).abs().max() < 1e-3
