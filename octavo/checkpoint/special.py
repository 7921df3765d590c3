"""Which token ids end an answer, as a checkpoint's tokenizer says. Never torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.gguf import whole_number
from octavo.checkpoint.json_file import read_object
from octavo.checkpoint.sentencepiece_model import PieceType, read_sentencepiece_model
from octavo.types import ConfigError

# With which chat models end a turn, where their GGUF file does not say so.
_TURN_ENDS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
    *("<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>", "<EOT>", "<turn|>"),
    *("<|return|>", "<|call|>"),
}


def gguf_eos_ids(metadata: Mapping[str, Any], where: str | Path = "GGUF") -> list[int]:
    """A GGUF file's eos, eot and eom ids. Many files name only the first, which some models never
    write in a chat: a token that is known to end turns, and does in the file's own chat template,
    is taken for one that is not named. Raises ConfigError for an id that is no integer."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = [whole_number(metadata, key, where, 0) for key in keys if key in metadata]
    if "tokenizer.ggml.eot_token_id" not in metadata:
        found += _ends_of_turns(metadata)
    return list(dict.fromkeys(found))


def _ends_of_turns(metadata: Mapping[str, Any]) -> list[int]:
    template = metadata.get("tokenizer.chat_template")
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(template, str) or not isinstance(tokens, list) or types is None:
        return []
    found = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types))
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
        and token in _TURN_ENDS
        and token in template
    }
    if "<|return|>" in found:  # gpt-oss: a turn goes on after the messages that <|end|> ends
        found.pop("<|end|>", None)
    return list(found.values())


def tokenizer_eos_ids(path: Path) -> list[int]:
    """Ids of the ``eos_token`` of tokenizer_config.json or special_tokens_map.json (of a
    tokenizer.model: ``</s>`` where they name none); [] when there is none, and for a GGUF file,
    whose metadata model.facts reads."""
    if path.is_file():
        return []
    settings = read_object(path / "tokenizer_config.json", missing_ok=True)
    text = _text(settings.get("eos_token"))
    if text is None and "eos_token" not in settings:
        older = read_object(path / "special_tokens_map.json", missing_ok=True)
        text = _text(older.get("eos_token"))
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        return _ids_of(text, settings, read_object(tokenizer))
    if not (path / "tokenizer.model").is_file():
        return []
    pieces = read_sentencepiece_model(path / "tokenizer.model").tokens
    name = "</s>" if text is None else text
    return sorted({*_ids_of(name, settings, {}), *_places(pieces, name)})


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids_of(text: str | None, settings: dict[str, Any], tokenizer: dict[str, Any]) -> list[int]:
    """From the added tokens of both files, else from the vocabulary."""
    if text is None:
        return []
    try:
        listed = settings.get("added_tokens_decoder") or {}
        found = {int(index) for index, token in listed.items() if _text(token) == text}
        added = tokenizer.get("added_tokens") or []
        found |= {int(token["id"]) for token in added if token.get("content") == text}
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        if not found and isinstance(vocab, dict) and text in vocab:
            found = {int(vocab[text])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the tokenizer files are not as transformers writes them ({error!r})"
        ) from None
    return sorted(found)


def _places(pieces: list[str], text: str) -> list[int]:
    return [index for index, piece in enumerate(pieces) if piece == text]
