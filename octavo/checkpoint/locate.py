"""From what the user typed as MODEL to files on this disk.

In this order: a path that exists, a name of the catalogue, a hub id (``org/name``, or
``org/name:QUANT`` for one file of a GGUF repository). Reads no weights and never imports torch.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.catalogue import CATALOGUE, pull, silent
from octavo.checkpoint.split import first_part, parts_of
from octavo.types import ConfigError, Progress

# What a text decoder is loaded from; everything else of a repository stays on the hub.
_CONFIG_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken"]
_WEIGHT_PATTERNS = ["*.safetensors"]
_NOT_NEEDED = ["*/*", "consolidated*", "adapter_*", "training_args*", "optimizer*"]

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
    if path.exists():
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
    return _from_hub(model, revision, weights)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1


def _nearest_sibling(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return f" (nor does {path.parent} exist)" if not path.parent.exists() else ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _local(model: str, path: Path) -> ModelFiles:
    try:
        if path.is_dir():
            return _directory(model, path)
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


def _from_hub(model: str, revision: str | None, weights: bool) -> ModelFiles:
    repository, _, selector = model.partition(":")
    if selector:
        name = selector if selector.endswith(".gguf") else f"*{selector}.gguf"
        split = f"{name.removesuffix('.gguf')}-?????-of-?????.gguf"
        patterns = [f"{folder}{file}" for folder in ("", "*/") for file in (name, split)]
        folder = _snapshot(repository, revision, patterns, [])
        found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        if not found:
            raise ConfigError(f"model {model}: {repository} has no GGUF file that matches {name}")
        return ModelFiles(_one_gguf(model, found), model, is_gguf=True)
    patterns = _CONFIG_PATTERNS + (_WEIGHT_PATTERNS if weights else [])
    folder = _snapshot(repository, revision, patterns, _NOT_NEEDED)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {model}: the repository has no config.json; of a GGUF repository name the "
            f"file, e.g. {model}:Q8_0"
        )
    if weights:
        _check_weights(model, folder)
    return ModelFiles(folder, model, is_gguf=False)


def _snapshot(repository: str, revision: str | None, allow: list[str], ignore: list[str]) -> Path:
    """The snapshot's folder in the hub's cache; HF_HUB_OFFLINE and HF_ENDPOINT are honoured."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=allow, ignore_patterns=ignore
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"model {repository}: the hub asks for its licence to be accepted; do that on its "
            "page, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model {repository}: no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {repository}: no such directory here and no such repository on the hub "
            "(a private one needs HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model {repository}: not in the hub's cache on this machine, and the hub cannot be "
            f"asked ({cause}); name a local model, or one of `octavo models`"
        ) from error
    return Path(folder)


def _check_weights(model: str, folder: Path) -> None:
    """A snapshot from the cache of an interrupted download may lack shards."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ConfigError(
                f"model {model}: {len(missing)} of {len(shards)} weight files are missing from "
                f"{folder} (first: {missing[0]}); with a network, start again to fetch them"
            )
    elif not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model {model}: the repository has no safetensors weights; other formats of torch "
            "(.bin, .pt) can run code and are not read"
        )
