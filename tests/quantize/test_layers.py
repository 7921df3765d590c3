"""What happens within a layer: folded scales change nothing, GPTQ makes up for its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from octavo.model.decoder import Model
from octavo.quantize.grid import Grid
from octavo.quantize.layers import Calibration, LayerAtWork, quantizable
from octavo.quantize.methods import AWQMethod, GPTQMethod
from octavo.quantize.recipe import Recipe
from octavo.quantize.source import Source
from octavo.quantize.target import target_of
from tests.fixtures import models
from tests.model.running import random_ids, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def first_layer(path: Path, ids: list[list[int]]) -> Iterator[tuple[LayerAtWork, Source]]:
    with closing(Source(path, "cpu")) as source, torch.inference_mode():
        model = Model(source.spec, torch.float32)
        source.check(model)
        model.embedding.load(source.fetch_part(model.embedding))
        model.finish_states()
        calibration = Calibration(model, ids)
        layer = model.layers[0]
        tensors = source.fetch_part(layer)
        linears = quantizable(layer)
        yield LayerAtWork(0, layer, tensors, linears, calibration, torch.float32), source


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma", "OPT", "Phi3"])
def test_folded_scales_leave_the_layer_as_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"ffn_dim": 96, "word_embed_proj_dim": 64} if name == "OPT" else {}
    write_checkpoint(tmp_path / "dense", name, **changes)
    monkeypatch.setattr(AWQMethod, "_round", lambda *arguments: None)
    with first_layer(tmp_path / "dense", [random_ids(60)]) as (work, source):
        before = dict(work.tensors)
        work.load()
        (expected,) = work.calibration.run(0, work.layer)
        AWQMethod(target_of(Recipe("awq", 4, 32, False)), source)(work)
        work.load()
        (found,) = work.calibration.run(0, work.layer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    moved = [n for n in before if not torch.allclose(before[n], work.tensors[n], rtol=1e-2)]
    assert len(moved) >= (3 if name == "OPT" else 7), moved  # of q k v o gate up down, norms


def test_gptq_errs_less_than_rounding_on_what_a_real_layer_meets() -> None:
    """SmolLM2's first layer, each linear by what it meets with those before it rounded."""
    ids = [torch.randint(0, 49152, (256,), generator=torch.Generator().manual_seed(0)).tolist()]
    grid = Grid(4, 64, symmetric=True)
    with first_layer(models.path("G-bf16"), ids) as (work, _):
        originals = [work.weight(which).clone() for which in range(len(work.linears))]
        GPTQMethod(target_of(Recipe("gptq", 4, 64, True, search=False)), act_order=False)(work)
        met = work.observe(range(len(work.linears)))
        for which, (original, moments) in enumerate(zip(originals, met)):
            errors = []
            for made in (work.weight(which), grid.round(original).dense()):
                left = made - original
                errors.append(float(((left @ moments.hessian) * left).sum()))
            assert errors[0] < 0.8 * errors[1], which
