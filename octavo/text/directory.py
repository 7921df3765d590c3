"""A tokenizer from a checkpoint directory: tokenizer.json (or tokenizer.model), and
tokenizer_config.json and chat template files beside it."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.checkpoint.json_file import read_object
from octavo.checkpoint.sentencepiece_model import (
    PieceType,
    SentencepieceModel,
    read_sentencepiece_model,
)
from octavo.text.pieces import sentencepiece_backend
from octavo.text.vocabulary import PrefixSpace, Spelling, Vocabulary
from octavo.types import ConfigError

MOST_IDS = 1 << 24  # the library sets aside memory for each id below the highest
_NAMES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


def read_directory_vocabulary(directory: Path) -> Vocabulary:
    try:
        if (directory / "tokenizer.json").is_file():
            return _from_tokenizer_json(directory)
        if (directory / "tokenizer.model").is_file():
            return _from_sentencepiece(directory)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{directory}: its tokenizer files are not as transformers writes them "
            f"({type(error).__name__}: {error})"
        ) from error
    raise ConfigError(
        f"{directory}: no tokenizer.json or tokenizer.model; add one (transformers: "
        "AutoTokenizer … save_pretrained), or name another with --tokenizer"
    )


def _from_tokenizer_json(directory: Path) -> Vocabulary:
    path = directory / "tokenizer.json"
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    token, highest = max(backend.get_vocab().items(), key=itemgetter(1), default=("", 0))
    if highest >= MOST_IDS:
        raise ConfigError(
            f"{path}: token {token!r} has id {highest:,}; this version supports ids below "
            f"{MOST_IDS:,}"
        )
    backend.no_truncation()
    backend.no_padding()
    settings = read_object(directory / "tokenizer_config.json", missing_ok=True)
    named = _named_tokens(settings, directory)
    special_ids = _add_named(backend, named, settings)
    spelling, adds_space = _spelling(backend, path)
    prefix_ids, suffix_ids = _around(backend, path)
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    return Vocabulary(
        backend=backend,
        spelling=spelling,
        bos_id=bos,
        eos_ids=[] if eos is None else [eos],
        special_ids=special_ids,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        adds_space=adds_space,
        templates=_templates(directory, settings),
        named_tokens=named,
    )


def _from_sentencepiece(directory: Path) -> Vocabulary:
    path = directory / "tokenizer.model"
    model = read_sentencepiece_model(path)
    # Symbols are looked for in the text, where a space is a space (Gemma has runs of them).
    tokens = [
        token.replace("▁", " ") if kind == PieceType.USER_DEFINED else token
        for token, kind in zip(model.tokens, model.types)
    ]
    backend = sentencepiece_backend(
        tokens,
        model.scores,
        model.types,
        add_space_prefix=False,
        where=path,
        charsmap=model.charsmap,
        collapse_spaces=model.collapse_spaces,
        is_unigram=model.is_unigram,
    )
    settings = read_object(directory / "tokenizer_config.json", missing_ok=True)
    named = {"bos_token": "<s>", "eos_token": "</s>", **_named_tokens(settings, directory)}
    named = {name: text for name, text in named.items() if backend.token_to_id(text) is not None}
    special_ids = _add_named(backend, named, settings)
    unknown = {index for index, kind in enumerate(model.types) if kind == PieceType.UNKNOWN}
    bos, eos = (backend.token_to_id(named.get(f"{name}_token", "")) for name in ("bos", "eos"))
    has_bytes = PieceType.BYTE in model.types
    return Vocabulary(
        backend=backend,
        spelling=Spelling.SENTENCEPIECE_BYTES if has_bytes else Spelling.SENTENCEPIECE,
        bos_id=bos,
        eos_ids=[] if eos is None else [eos],
        special_ids=special_ids | unknown,
        prefix_ids=[bos] if bos is not None and settings.get("add_bos_token", True) else [],
        suffix_ids=[eos] if eos is not None and settings.get("add_eos_token", False) else [],
        adds_space=model.add_space_prefix,
        prefix_space=_prefix_space(model, settings),
        templates=_templates(directory, settings),
        named_tokens=named,
    )


def _prefix_space(model: SentencepieceModel, settings: dict[str, Any]) -> PrefixSpace:
    """Sentencepiece puts its prefix once; transformers' ``legacy`` puts one after each special
    token too, which is what tokenizers without that setting were made with."""
    if not model.add_space_prefix:
        return PrefixSpace.NONE
    return PrefixSpace.EACH if settings.get("legacy") is not False else PrefixSpace.FIRST


def _named_tokens(settings: dict[str, Any], directory: Path) -> dict[str, str]:
    """bos_token, eos_token …; each is a string or an object with ``content``."""
    older = read_object(directory / "special_tokens_map.json", missing_ok=True)
    found = {}
    for name in (f"{name}_token" for name in _NAMES):
        value = settings[name] if name in settings else older.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _add_named(backend: Backend, named: dict[str, str], settings: dict[str, Any]) -> frozenset[int]:
    """Tokens that tokenizer_config.json calls special are special, as transformers has it.
    Returns the special ids."""
    extra = settings.get("additional_special_tokens") or []
    listed = (settings.get("added_tokens_decoder") or {}).values()
    texts = [
        *named.values(),
        *(item["content"] if isinstance(item, dict) else item for item in extra),
        *(item["content"] for item in listed if item.get("special")),
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    special = {text for text in texts if backend.token_to_id(text) is not None}
    missing = [text for text in dict.fromkeys(texts) if text in special - known]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in missing]
    )
    return frozenset(
        index
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special or token.content in special
    )


def _spelling(backend: Backend, path: Path) -> tuple[Spelling, bool]:
    """(how bytes are written, whether decoding drops a leading space), from the decoder."""
    steps = [step for part in (backend.decoder, backend.pre_tokenizer) for step in _steps(part)]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL, False
    decoding = _steps(backend.decoder)
    spaces = [step for step in decoding if step["type"] == "Metaspace"]
    replaced = any(step.get("pattern") == {"String": "▁"} for step in decoding)
    if not spaces and not replaced:
        raise ConfigError(
            f"{path}: its tokens are neither byte-level nor sentencepiece (decoder: "
            f"{', '.join(step['type'] for step in decoding) or 'none'}); such tokenizers are not "
            "supported"
        )
    strips = any(step["type"] == "Strip" and step.get("start") for step in decoding)
    schemes = [step.get("prepend_scheme", "always") for step in spaces]
    has_bytes = any(step["type"] == "ByteFallback" for step in decoding)
    return (
        Spelling.SENTENCEPIECE_BYTES if has_bytes else Spelling.SENTENCEPIECE,
        strips or any(scheme != "never" for scheme in schemes),
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The parts of a decoder or pre-tokenizer, as tokenizer.json writes them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("decoders") or state.get("pretokenizers") or [state]


def _around(backend: Backend, path: Path) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    text = "a"
    plain = backend.encode(text, add_special_tokens=False).ids
    full = backend.encode(text, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ConfigError(f"{path}: its post_processor changes the text's own tokens: not supported")


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """name -> source. A file of its own goes before tokenizer_config.json's entry."""
    declared = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        templates = {item["name"]: item["template"] for item in declared}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError("chat_template holds a name or template that is no text")
    in_json = read_object(directory / "chat_template.json", missing_ok=True).get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    more = directory / "additional_chat_templates"
    for extra in sorted(more.glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates
