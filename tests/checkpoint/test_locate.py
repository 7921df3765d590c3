"""What MODEL may be, and the one line a user gets when it is none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint.locate import locate
from octavo.types import ConfigError


def test_a_gguf_file_is_found_whatever_its_suffix(tmp_path: Path) -> None:
    for name in ("model.gguf", "weights.bin"):
        file = tmp_path / name
        file.write_bytes(b"GGUF....")
        found = locate(str(file))
        assert (found.path, found.name, found.is_gguf) == (file, str(file), True)


def test_a_checkpoint_directory_wins_over_a_gguf_inside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    found = locate(str(tmp_path))
    assert (found.path, found.is_gguf) == (tmp_path, False)


def test_a_directory_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").write_bytes(b"GGUF")
    found = locate(str(tmp_path))
    assert (found.path, found.is_gguf) == (tmp_path / "only.gguf", True)


def message(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        locate(model)
    text = str(caught.value)
    assert "\n" not in text and model in text
    return text


def test_two_gguf_files_are_listed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "a.gguf, b.gguf" in message(str(tmp_path))


def test_the_first_part_of_a_split_gguf_stands_for_all(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"GGUF")
    for model in (parts[0], tmp_path):
        found = locate(str(model))
        assert (found.path, found.is_gguf) == (parts[0], True)
    assert f"name the first, {parts[0]}" in message(str(parts[1]))
    parts[2].unlink()
    for model in (parts[0], tmp_path):
        with pytest.raises(ConfigError, match=r"1 of 3 parts are absent: big-00003-of-00003\.gguf"):
            locate(str(model))


def test_an_empty_directory_says_what_is_missing(tmp_path: Path) -> None:
    assert "config.json" in message(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("hello")
    assert "not a GGUF file" in message(str(file))


def test_a_misspelt_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "smollm").mkdir()
    assert f"did you mean {tmp_path / 'smollm'}" in message(str(tmp_path / "smolm"))


def test_a_misspelt_catalogue_name_names_its_neighbour() -> None:
    assert "did you mean smollm2-135m" in message("smollm2")


def test_an_unknown_bare_name_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.checkpoint.hub._snapshot", lambda *_, **__: pytest.fail("asked"))
    assert "org/name" in message("gpt-nothing")
