"""A model run from tapes (octavo/model/recorded.py) gives what the same operations give one by one,
whatever the sizes of steps and whatever came before."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.model.decoder import Model
from octavo.model.recorded import RecordedLayers
from octavo.ops.native import library
from tests.fixtures import models
from tests.model.running import load, make_batch, write_checkpoint

if not library.features():
    pytest.skip("there are no CPU kernels, or this CPU runs none", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 320
BLOCKS = 160
WAYS = {
    "FP32": ("R", {"dtype": "float32"}),
    "INT8": ("R", {"dtype": "float32", "quantization": "int8"}),
    "GGUF": ("R-Q8_0", {"dtype": "float32", "quantization": "gguf"}),
    "BF16": ("R-bf16", {"dtype": "bfloat16"}),
    "norms of q and k": ("Q128", {"dtype": "float32"}),
}
# Written by transformers' classes of these names: activations, norms and sums of other kinds.
FAMILIES = {
    "Gemma2": {"head_dim": 16, "sliding_window": 20},
    "GPT2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 4096},
    "OPT": {"ffn_dim": 96},
    "Granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
}


class Pair:
    """A model run both ways, each with a cache of its own."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.recorded = model._recorded
        assert self.recorded is not None
        self.caches = [model.allocate_cache(BLOCKS, 16) for _ in range(2)]

    def step(self, tokens: list[list[int]], past: list[int], tables: Tensor, last: bool) -> None:
        batch, found = make_batch(tokens, past, tables), []
        run = self.model.forward_last if last else self.model.forward
        for recorded, cache in zip((self.recorded, None), self.caches):
            self.model._recorded = recorded
            found.append(run(batch, cache))
        count = len(tokens) if last else len(batch.token_ids)
        assert found[0].shape == (count, self.model.spec.hidden_size)
        assert found[1].isfinite().all()
        assert torch.equal(found[0], found[1])
        for recorded, eager in zip(*self.caches):
            assert torch.equal(recorded, eager)


@pytest.fixture(scope="module", params=(*WAYS, *FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param in FAMILIES:
        path, flags = tmp_path_factory.mktemp("model"), {"dtype": "float32"}
        changes = {"max_position_embeddings": 4096, **FAMILIES[request.param]}
        write_checkpoint(path, request.param, **changes)
    else:
        name, flags = WAYS[request.param]
        path = models.path(name)
    model = load(path, **flags)
    if model._recorded is None:
        pytest.skip("not by kernels alone on this CPU")
    return model


@pytest.fixture
def pair(model: Model) -> Pair:
    model._recorded = defaultdict(RecordedLayers)
    return Pair(model)


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()


def all_blocks() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(BLOCKS, generator=generator)[None].int()


def recordings(pair: Pair) -> dict[bool, int]:
    """Some tokens or all -> how many a step may have."""
    layers = pair.recorded[len(pair.model.layers)]
    return {some: len(r.first) for some, r in layers._recordings.items()}


def test_steps_that_grow_are_recorded_again(pair: Pair) -> None:
    """Beyond 1,024 tokens, beyond 2,048, and small ones after large ones."""
    tables, sizes = all_blocks(), (1, 5, 64, 1024, 1025, 3, 2200, 1)
    for index, size in enumerate(sizes):
        for last in (False, True):
            pair.step([ids(size, index)], [0], tables, last)
        largest = 1024 if index < 4 else 2048 if index < 6 else 4096
        assert recordings(pair) == {False: largest, True: largest}


def test_a_life_of_mixed_batches(pair: Pair) -> None:
    """Rows that decode, go on with a prompt, begin one: in turn all tokens and the last ones."""
    tables = all_blocks()[:, : BLOCKS // 5 * 5].view(5, -1)
    past = [0] * 5
    lives = [
        [20, 33, 100, 1, 70],
        [1, 1, 200, 40, 7],
        [1, 1, 1, 1, 130],
        [1, 1, 1, 1, 1],
        [1, 100, 1, 15, 2],
        [1, 1, 1, 1, 1],
    ]
    for index, life in enumerate(lives):
        order = sorted(range(5), key=lambda row: life[row] != 1)  # rows with one token come first
        tokens = [ids(life[row], 10 * index + row) for row in order]
        pair.step(tokens, [past[row] for row in order], tables[order], index % 2 == 1)
        past = [before + new for before, new in zip(past, life)]
    one = tables[2:3]
    for last in (True, False, True):
        pair.step([ids(1, past[2])], [past[2]], one, last)
        past[2] += 1


def test_another_cache_is_recorded_anew_and_the_old_one_is_left_alone(pair: Pair) -> None:
    tables = all_blocks()
    for last in (False, True):
        pair.step([ids(40, 1)], [0], tables, last)
    old = pair.caches
    before = [tensor.clone() for tensor in old[0]]
    pair.caches = [pair.model.allocate_cache(BLOCKS, 16) for _ in range(2)]
    for last in (True, False):
        pair.step([ids(50, 2)], [0], tables, last)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(old[0], before))
    pair.caches = old
    pair.step([ids(1, 3)], [40], tables, True)


def test_results_are_the_callers(pair: Pair) -> None:
    """A later step does not write over them."""
    model, tables = pair.model, all_blocks()
    for run in (model.forward, model.forward_last):
        first = run(make_batch([ids(30, 1)], [0], tables), pair.caches[0])
        kept = first.clone()
        run(make_batch([ids(30, 2)], [0], tables), pair.caches[0])
        assert torch.equal(first, kept)


def test_a_long_context_after_a_short_one(pair: Pair) -> None:
    """Its parts of sums need more room than when the layers were recorded."""
    tables = all_blocks()
    pair.step([ids(3, 0)], [0], tables, True)
    for start in range(0, 2000, 400):
        pair.step([ids(400, start)], [start], tables, False)
    for position in range(2000, 2004):
        pair.step([ids(1, position)], [position], tables, True)


def test_only_layers_of_kernels_are_recorded(
    model_r: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(model_r, "float32")._recorded is not None
    assert load(model_r, "float16")._recorded is None
    monkeypatch.setattr(library, "features", lambda: library.Features(0))
    assert load(model_r, "float32")._recorded is None


def test_a_model_that_is_dropped_gives_its_memory_back_at_once() -> None:
    """No cycle holds it, so a GPU's memory is free when the next model asks for it."""
    gc.disable()
    try:
        model = load(models.path("R"), dtype="float32")
        cache = model.allocate_cache(BLOCKS, 16)
        tables = torch.arange(4, dtype=torch.int32).view(1, 4)
        model.forward(make_batch([[1, 2, 3]], [0], tables), cache)
        dropped = weakref.ref(model)
        del model
        assert dropped() is None
    finally:
        gc.enable()
