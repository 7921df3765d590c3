"""Families on the kernels for GPUs, interpreted where there is none: what the parts that no kernel
does (soft caps of logits, norms after a part, other activations) are given and give back."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model
from octavo.model.facts import build_spec
from octavo.model.loader.dummy import DummySource
from octavo.model.loader.load import load_weights
from octavo.model.spec import DecoderSpec
from tests.model.running import CLASSES, TINY, make_batch, random_ids
from tests.model.test_families import FAMILIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = (
    *("gemma2", "gemma3-linear", "phi3-partial", "gpt2-untied", "opt-after-narrow", "olmo2-tied"),
    *("granite-biases", "qwen3"),
)


def spec_of(name: str) -> DecoderSpec:
    family, changes = FAMILIES[name]
    _, architecture = CLASSES.get(family, ("", f"{family}ForCausalLM"))
    config = {**TINY, "num_hidden_layers": 2, **changes, "architectures": [architecture]}
    return build_spec(config, Path("tiny"))


def loaded(spec: DecoderSpec, dtype: torch.dtype, kernels: str, device: str) -> Model:
    """The same random weights for both; ``kernels``: whose versions are chosen."""
    model = Model(spec, dtype, kernels)
    model.device = model._states._device = device
    source = DummySource(Path("tiny"), spec, 0)
    fetch = source.fetch
    source.fetch = lambda *wanted: lambda: fetch(*wanted)().to(device)
    load_weights(model, source, dtype, lambda *news: None)
    return model


def to(batch: ForwardBatch, device: str) -> ForwardBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, Tensor)})


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_cpus_in_fp32(name):
    """A prompt, then a token of it beside the start of another."""
    spec = spec_of(name)
    exact = loaded(spec, torch.float32, "cpu", "cpu")
    tested = loaded(spec, torch.float16, "cuda", DEVICE)
    assert tested.implementations["paged_attention"] != exact.implementations["paged_attention"]
    ids = random_ids(40)
    tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    steps = [
        make_batch([ids[:18]], [0], tables[:1]),
        make_batch([ids[18:19], ids[20:27]], [18, 0], tables),
    ]
    results = []
    for model in (exact, tested):
        device = DEVICE if model is tested else "cpu"
        cache = model.allocate_cache(4, 16)
        batches = [to(batch, device) for batch in steps]
        found = [model.forward_last(batch, cache) for batch in batches]
        logits = model.logits(torch.cat(found))
        assert torch.equal(model.most_likely(torch.cat(found)), logits.argmax(-1))
        results.append(logits.cpu())
    expected, logits = results
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() / expected.abs().max() < 0.005
