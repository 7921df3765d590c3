"""The demo model on quantized weights: how far its logits are from those of the same checkpoint in
FP32, what its perplexity becomes, and what memory it takes.

Bounds are 1.5 to 2 times what was measured (SmolLM2-135M-Instruct, Zen 4; texts of 300 and 155
tokens), 2 % for perplexities that change by less than 1 %.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.model.decoder import Model
from octavo.model.dtype import has_bf16
from octavo.ops.native import library, linear, memory
from tests.exactness.test_demo_model import TEXTS
from tests.fixtures import models
from tests.model.running import all_logits, load, make_batch

pytestmark = pytest.mark.skipif(
    not library.features(), reason="there are no CPU kernels, or this CPU runs none"
)
# How -> fixture, flags of loading, the fixture it is compared with.
WAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Q4_1": ("G", {"dtype": "auto"}, "G"),
    "Q4_1 in FP32": ("G", {"dtype": "float32", "quantization": "gguf"}, "G"),
    "Q8_0": ("G-Q8_0", {"dtype": "auto"}, "G"),
    "INT8": ("G-bf16", {"dtype": "auto", "quantization": "int8"}, "G-bf16"),
    "INT8 in FP32": ("G-bf16", {"dtype": "float32", "quantization": "int8"}, "G-bf16"),
}


@cache
def texts() -> list[list[int]]:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(models.path("G-bf16") / "tokenizer.json"))
    license = (Path(__file__).parents[2] / "LICENSE").read_text()
    return [tokenizer.encode(license).ids[:300], tokenizer.encode(" ".join(TEXTS)).ids]


@cache
def exact(name: str) -> list[Tensor]:
    """Logits of the checkpoint's numbers in FP32."""
    model = load(models.path(name), "float32")
    return [all_logits(model, ids) for ids in texts()]


def perplexity(logits: Tensor, ids: list[int]) -> float:
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    return math.exp(float(loss))


def divergence(found: Tensor, expected: Tensor) -> float:
    """Kullback-Leibler, in nats a token."""
    p, q = (logits.double().log_softmax(-1) for logits in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


class Loaded:
    """A model, and the bytes that its weights really take."""

    def __init__(self, name: str, flags: dict[str, Any]) -> None:
        sizes: list[int] = []
        zeros = memory.zeros

        def counted(size: int) -> Tensor:
            sizes.append(size)
            return zeros(size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear.memory, "zeros", counted)
            self.model = load(models.path(name), **flags)
        self.num_bytes = sum(sizes) + sum(tensor.nbytes for tensor in dense_tensors(self.model))


def dense_tensors(model: Model) -> list[Tensor]:
    """What is kept beside packed weights: norms, and the embedding unless it is quantized."""
    found = [tensor for layer in model.layers for norm in layer.norms for tensor in norm.tensors]
    look_up = model.embedding._look_up
    embedding = [look_up.args[1]] if hasattr(look_up, "args") else []
    return [*found, *model.norm.tensors, *embedding]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Loaded:
    name, flags, _ = WAYS[request.param]
    return Loaded(name, flags)


# Largest difference of a logit (whose standard deviation is 6.7), divergence, perplexity ratio.
BOUNDS = {
    "Q4_1": (4.0, 0.012, 0.02),  # 2.2, 0.006, 0.4 %
    "Q4_1 in FP32": (4.0, 0.012, 0.02),  # 2.4, 0.007, 0.2 %
    "Q8_0": (6.0, 0.018, 0.02),  # 4.0, 0.010, 0.4 %; of Q4_1's numbers, rounded again
    "INT8": (16.0, 0.13, 0.14),  # 10.1, 0.074, 7.1 %
    "INT8 in FP32": (16.0, 0.13, 0.14),  # 9.0, 0.087, 9.2 %
}


@pytest.mark.parametrize(("loaded", "way"), [(way, way) for way in WAYS], indirect=["loaded"])
def test_logits_stay_close_to_fp32(
    loaded: Loaded, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    largest, nats, ratio = 0.0, 0.0, 0.0
    for ids, expected in zip(texts(), exact(WAYS[way][2])):
        found = all_logits(loaded.model, ids)
        largest = max(largest, float((found - expected).abs().max()))
        nats = max(nats, divergence(found, expected))
        change = perplexity(found, ids) / perplexity(expected, ids) - 1
        ratio = max(ratio, abs(change))
    with capsys.disabled():
        print(f"\n{way}: largest {largest:.2f}, divergence {nats:.4f}, perplexity {ratio:.2%}")
    bounds = BOUNDS[way]
    assert largest < bounds[0]
    assert nats < bounds[1]
    assert ratio < bounds[2]


@pytest.mark.parametrize(("loaded", "way"), [(way, way) for way in WAYS], indirect=["loaded"])
def test_greedy_text_is_sensible(loaded: Loaded, way: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(models.path("G-bf16") / "tokenizer.json"))
    model = loaded.model
    cache, tables = model.allocate_cache(4, 16), torch.arange(4)[None].int()
    ids = tokenizer.encode("The capital of France is").ids
    step, past = ids, 0
    for _ in range(8):
        hidden = model.forward_last(make_batch([step], [past], tables), cache)
        past += len(step)
        step = [int(model.logits(hidden).argmax())]
        ids = ids + step
    assert "Paris" in tokenizer.decode(ids)


OTHERS = {
    "dense BF16": ("G-bf16", {"dtype": "bfloat16"}),
    "dense FP32": ("G", {"dtype": "float32"}),
    "a GGUF file of FP16": ("G-F16", {"dtype": "auto"}),
}


def assert_bytes_are_right(loaded: Loaded) -> None:
    assert loaded.num_bytes > 0
    assert abs(loaded.model.weight_bytes / loaded.num_bytes - 1) < 0.02


@pytest.mark.parametrize("loaded", WAYS, indirect=True)
def test_memory_of_quantized_weights_is_told_before_it_is_taken(loaded: Loaded) -> None:
    """To 0.5 %: scales of channels are not counted."""
    assert_bytes_are_right(loaded)


@pytest.mark.parametrize("other", OTHERS)
def test_memory_of_dense_weights_is_told_before_it_is_taken(other: str) -> None:
    """The embedding and its packed copy for the head."""
    if other == "dense BF16" and not has_bf16():
        pytest.skip("this CPU has no kernel for which BF16 is packed")
    assert_bytes_are_right(Loaded(*OTHERS[other]))
