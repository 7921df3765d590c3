"""A GGUF model in several files, as llama-gguf-split leaves it."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from octavo.checkpoint.gguf import GGUFFile
from octavo.text.tokenizer import load_tokenizer
from octavo.types import ConfigError
from tests.fixtures import models
from tests.model.running import all_logits, load, random_ids

IDS = random_ids(30)


def split(
    source: Path,
    directory: Path,
    count: int,
    changes: dict[str, int] | None = None,
    twice: int = -1,
    left_out: int = -1,
) -> Path:
    """``source`` cut into ``count`` files; the first has the metadata, and the tensors go round.
    Returns the first. ``changes``: to the values of the second part's ``split.*`` keys; ``twice``:
    a tensor that every part has; ``left_out``: one that none has."""
    reader = gguf.GGUFReader(str(source))
    paths = [directory / f"m-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    for place, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), "llama")
        if place == 0:
            for name, field in reader.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    is_array = field.types[0] == gguf.GGUFValueType.ARRAY
                    inner = field.types[-1] if is_array else None
                    writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
        facts = {"no": place, "count": count, "tensors": len(reader.tensors)}
        facts.update(changes or {} if place == 1 else {})
        writer.add_uint16("split.no", facts["no"])
        writer.add_uint16("split.count", facts["count"])
        writer.add_int32("split.tensors.count", facts["tensors"])
        for index, tensor in enumerate(reader.tensors):
            if (index % count == place or index == twice) and index != left_out:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


@pytest.mark.parametrize("name", ["R-F16", "R-Q8_0"])
def test_parts_give_the_logits_of_the_whole(tmp_path: Path, name: str) -> None:
    whole = models.path(name)
    first = split(whole, tmp_path, 3)
    assert torch.equal(all_logits(load(first), IDS), all_logits(load(whole), IDS))
    assert load_tokenizer(first).encode("hello") == load_tokenizer(whole).encode("hello")


def refused(first: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(first)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    first = split(models.path("R-F16"), tmp_path, 3)
    second = tmp_path / "m-00002-of-00003.gguf"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert f"{second}: truncated" in refused(first)
    second.unlink()
    assert "1 of 3 parts are absent: m-00002-of-00003.gguf" in refused(first)
    with pytest.raises(ConfigError, match="name the first"):
        _ = GGUFFile(tmp_path / "m-00003-of-00003.gguf").tensors
    renamed = first.rename(tmp_path / "renamed.gguf")
    assert "one of 3 parts" in refused(renamed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"no": 2}, "says it is part 2 of 3 (from 0), its name says 1 of 3"),
        ({"count": 4}, "part 1 of 4"),
    ],
)
def test_parts_of_another_model_are_refused(tmp_path: Path, changes, reason: str) -> None:
    assert reason in refused(split(models.path("R-F16"), tmp_path, 3, changes))


def test_each_tensor_must_be_in_one_part(tmp_path: Path) -> None:
    first = split(models.path("R-F16"), tmp_path, 2, twice=4)
    assert "is in both m-00001-of-00002.gguf and m-00002-of-00002.gguf" in refused(first)
    first = split(models.path("R-F16"), tmp_path, 2, left_out=4)
    assert "its 2 parts hold 20 tensors, the model has 21" in refused(first)
