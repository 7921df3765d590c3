"""Hub ids, against a fake hub: what is fetched, what is kept, and what users read when it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.fake_hub import FakeHub, fake_hub

LOCATE = """
import sys
from octavo.checkpoint.locate import locate
from octavo.types import ConfigError
revision = sys.argv[2] if len(sys.argv) > 2 else None
try:
    print(locate(sys.argv[1], revision).path)
except ConfigError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {
        "org/model": {
            "config.json": "{}",
            "tokenizer.json": '{"model": {}}',
            "model.safetensors": "weights",
            "consolidated.safetensors": "the same weights again",
            "pytorch_model.bin": "a pickle",
            "README.md": "words",
            "original/params.json": "{}",
        },
        "org/shards": {
            "config.json": "{}",
            "model.safetensors.index.json": '{"weight_map": {"a": "x-1.safetensors"}}',
        },
        "org/pickles": {"config.json": "{}", "pytorch_model.bin": "a pickle"},
        "org/gguf": {"m.Q8_0.gguf": "GGUF8", "m.Q4_1.gguf": "GGUF4", "README.md": "words"},
    }
    for repository, contents in files.items():
        for name, text in contents.items():
            path = tmp_path / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    with fake_hub({name: tmp_path / name for name in files}) as running:
        yield running


def locate(hub: FakeHub, tmp_path: Path, *words: str, **more: str) -> tuple[int, str]:
    environment = {**hub.environment(tmp_path / "hf"), **more}
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode in (0, 2), done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return done.returncode, done.stdout.strip()


def test_only_the_files_needed_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    code, path = locate(hub, tmp_path, "org/model")
    assert code == 0
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.downloads) == [f"org/model/{name}" for name in names]
    assert (Path(path) / "model.safetensors").read_text() == "weights"


def test_a_second_time_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    _, first = locate(hub, tmp_path, "org/model")
    hub.downloads.clear()
    assert locate(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1") == (0, first)
    assert locate(hub, tmp_path, "org/model") == (0, first)
    assert hub.downloads == []


def test_offline_without_a_copy_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    code, text = locate(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert code == 2 and "org/model" in text and hub.downloads == []


def test_a_hub_that_does_not_answer_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    code, text = locate(hub, tmp_path, "org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 2 and "org/model" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["org/nothing"], "no such repository"),
        (["org/model", "v9"], "no revision 'v9'"),
        (["org/pickles"], "no safetensors"),
        (["org/shards"], "1 of 1 weight files are missing"),
        (["org/gguf"], "org/gguf:Q8_0"),
        (["org/gguf:Q2_K"], "no GGUF file that matches"),
        (["org/gguf:.gguf"], "org/gguf"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_named(
    hub: FakeHub, tmp_path: Path, words: list[str], part: str
) -> None:
    code, text = locate(hub, tmp_path, *words)
    assert code == 2 and part in text


def test_a_gated_repository_says_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add("org/model")
    code, text = locate(hub, tmp_path, "org/model")
    assert code == 2 and "HF_TOKEN" in text


def test_one_file_of_a_gguf_repository(hub: FakeHub, tmp_path: Path) -> None:
    code, path = locate(hub, tmp_path, "org/gguf:Q8_0")
    assert code == 0 and Path(path).read_text() == "GGUF8"
    assert hub.downloads == ["org/gguf/m.Q8_0.gguf"]
