"""Which token ids end an answer, as the tokenizer's files say. Header reading only: never torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.checkpoint.gguf import GGUFFile
from octavo.types import ConfigError


def read_json(path: Path) -> Any:
    """A JSON file's content. ConfigError in one line when it cannot be read or parsed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error


def tokenizer_eos_ids(path: Path) -> list[int]:
    """EOS ids named by a GGUF's metadata or by a directory's tokenizer files; [] when none is."""
    if path.is_file():
        metadata = GGUFFile(path).metadata
        kinds = ("eos", "eot", "eom")
        names = [f"tokenizer.ggml.{kind}_token_id" for kind in kinds]
        return sorted({int(metadata[name]) for name in names if name in metadata})
    config_file, vocabulary_file = path / "tokenizer_config.json", path / "tokenizer.json"
    if not (config_file.exists() and vocabulary_file.exists()):
        return []
    eos = read_json(config_file).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(vocabulary_file).get("added_tokens") or []
    return sorted({int(token["id"]) for token in added if token.get("content") == text})
