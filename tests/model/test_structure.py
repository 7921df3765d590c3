"""What is said of a model without torch is what its parts want, keep and fuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model.decoder import Model
from octavo.model.facts import build_spec
from octavo.model.loader.sizes import wanted_by
from octavo.model.shard import Shard, TensorParallel
from octavo.model.spec import DecoderSpec
from octavo.model.stages import Stage
from octavo.model.structure import kv_bytes_per_block, structure_of
from octavo.quant.rounding import roundings
from tests.model.expert_families import FAMILIES
from tests.model.running import CLASSES, TINY

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "olmo2": ("Olmo2", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
}


def spec_of(name: str) -> DecoderSpec:
    import transformers

    title, changes = {**DENSE, **FAMILIES}[name]
    config_class, model_class = CLASSES.get(title, (f"{title}Config", f"{title}ForCausalLM"))
    config = getattr(transformers, config_class)(**{**TINY, **changes}).to_dict()
    return build_spec({**config, "architectures": [model_class]}, Path("nowhere"))


def grouped(model: Model) -> set[frozenset[str]]:
    linears = [*(x for layer in model.layers for x in layer.linears()), *model.embedding.linears()]
    return {frozenset(f"{name}.weight" for name, _ in linear.parts) for linear in linears}


@pytest.mark.parametrize("name", [*DENSE, *FAMILIES])
def test_is_what_the_parts_say(name: str) -> None:
    spec = spec_of(name)
    rounding = roundings("cpu")["int8"]
    for rank, size, stage in ((0, 1, None), (1, 2, None), (0, 2, Stage(0, 2, 0, 2))):
        shard = Shard(rank, size)
        model = Model(
            spec, torch.float32, rounding=rounding, ranks=TensorParallel(shard), stage=stage
        )
        found = structure_of(spec, shard, stage, rounding)
        wanted, cuts = wanted_by(model.parts()), model.cuts()
        assert found.wanted() == wanted
        assert found.kept() == {
            name: cuts[name].shape(shape) if name in cuts else shape
            for name, shape in wanted.items()
        }
        fused = grouped(model)
        assert {frozenset(g.shapes) for g in found.groups if len(g.shapes) > 1} <= fused
        assert fused <= {frozenset(group.shapes) for group in found.groups}
        for block in (16, 24):
            size_of_block = kv_bytes_per_block(found, shard, block, 4, True, False)
            assert size_of_block == model.kv_bytes_per_block(block)
        exact = {
            f"{part}.weight"
            for layer in model.layers
            for linear in layer.linears()
            for part, _ in linear.parts
            if linear.exact is not None
        }
        dense = {name for group in found.groups if group.is_dense for name in group.shapes}
        assert {name for name in dense if not name.endswith(".kv_up.weight")} == exact
        rounded = {
            f"{part}.weight"
            for linear in (
                *(x for y in model.layers for x in y.linears()),
                *model.embedding.linears(),
            )
            for part, _ in linear.parts
            if linear.is_rounded
        }
        assert {
            name
            for group in found.groups
            if group.rounding and not group.is_expert
            for name in group.shapes
        } == rounded
