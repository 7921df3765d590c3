"""From what the user typed as MODEL to files on this disk.

In this order: a path that exists, a name of the catalogue, a hub id (``org/name``, or
``org/name:QUANT`` for one file of a GGUF repository). Reads no weights and never imports torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.checkpoint.catalogue import CATALOGUE, pull, silent
from octavo.checkpoint.hub import fetch_checkpoint, fetch_gguf
from octavo.checkpoint.split import first_part, parts_of
from octavo.speculation import SpeculativeConfig, speculating
from octavo.types import ConfigError, Progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*(:[\w.\-]+)?")


@dataclass(frozen=True)
class ModelFiles:
    """``path`` is a directory with config.json (and weights), or one GGUF file.

    ``name`` is what the user typed: the model's name for clients unless they chose another.
    """

    path: Path
    name: str
    is_gguf: bool


def locate(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: Progress = silent,
) -> ModelFiles:
    """Finds ``model``, fetching it when it is a catalogue name or a hub id.

    ``weights=False`` (random weights are loaded instead) asks the hub for the small files only.
    ``revision`` is a hub branch, tag or commit; it has no meaning elsewhere.

    Raises:
        ConfigError: nothing usable is there; the message names it and says what to do.
    """
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"model {model[:80]!r}: no path of a file ({reason})") from None
    if exists:
        return _local(model, path)
    if _looks_like_path(model):
        raise ConfigError(f"model {model}: no such file or directory{_nearest_sibling(path)}")
    if model in CATALOGUE:
        return ModelFiles(pull(CATALOGUE[model], progress), model, is_gguf=True)
    if not _HUB_ID.fullmatch(model):
        near = difflib.get_close_matches(model.lower(), CATALOGUE, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model {model}: no such file or directory, not a name of the catalogue "
            f"({', '.join(CATALOGUE)}), and a hub id has the form org/name{hint}"
        )
    return _from_hub(model, revision, weights, progress)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1


def _nearest_sibling(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return f" (nor does {path.parent} exist)" if not path.parent.exists() else ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def locate_draft(
    config: SpeculativeConfig, *, weights: bool = True, progress: Progress = silent
) -> SpeculativeConfig:
    """``config`` with the files of the draft model it names, if it names one. Raises as
    ``locate``."""
    wanted = speculating(config)
    if wanted is None or wanted.model is None:
        return config
    found = locate(wanted.model, weights=weights, progress=progress)
    return replace(config, draft_path=str(found.path))


def _local(model: str, path: Path) -> ModelFiles:
    try:
        if path.is_dir():
            return _directory(model, path)
        if not path.is_file():  # to read a pipe is to wait for ever
            raise ConfigError(f"model {model}: neither a file nor a directory")
        with open(path, "rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise ConfigError(f"model {model}: cannot be read ({error.strerror})") from error
    if magic != b"GGUF":
        raise ConfigError(
            f"model {model}: not a GGUF file (it begins with {magic!r}); a model is a GGUF file or "
            "a directory with config.json and safetensors weights"
        )
    _check_parts(path)
    return ModelFiles(path, model, is_gguf=True)


def _directory(model: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(path, model, is_gguf=False)
    files = sorted(path.glob("*.gguf"))
    if not files:
        raise ConfigError(f"model {model}: the directory holds neither config.json nor a GGUF file")
    return ModelFiles(_one_gguf(model, files), model, is_gguf=True)


def _one_gguf(model: str, files: list[Path]) -> Path:
    """The one model that ``files`` hold: a file, or all parts of a split one (its first stands for
    them). Raises ConfigError where they are several, or parts are absent."""
    found = sorted({first_part(file) for file in files})
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"model {model}: {len(found)} GGUF files ({names}); name one of them")
    _check_parts(found[0])
    return found[0]


def _check_parts(path: Path) -> None:
    """Raises ConfigError for a later part of a split model, and where parts are absent."""
    first, parts = first_part(path), parts_of(path)
    if path != first:
        raise ConfigError(
            f"model {path}: one of {len(parts)} parts of a split GGUF; name the first, {first}"
        )
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise ConfigError(
            f"model {path}: {len(absent)} of {len(parts)} parts are absent: {', '.join(absent[:4])}"
        )


def _from_hub(model: str, revision: str | None, weights: bool, progress: Progress) -> ModelFiles:
    repository, _, selector = model.partition(":")
    if selector:
        files = fetch_gguf(repository, selector, revision, progress)
        return ModelFiles(_one_gguf(model, files), model, is_gguf=True)
    folder = fetch_checkpoint(repository, revision, weights, progress)
    return ModelFiles(folder, model, is_gguf=False)
