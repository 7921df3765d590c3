"""Where a checkpoint's tensors come from: shards and their index, damaged headers, ``.bin``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import ModelConfig
from octavo.model.loader.load import open_source
from octavo.types import ConfigError
from tests.model.running import all_logits, load, random_ids, reference_logits, write_checkpoint

IDS = random_ids(30)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FILES = ("first.x", "second.x")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original")
    model = write_checkpoint(path, "Llama")
    return path, reference_logits(model, IDS)


@pytest.fixture
def bare(original, tmp_path):
    """(a directory with the configuration alone, the tensors)."""
    source, _ = original
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    return tmp_path, load_file(source / "model.safetensors")


def refused(directory: Path, **flags) -> str:
    """The message of the refusal, which only headers may have been read for."""
    with pytest.raises(ConfigError) as caught:
        load(directory, **flags)
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message
    return message


def write_shards(directory: Path, shards: dict[str, dict], kind: str, weight_map: dict | None):
    """``shards``: file stem -> tensors."""
    save = save_file if kind == "safetensors" else torch.save
    for stem, tensors in shards.items():
        save(tensors, directory / f"{stem}.{kind}")
    if weight_map is not None:
        single = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        named = {name: f"{stem}.{kind}" for name, stem in weight_map.items()}
        (directory / f"{single}.index.json").write_text(json.dumps({"weight_map": named}))


def halves(tensors):
    keys = list(tensors)
    parts = {"pytorch_model-1": keys[::2], "pytorch_model-2": keys[1::2]}
    shards = {stem: {key: tensors[key] for key in names} for stem, names in parts.items()}
    return shards, {key: stem for stem, names in parts.items() for key in names}


# ---- the index ----


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_index_decides_which_shard_a_tensor_comes_from(original, bare, kind):
    directory, tensors = bare
    shards, places = halves(tensors)
    other = "pytorch_model-1" if places[HEAD] == "pytorch_model-2" else "pytorch_model-2"
    shards[other][HEAD] = torch.zeros_like(tensors[HEAD])  # an old copy
    write_shards(directory, shards, kind, places)
    torch.testing.assert_close(all_logits(load(directory), IDS), original[1], atol=1e-4, rtol=1e-4)
    index = next(directory.glob("*.index.json"))
    index.unlink()
    assert f"{HEAD} is in both pytorch_model-1.{kind} and" in refused(directory)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tensor_in_another_shard_than_the_index_says_is_refused(bare, kind):
    directory, tensors = bare
    shards, places = halves(tensors)
    right = places[HEAD]
    wrong = places[HEAD] = "pytorch_model-1" if right == "pytorch_model-2" else "pytorch_model-2"
    write_shards(directory, shards, kind, places)
    message = refused(directory)
    assert f"{HEAD} is not in {wrong}.{kind} as it says, but in {right}.{kind}" in message
    del shards[right][HEAD]
    write_shards(directory, shards, kind, places)
    assert "but in no shard" in refused(directory)


def test_an_absent_shard_of_bin_files_is_named(bare):
    directory, tensors = bare
    write_shards(directory, *(lambda s, p: (s, "bin", p))(*halves(tensors)))
    (directory / "pytorch_model-2.bin").unlink()
    assert "1 of 2 shards are absent: pytorch_model-2.bin" in refused(directory)


def test_what_the_index_does_not_name_is_told_as_unused(bare):
    directory, tensors = bare
    shards, places = halves(tensors)
    shards["pytorch_model-1"]["stray.weight"] = torch.ones(3)
    write_shards(directory, shards, "safetensors", places)
    assert "does not use: stray.weight" in refused(directory)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"weight_map": 5}', "not a valid index"),
        ('{"weight_map": {"a": 5}}', "not a valid index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names '../x.safetensors', which is no file"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "1 of 1 shards are absent"),
    ],
)
def test_broken_indexes_are_refused(bare, content, reason):
    directory, tensors = bare
    save_file(tensors, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(content)
    assert reason in refused(directory)


# ---- headers ----


def edit_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    data = (text if isinstance(text, str) else json.dumps(header)).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + raw[8 + length :])


def test_a_shape_that_its_bytes_do_not_fill_is_refused(bare):
    directory, tensors = bare
    file = directory / "model.safetensors"
    save_file(tensors, file)

    def shrink(header):
        low, high = header[HEAD]["data_offsets"]
        header[HEAD]["data_offsets"] = [low, high - 4]

    edit_header(file, shrink)
    message = refused(directory)
    assert f"{HEAD} is F32 [320, 64], which is 81,920 bytes, but 81,916 are given" in message


def test_a_tensor_twice_in_one_header_is_refused(bare):
    directory, tensors = bare
    file = directory / "model.safetensors"
    save_file(tensors, file)
    edit_header(file, lambda header: json.dumps(header)[:-1] + f', "{HEAD}": {{}}}}')
    assert f"{HEAD} is in it twice" in refused(directory)


# ---- PyTorch's files ----


@pytest.mark.parametrize("layout", ["single", "indexed", "several"])
def test_bin_files_give_the_same_logits(original, bare, layout):
    directory, tensors = bare
    if layout == "single":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        shards, places = halves(tensors)
        write_shards(directory, shards, "bin", places if layout == "indexed" else None)
    torch.testing.assert_close(all_logits(load(directory), IDS), original[1], atol=1e-4, rtol=1e-4)
    assert "no *.safetensors file" in refused(directory, load_format="safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_bin_types_are_read_as_safetensors_reads_them(bare, dtype):
    directory, tensors = bare
    rounded = {name: torch.nn.Parameter(t.to(dtype)) for name, t in tensors.items()}
    torch.save(rounded, directory / "pytorch_model.bin")
    found = all_logits(load(directory, load_format="pt"), IDS)
    save_file({name: t.data for name, t in rounded.items()}, directory / "model.safetensors")
    assert torch.equal(found, all_logits(load(directory, load_format="safetensors"), IDS))


def test_safetensors_are_taken_where_both_are(original, bare):
    directory, tensors = bare
    save_file(tensors, directory / "model.safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    torch.testing.assert_close(all_logits(load(directory), IDS), original[1], atol=1e-4, rtol=1e-4)
    assert "it begins with b'not '" in refused(directory, load_format="pt")


def test_tensors_of_one_storage_are_each_read_from_their_place(tmp_path):
    """A tied head shares the embedding's storage; views begin inside one."""
    model = write_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    (tmp_path / "model.safetensors").unlink()
    state = dict(model.state_dict())
    assert state[HEAD].data_ptr() == state[EMBED].data_ptr()
    norms = torch.stack([state[name] for name in state if name.endswith("layernorm.weight")])
    names = [name for name in state if name.endswith("layernorm.weight")]
    state.update({name: norms[row] for row, name in enumerate(names)})
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(
        all_logits(load(tmp_path), IDS), reference_logits(model, IDS), atol=1e-4, rtol=1e-4
    )


class Runs:
    """What a malicious checkpoint does to whoever unpickles it."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_bin_file_that_would_run_code_is_refused_and_does_not(bare, monkeypatch):
    directory, tensors = bare
    monkeypatch.chdir(directory)
    torch.save({**tensors, "extra": Runs()}, directory / "pytorch_model.bin")
    message = refused(directory)
    assert "holds more than weights" in message and "system" in message
    assert not (directory / "ran").exists()


def test_bin_files_that_are_no_checkpoints_are_refused(bare):
    directory, tensors = bare
    file = directory / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    assert "since torch 1.6" in refused(directory)
    torch.save({"model": tensors, "step": 5}, file)
    assert "'model' is a dict, not a tensor" in refused(directory)
    torch.save(list(tensors.values()), file)
    assert "holds a list" in refused(directory)
    torch.save({**tensors, HEAD: tensors[HEAD].t()}, file)
    assert f"{HEAD} [64, 320] is stored with strides [1, 64]" in refused(directory)
    torch.save(tensors, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "damaged or truncated" in refused(directory)
    file.write_bytes(b"")
    assert "begins with b''" in refused(directory)


def test_bin_tensors_are_checked_before_any_is_read(bare):
    directory, tensors = bare
    torch.save({**tensors, HEAD: torch.ones(319, 64)}, directory / "pytorch_model.bin")
    assert f"{HEAD} is [319, 64], the config says [320, 64]" in refused(directory)
    torch.save({k: t for k, t in tensors.items() if k != EMBED}, directory / "pytorch_model.bin")
    assert f"missing: {EMBED}" in refused(directory)
    source = open_source(directory, ModelConfig())
    assert not source._maps and EMBED not in source.shapes
