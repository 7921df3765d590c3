"""Weights on their way to a GPU: through readers' staging buffers, part by part, ahead of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.config import ModelConfig
from octavo.model.decoder import Model
from octavo.model.loader.load import _fetched, load_weights, open_source
from octavo.model.loader.source import Share
from octavo.model.loader.upload import Uploader
from octavo.ops.native import library
from octavo.types import ConfigError
from tests.model.running import all_logits, load, random_ids, write_checkpoint
from tests.model.test_families_gguf import FAMILIES as GGUF_FAMILIES
from tests.model.test_families_gguf import write
from tests.model.test_loader import split_in_two, write_gguf

BYTES = bytes(range(256)) * 40  # 10,240


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(BYTES)
    return tmp_path / "f"


@pytest.fixture
def uploader():
    made = Uploader("cpu", readers=3, piece=100)
    yield made
    made.close()


def test_what_arrives_is_what_lies_in_the_file(file: Path, uploader: Uploader) -> None:
    wanted = [(0, 10_240), (7, 1), (99, 100), (500, 101), (10_239, 1), (3, 0)]
    under_way = [uploader.begin(file, offset, count) for offset, count in wanted]
    for call, (offset, count) in zip(under_way, wanted):
        found = call()
        assert found.dtype == torch.uint8
        assert bytes(found.numpy()) == BYTES[offset : offset + count]


def test_it_works_under_inference_mode(file: Path, uploader: Uploader) -> None:
    with torch.inference_mode():
        assert bytes(uploader.begin(file, 5, 1000)().numpy()) == BYTES[5:1005]


def test_a_file_that_has_become_shorter_ends_with_its_name(file: Path, uploader: Uploader) -> None:
    call = uploader.begin(file, 10_000, 1000)
    with pytest.raises(ConfigError, match=rf"{file}: cannot be read: it ends at byte 10240"):
        call()


def test_closing_ends_readers_and_files(file: Path, uploader: Uploader) -> None:
    import os
    import threading

    uploader.begin(file, 0, 10_000)
    descriptor = uploader._open(file)
    uploader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("octavo-reader")]
    with pytest.raises(OSError):
        os.fstat(descriptor)


EXPANDED = ModelConfig(dtype="float32")  # of a GGUF file: its groups are not kept


def upload_all(path: Path, uploader: Uploader, config: ModelConfig = EXPANDED):
    """The source, its tensors going through ``uploader`` as to a GPU."""
    source = open_source(path, config)
    source._uploader = uploader
    return source


@pytest.mark.parametrize("ahead", (0, 20_000, 1 << 30))
def test_uploaded_safetensors_give_the_same_model(tmp_path, uploader, ahead, monkeypatch):
    write_checkpoint(tmp_path, "Llama")
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    split_in_two(tmp_path, {n: t.to(kinds[i % 3]) for i, (n, t) in enumerate(tensors.items())})
    source = upload_all(tmp_path, uploader)
    model = Model(source.spec, torch.float32)
    order = [part for part, _ in _fetched(model.parts(), source, torch.float32, ahead, {})]
    assert order == model.parts()
    monkeypatch.setattr(
        "octavo.model.loader.load._fetched",
        lambda parts, source, dtype, _, firsts: _fetched(parts, source, dtype, ahead, firsts),
    )
    load_weights(model, source, torch.float32, lambda *news: None)
    ids = random_ids(40)
    assert torch.equal(all_logits(model, ids), all_logits(load(tmp_path), ids))


@pytest.mark.parametrize("family", ("Phi3", "GPT2", "Gemma"))
def test_parts_of_tensors_turned_and_shifted_ones_are_uploaded_alike(tmp_path, uploader, family):
    write_checkpoint(tmp_path, family)
    source = upload_all(tmp_path, uploader)
    model = Model(source.spec, torch.float32)
    load_weights(model, source, torch.float32, lambda *news: None)
    ids = random_ids(40)
    assert torch.equal(all_logits(model, ids), all_logits(load(tmp_path), ids))


@pytest.mark.parametrize("kind", ("F16", "Q8_0", "Q5_1"))
def test_parts_of_gguf_tensors_are_uploaded_alike(tmp_path, uploader, kind):
    name, changes, metadata, convert = GGUF_FAMILIES["phi3"]
    write_checkpoint(tmp_path, name, **changes)
    file = write(tmp_path / "m.gguf", tmp_path, "phi3", convert, kind, metadata)
    plain, uploaded = open_source(file, EXPANDED), upload_all(file, uploader)
    for part, shape, first in (("q", (64, 64), 0), ("k", (32, 64), 64), ("v", (32, 64), 96)):
        wanted = (f"layers.1.{part}.weight", shape, torch.float32, Share(first, (64, 32, 32)))
        assert torch.equal(uploaded.fetch(*wanted)(), plain.fetch(*wanted)())


@pytest.mark.parametrize("kind", ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"))
def test_uploaded_gguf_tensors_are_the_same(tmp_path, uploader, kind, monkeypatch):
    monkeypatch.setattr("octavo.model.loader.gguf._VALUES_AT_A_TIME", 1600)
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, kind)
    plain, uploaded = open_source(file, EXPANDED), upload_all(file, uploader)
    for name, shape in (
        ("layers.1.down.weight", (64, 96)),
        ("layers.0.q.weight", (64, 64)),
        ("norm.weight", (64,)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found = uploaded.fetch(name, shape, dtype)()
            assert found.dtype == dtype
            assert torch.equal(found, plain.fetch(name, shape, dtype)())


@pytest.mark.skipif(not library.features(), reason="no kernels here")
@pytest.mark.parametrize("kind", ("Q8_0", "Q4_1"))
def test_groups_that_are_kept_are_uploaded_alike(tmp_path, uploader, kind):
    write_checkpoint(tmp_path, "Llama")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, kind)
    config = ModelConfig(quantization="gguf")
    plain, uploaded = open_source(file, config), upload_all(file, uploader, config)
    wanted = ("layers.0.q.weight", (64, 64), torch.bfloat16)
    one, other = plain.fetch(*wanted)(), uploaded.fetch(*wanted)()
    assert one.fields().keys() == other.fields().keys()
    assert all(torch.equal(tensor, other.fields()[name]) for name, tensor in one.fields().items())


def test_only_so_many_bytes_are_on_their_way(tmp_path, uploader):
    """A part, and those after it until the limit is passed."""
    write_checkpoint(tmp_path, "Llama")
    source = upload_all(tmp_path, uploader)
    asked: list[str] = []
    fetch = source.fetch
    source.fetch = lambda name, *rest: asked.append(name) or fetch(name, *rest)
    parts = Model(source.spec, torch.float32).parts()
    sizes = [sum(torch.Size(s).numel() * 4 for _, s in part.wanted()) for part in parts]
    turns = _fetched(parts, source, torch.float32, sum(sizes[:2]) + 1, {})
    next(turns)
    assert asked == [name for part in parts[:3] for name, _ in part.wanted()]


def test_a_model_too_large_for_the_gpu_is_refused_with_the_numbers(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "Llama")
    source = open_source(tmp_path, ModelConfig())
    model = Model(source.spec, torch.float32)
    model.device = "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 16 << 30))
    with pytest.raises(ConfigError) as error:
        load_weights(model, source, torch.float32, lambda *news: None)
    assert "0.0 GiB of the GPU's 16.0 are free: use a smaller model, end" in str(error.value)
