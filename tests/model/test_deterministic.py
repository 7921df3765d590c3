"""--deterministic: which versions a model gets, where it is refused, and logits that are equal bit
for bit. The kernels are interpreted; tests/gpu/test_deterministic.py runs them on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.model import decoder
from octavo.model.facts import build_spec
from octavo.model.versions import choose_versions
from octavo.ops.native import library
from octavo.ops.native.library import Features
from octavo.ops.triton import launch
from octavo.types import ConfigError
from tests.fixtures.models import R_CONFIG
from tests.fixtures.triton_interpreter import products_in_order
from tests.model.running import load, make_batch

BF16, FP16 = torch.bfloat16, torch.float16
FIXED = {
    "rms_norm": "triton",
    "linear": "triton-fixed",
    "embedding": "triton",
    "copy_blocks": "triton",
    "take_rows": "torch",  # copies, whatever the batch is
    "paged_attention": "triton-fixed",
}


def spec_of(**changes):
    return build_spec({**R_CONFIG, **changes}, "here")


def refused(*arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_versions(*arguments)
    text = str(caught.value)
    assert text.startswith("--deterministic: ") and "\n" not in text
    return text


@pytest.mark.skipif(not launch.has_one_product(), reason="needs a GPU that can")
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_the_versions_that_do_not_depend_on_the_batch_are_chosen_where_asked_for(dtype):
    found = choose_versions(spec_of(), dtype, "cuda", True)
    assert {op: version.name for op, version in found.items()} == FIXED
    others = choose_versions(spec_of(), dtype, "cuda", False)
    assert others.pop("take_rows").name == "torch"
    for version in others.values():
        assert version.name == "triton"  # not the slower ones


@pytest.mark.skipif(not library.features(), reason="no kernels here")
@pytest.mark.parametrize("kept", (None, torch.int8, torch.float8_e4m3fn), ids=str)
def test_on_a_cpu_with_kernels_fp32_is_deterministic(kept):
    found = choose_versions(spec_of(), torch.float32, "cpu", True, kept)
    ours = {"linear", "paged_attention", "rms_norm", "take_rows", "embedding"}
    assert {op for op, version in found.items() if version.name == "native"} == ours & set(found)
    assert all(version.batch_invariant == "yes" for version in found.values())


def test_refused_on_a_cpu_where_no_kernel_runs(monkeypatch):
    text = refused(spec_of(), FP16, "cpu", True)
    assert "float16 on a CPU, rms_norm, linear, paged_attention may" in text
    assert "needs Triton, a GPU" in text and "octavo's own kernels on a CPU" in text
    monkeypatch.setattr(library, "features", lambda: Features(0))
    text = refused(spec_of(), torch.float32, "cpu", True)
    assert "float32 on a CPU, rms_norm, linear, paged_attention may" in text


def test_refused_in_bf16_on_a_cpu_that_cannot_multiply_it_in_a_kernel(monkeypatch):
    monkeypatch.setattr(library, "features", lambda: Features.AVX2 | Features.AVX512)
    assert "bfloat16 on a CPU, linear may" in refused(spec_of(), BF16, "cpu", True)


def test_refused_in_fp32():
    assert "float32 on this GPU" in refused(spec_of(), torch.float32, "cuda", True)


def test_refused_where_products_are_made_otherwise(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    launch.has_one_product.cache_clear()
    try:
        text = refused(spec_of(), BF16, "cuda", True)
    finally:
        launch.has_one_product.cache_clear()
    assert "linear may round" in text and "8.0 to 9.0" in text


def test_refused_where_angles_follow_the_step(monkeypatch):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    spec = spec_of(rope_scaling=scaling)
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "dynamic" in refused(spec, BF16, "cuda", True)
    assert choose_versions(spec, BF16, "cuda", False)


def test_loading_says_so_before_it_reads_weights(model_r):
    with pytest.raises(ConfigError, match="--deterministic: with float16 on a CPU"):
        load(model_r, "float16", deterministic=True)


@pytest.mark.skipif(not launch.INTERPRETED, reason="tests/gpu has it")
@torch.inference_mode()
def test_logits_are_the_same_however_the_prompt_comes(model_r, monkeypatch):
    def chosen(spec, dtype, device, deterministic, *further):
        return choose_versions(spec, dtype, "cuda", True, *further)

    monkeypatch.setattr(decoder, "choose_versions", chosen)
    model = load(model_r, "float16")
    generator = torch.Generator().manual_seed(0)
    prompt, other = torch.randint(0, 320, (2, 20), generator=generator).tolist()
    tables = torch.randperm(4, generator=generator).int().view(2, 2)

    def run(sizes: list[int], mates: int) -> torch.Tensor:
        cache = model.allocate_cache(4, 16)
        found, start = [], 0
        for size in sizes:
            part = slice(start, start + size)
            step = [other[part]] * mates + [prompt[part]]
            batch = make_batch(step, [start] * (mates + 1), tables[1 - mates :])
            found.append(model.forward(batch, cache)[-size:])
            start += size
        assert start == 20
        return model.logits(torch.cat(found)[-5:])

    with products_in_order():
        whole = run([20], 0)
        assert torch.equal(run([7, 13], 1), whole)
        assert torch.equal(run([16] + [1] * 4, 0), whole)
