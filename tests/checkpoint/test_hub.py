"""Hub ids, against a fake hub: what is fetched, what is kept, and what users read when it fails."""

from __future__ import annotations

import json
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
        "org/pickles": {
            "config.json": "{}",
            "pytorch_model.bin": "a pickle",
            "training_args.bin": "another",
            "model.ckpt": "x",
        },
        "org/other": {"config.json": "{}", "model.ckpt": "x"},
        "org/split": {
            "m-Q8_0-00001-of-00002.gguf": "GGUF1",
            "m-Q8_0-00002-of-00002.gguf": "GGUF2",
            "m-Q4_0-00001-of-00002.gguf": "GGUF3",
            "m-Q4_0-00002-of-00002.gguf": "GGUF4",
        },
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
        (["org/other"], "neither safetensors weights nor pytorch_model*.bin"),
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


def test_all_parts_of_a_split_gguf_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    code, path = locate(hub, tmp_path, "org/split:Q8_0")
    assert code == 0 and Path(path).name == "m-Q8_0-00001-of-00002.gguf"
    names = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert sorted(hub.downloads) == [f"org/split/{name}" for name in names]


def test_bin_files_are_fetched_where_there_are_no_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    code, path = locate(hub, tmp_path, "org/pickles")
    assert code == 0 and (Path(path) / "pytorch_model.bin").read_text() == "a pickle"
    names = ["config.json", "pytorch_model.bin"]
    assert sorted(hub.downloads) == [f"org/pickles/{name}" for name in names]
    assert locate(hub, tmp_path, "org/pickles", HF_HUB_OFFLINE="1") == (0, path)


def test_the_token_of_the_environment_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    assert locate(hub, tmp_path, "org/model", HF_TOKEN="hf_secret")[0] == 0
    assert hub.tokens == {"hf_secret"}


def test_a_commit_names_a_revision(hub: FakeHub, tmp_path: Path) -> None:
    code, path = locate(hub, tmp_path, "org/model", hub.commit("org/model"))
    assert code == 0 and Path(path).name == hub.commit("org/model")


# ---- octavo pull, octavo models ----


@pytest.fixture
def large(hub: FakeHub, tmp_path: Path) -> bytes:
    """Two shards of the model ``org/large``; returns what one holds."""
    folder = tmp_path / "org/large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    content = bytes(range(256)) * 60_000
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(content + bytes([number]))
    hub.repositories["org/large"] = folder
    return content


def octavo(hub: FakeHub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        capture_output=True,
        text=True,
        env=hub.environment(tmp_path / "hf"),
    )


def test_pull_goes_on_where_the_connection_broke(
    hub: FakeHub, tmp_path: Path, large: bytes
) -> None:
    """The library keeps whole pieces of 10 MiB."""
    hub.broken["org/large/model-2.safetensors"] = 12_000_000
    done = octavo(hub, tmp_path, "pull", "org/large")
    assert done.returncode == 0, done.stderr
    assert hub.ranges == ["org/large/model-2.safetensors from 10485760"]
    folder = Path(done.stdout.split()[1])
    assert (folder / "model-2.safetensors").read_bytes() == large + b"\x02"
    assert "(29.3 MiB)" in done.stdout
    assert "fetching org/large" in done.stderr and "Downloading" not in done.stderr


def test_pull_after_a_failed_one_fetches_only_what_is_missing(
    hub: FakeHub, tmp_path: Path, large: bytes
) -> None:
    second = hub.repositories["org/large"] / "model-2.safetensors"
    whole = second.read_bytes()
    assert octavo(hub, tmp_path, "pull", "org/large").returncode == 0
    blobs = tmp_path / "hf/hub/models--org--large"
    next(blobs.glob("snapshots/*/model-2.safetensors")).resolve().unlink()  # as if it never came
    hub.downloads.clear()
    done = octavo(hub, tmp_path, "pull", "org/large")
    assert done.returncode == 0 and hub.downloads == ["org/large/model-2.safetensors"]
    assert (Path(done.stdout.split()[1]) / "model-2.safetensors").read_bytes() == whole


def test_models_lists_what_is_on_disk_and_its_size(
    hub: FakeHub, tmp_path: Path, large: bytes
) -> None:
    for model in ("org/large", "org/gguf:Q8_0", "org/pickles", "org/split:Q4_0"):
        assert octavo(hub, tmp_path, "pull", model).returncode == 0
    listed = json.loads(octavo(hub, tmp_path, "models", "--json").stdout)["hub"]
    assert sorted(listed) == ["org/gguf", "org/large", "org/pickles", "org/split"]
    assert listed["org/large"]["bytes"] == 2 * (len(large) + 1) + 2
    assert listed["org/gguf"]["files"] == ["m.Q8_0.gguf"]
    text = octavo(hub, tmp_path, "models").stdout
    assert "org/large" in text and "29.3 MiB" in text
    assert "org/gguf:m.Q8_0.gguf" in text and "5 B" in text
    assert "org/split:m-Q4_0-00001-of-00002.gguf  10 B" in text and "00002-of" not in text
