"""Models of the Hugging Face hub: the files that are needed, in the hub's own cache.

``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean everywhere. A
file that has come is kept, so that an interrupted download goes on with the next one, and a broken
connection is taken up again where it broke.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.types import ConfigError, Progress

# What a text decoder is loaded from; everything else of a repository stays on the hub.
_CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken")
_SAFETENSORS = "*.safetensors"
_PICKLED = "pytorch_model*.bin"
_NOT_NEEDED = ("*/*", "consolidated*", "adapter_*", "training_args*", "optimizer*")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def fetch_checkpoint(
    repository: str, revision: str | None, weights: bool, progress: Progress
) -> Path:
    """The folder with config.json, tokenizer and (``weights``) safetensors of a repository, or
    PyTorch's files where it has none of those. Raises ConfigError for what cannot be used."""
    patterns = [*_CONFIG_PATTERNS, *([_SAFETENSORS] if weights else [])]
    folder = _snapshot(repository, revision, patterns, progress)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {repository}: the repository has no config.json; of a GGUF repository name the "
            f"file, e.g. {repository}:Q8_0"
        )
    if weights:
        if not any(folder.glob(_SAFETENSORS)) and not (folder / _INDEXES[0]).is_file():
            folder = _snapshot(repository, revision, [*_CONFIG_PATTERNS, _PICKLED], progress)
        _check_weights(repository, folder)
    return folder


def fetch_gguf(
    repository: str, selector: str, revision: str | None, progress: Progress
) -> list[Path]:
    """The GGUF files that ``selector`` names: one, by its name or how its name ends (``Q8_0``), or
    the parts of a split one. Raises ConfigError where there is none."""
    name = selector if selector.endswith(".gguf") else f"*{selector}.gguf"
    split = f"{name.removesuffix('.gguf')}-?????-of-?????.gguf"
    patterns = [f"{where}{file}" for where in ("", "*/") for file in (name, split)]
    folder = _snapshot(repository, revision, patterns, progress, ignore=())
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not found:
        raise ConfigError(
            f"model {repository}:{selector}: {repository} has no GGUF file that matches {name}"
        )
    return found


def _snapshot(
    repository: str,
    revision: str | None,
    allow: Sequence[str],
    progress: Progress,
    ignore: Sequence[str] = _NOT_NEEDED,
) -> Path:
    """The snapshot's folder in the hub's cache, with the files that match."""
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
            repository,
            revision=revision,
            allow_patterns=list(allow),
            ignore_patterns=list(ignore),
            tqdm_class=_told(progress, f"fetching {repository}"),
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
            f"model {repository}: not in the hub's cache on this machine, or not all of it, and "
            f"the hub cannot be asked ({cause}); name a local model, or one of `octavo models`"
        ) from error
    return Path(folder)


def _told(progress: Progress, phase: str) -> Any:
    """A class of progress bars that draws nothing and tells ``progress`` of the bytes that came.
    The library makes several for one download; those that count bytes count the same ones."""
    from tqdm.auto import tqdm

    counts = {"done": 0, "total": 0}

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                counts["done"] = max(counts["done"], int(self.n))
                counts["total"] = max(counts["total"], int(self.total))
                progress(phase, min(1.0, counts["done"] / counts["total"]), counts["total"])
            return drawn

    return Told


def _check_weights(repository: str, folder: Path) -> None:
    """A snapshot from the cache of an interrupted download may lack shards."""
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    if index is not None:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ConfigError(
                f"model {repository}: {len(missing)} of {len(shards)} weight files are missing "
                f"from {folder} (first: {missing[0]}); with a network, start again to fetch them"
            )
    elif not any([*folder.glob(_SAFETENSORS), *folder.glob(_PICKLED)]):
        raise ConfigError(
            f"model {repository}: the repository has neither safetensors weights nor "
            f"{_PICKLED}; other formats are not read"
        )
