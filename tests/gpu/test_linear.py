"""Triton's linear, norm, embedding and block copies on a GPU: real shapes, captured chains.

Real models' shapes in BF16 and FP16, at row counts of every bucket and their edges; what a kernel
does not write is NaN. Chains are captured with dependent launches and replayed with other inputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops import registry
from octavo.ops.attention import copy_blocks
from octavo.ops.norm import rms_norm
from octavo.ops.triton.plans import candidates
from tests.ops.comparing import assert_close, expected_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 200)
# hidden, attention width, qkv width, intermediate, vocabulary
MODELS = {
    "llama-8b": (4096, 4096, 6144, 14336, 128256),
    "qwen3-0.6b": (1024, 2048, 4096, 3072, 151936),
    "smollm2-135m": (576, 576, 960, 1536, 49152),
}
BF16, FP16 = torch.bfloat16, torch.float16
PROJECTIONS = ("qkv", "out", "gate_up", "down", "head")


def version(op: str) -> registry.Version:
    found = registry.select(op, "cuda", BF16)
    assert found.name == "triton"
    return found


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)


@pytest.fixture
def poisoned(monkeypatch):
    """Outputs start as NaN."""
    empty = torch.empty

    def nan(*size, **kwargs):
        return empty(*size, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", nan)


def projections(model: str) -> dict[str, tuple[int, int, str]]:
    """outputs, columns, epilogue"""
    hidden, attention, qkv, intermediate, vocab = MODELS[model]
    return {
        "qkv": (qkv, hidden, "none"),
        "out": (hidden, attention, "add"),
        "gate_up": (intermediate, hidden, "silu_mul"),
        "down": (hidden, intermediate, "add"),
        "head": (vocab, hidden, "logits"),
    }


def check_linear(
    n: int, k: int, epilogue: str, dtype: torch.dtype, bias: bool, rows: tuple[int, ...] = ROWS
) -> None:
    tested = version("linear")
    parts = 2 if epilogue == "silu_mul" else 1
    weights = [randn(n, k, dtype=dtype, seed=s, scale=k**-0.5) for s in range(1, 1 + parts)]
    shift = randn(parts * n, dtype=dtype, seed=3) if bias else None
    linear = tested.call(weights, shift, epilogue)
    for count in rows:
        x = randn(count, k, dtype=dtype, seed=count)
        other = randn(count, n, dtype=dtype, seed=4) if epilogue == "add" else None
        expected = expected_linear(weights, shift, epilogue, x, other)
        found = linear(x, other)
        if epilogue == "logits":
            assert found.dtype == torch.float32
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert error <= 2e-5, f"{count} rows: {error:.1e}"
        else:
            assert found.dtype == dtype
            assert_close(found, expected, tested, dtype)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("model", MODELS)
@torch.inference_mode()
def test_linear_in_bf16(model, projection, poisoned):
    check_linear(*projections(model)[projection], dtype=BF16, bias=False)


@pytest.mark.parametrize("projection", PROJECTIONS)
@torch.inference_mode()
def test_linear_in_fp16_with_bias(projection, poisoned):
    check_linear(*projections("smollm2-135m")[projection], dtype=FP16, bias=True)


@pytest.mark.parametrize("epilogue", ("none", "add", "silu_mul", "logits"))
@torch.inference_mode()
def test_linear_of_odd_sizes(epilogue, poisoned):
    """Outputs are no multiple of any tile, nor columns of the weight."""
    check_linear(963, 1096, epilogue, dtype=BF16, bias=True)


@pytest.mark.parametrize(("n", "k"), [(1, 8), (64, 20480), (100, 42)])
@torch.inference_mode()
def test_linear_of_unusual_sizes(n, k, poisoned):
    check_linear(n, k, "add", dtype=BF16, bias=True, rows=(1, 5, 70))


@torch.inference_mode()
def test_every_candidate_plan_computes_the_same(poisoned):
    """On a shape with so few tiles that all splits are among them."""
    n, k, bucket = 1000, 1032, 32
    weight = randn(n, k, dtype=BF16, seed=1, scale=k**-0.5)
    linear = version("linear").call([weight], None, "add")
    x, other = randn(bucket, k, dtype=BF16, seed=5), randn(bucket, n, dtype=BF16, seed=6)
    expected = expected_linear([weight], None, "add", x, other)
    plans = list(candidates(linear.shape, bucket))
    assert {plan.split_k for plan in plans} == {1, 2, 4}
    for plan in plans:
        linear.use({bucket: plan})
        assert_close(linear(x, other.clone()), expected, version("linear"), BF16)
        assert not linear._arrived.any(), plan


@torch.inference_mode()
def test_split_sums_repeat_bit_by_bit():
    weight = randn(1024, 3072, dtype=BF16, scale=0.02)
    linear = version("linear").call([weight], None, "add")
    for bucket in (16, 32):
        assert linear.plans[bucket].split_k > 1
        x, other = randn(bucket, 3072, dtype=BF16), randn(bucket, 1024, dtype=BF16, seed=1)
        first = linear(x, other)
        assert all(torch.equal(linear(x, other), first) for _ in range(50))


@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("size", (576, 1024, 4096, 4104, 16384))
@torch.inference_mode()
def test_rms_norm(size, dtype):
    tested = version("rms_norm")
    weight = randn(size, dtype=dtype, seed=1)
    for rows in (1, 7, 64, 300):
        x = randn(rows, size, dtype=dtype, seed=rows)
        expected = rms_norm(x.double(), weight.double(), 1e-5)
        assert_close(tested.call(x, weight, 1e-5), expected, tested, dtype)


@torch.inference_mode()
def test_embedding():
    weight = randn(151936, 1024, dtype=BF16)
    for rows in (1, 64, 3000):
        ids = torch.randint(0, 151936, (rows,), device="cuda")
        found = version("embedding").call(ids, weight)
        assert torch.equal(found, torch.nn.functional.embedding(ids, weight))


@torch.inference_mode()
def test_copy_blocks():
    caches = [randn(40, 8, 2, 64, 128, dtype=BF16, seed=layer) for layer in range(32)]
    expected = [cache.clone() for cache in caches]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).cuda()
    pairs = torch.stack((order[:9], order[9:18]), dim=1)
    copy_blocks(expected, pairs)
    version("copy_blocks").call(caches, pairs)
    assert all(torch.equal(found, want) for found, want in zip(caches, expected))


class Chain:
    """Layers of norm, qkv, out + x, norm, gate_up, down + x (no attention), then norm and head;
    ``exact`` computes them in FP32 from the same weights."""

    def __init__(self, model: str, layers: int) -> None:
        hidden, self.width, qkv, intermediate, _ = MODELS[model]
        shapes = {
            "qkv": (qkv, hidden, "none"),
            "out": (hidden, self.width, "add"),
            "gate_up": (2 * intermediate, hidden, "silu_mul"),
            "down": (hidden, intermediate, "add"),
        }
        self.embedding = randn(1000, hidden, dtype=BF16, seed=99)
        self.norms = [randn(hidden, dtype=BF16, seed=s) for s in range(2 * layers + 1)]
        self.weights = [
            {
                name: randn(n, k, dtype=BF16, seed=10 * layer + s, scale=k**-0.5)
                for s, (name, (n, k, _)) in enumerate(shapes.items())
            }
            for layer in range(layers)
        ]
        self.head_weight = randn(2048, hidden, dtype=BF16, seed=98, scale=hidden**-0.5)
        make = version("linear").call
        self.linears = [
            {name: make([w[name]], None, epilogue) for name, (_, _, epilogue) in shapes.items()}
            for w in self.weights
        ]
        self.head = make([self.head_weight], None, "logits")

    def __call__(self, ids: Tensor) -> Tensor:
        norm = version("rms_norm").call
        x = version("embedding").call(ids, self.embedding)
        for layer, linear in enumerate(self.linears):
            qkv = linear["qkv"](norm(x, self.norms[2 * layer], 1e-5))
            x = linear["out"](qkv[:, : self.width], x)
            inner = linear["gate_up"](norm(x, self.norms[2 * layer + 1], 1e-5))
            x = linear["down"](inner, x)
        return self.head(norm(x, self.norms[-1], 1e-5))

    def exact(self, ids: Tensor) -> Tensor:
        norms = [weight.float() for weight in self.norms]
        x = self.embedding[ids].float()
        for layer, weights in enumerate(self.weights):
            w = {name: weight.float().t() for name, weight in weights.items()}
            qkv = rms_norm(x, norms[2 * layer], 1e-5) @ w["qkv"]
            x = x + qkv[:, : self.width] @ w["out"]
            gate, up = (rms_norm(x, norms[2 * layer + 1], 1e-5) @ w["gate_up"]).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w["down"]
        return rms_norm(x, norms[-1], 1e-5) @ self.head_weight.float().t()


@pytest.fixture(scope="module", params=("qwen3-0.6b", "llama-8b"))
def chain(request):
    with torch.inference_mode():
        made = Chain(request.param, layers=4)
    return made


@pytest.mark.parametrize("rows", (1, 2, 8, 17, 33, 64, 65, 128))
@torch.inference_mode()
def test_captured_chain_replayed_with_other_inputs(chain, rows):
    """With dependent launches. Replays follow each other without a pause, so a kernel that read too
    early would see what the replay before left."""
    generator = torch.Generator("cuda").manual_seed(rows)
    inputs = torch.randint(0, 1000, (12, rows), device="cuda", generator=generator)
    ids = inputs[0].clone()
    called = [chain(row) for row in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(ids)
    replayed = []
    for row in inputs:
        ids.copy_(row)
        y.fill_(float("nan"))
        graph.replay()
        replayed.append(y.clone())
    for row, found, eager in zip(inputs, replayed, called):
        exact = chain.exact(row)
        error = (found - exact).norm() / exact.norm()
        assert error <= 0.02, f"relative error {error:.3g}"
        if rows <= 16:  # own kernels alone: the same bits
            assert torch.equal(found, eager)
