"""Which token ids end an answer, as a directory's tokenizer files say. Never torch."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.json_file import read_object


def tokenizer_eos_ids(path: Path) -> list[int]:
    """Ids of the ``eos_token`` of tokenizer_config.json; [] when there is none, and for a GGUF
    file, whose metadata model.facts reads."""
    if path.is_file():
        return []
    eos = read_object(path / "tokenizer_config.json", missing_ok=True).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return []
    added = read_object(path / "tokenizer.json", missing_ok=True).get("added_tokens") or []
    return sorted({int(token["id"]) for token in added if token.get("content") == text})
