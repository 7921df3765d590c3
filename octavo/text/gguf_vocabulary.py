"""A tokenizer from a GGUF file's metadata alone: byte-level BPE (``gpt2``) and sentencepiece BPE
(``llama``). Where the file leaves something open, llama.cpp's defaults hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.checkpoint.gguf import GGUFFile
from octavo.checkpoint.sentencepiece_model import PieceType
from octavo.text.pieces import added_tokens, index_tokens, sentencepiece_backend
from octavo.text.splits import split_named
from octavo.text.vocabulary import Spelling, Vocabulary
from octavo.types import ConfigError

logger = logging.getLogger(__name__)

_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_TEMPLATE = "tokenizer.chat_template"


def read_gguf_vocabulary(path: Path) -> Vocabulary:
    """Raises ConfigError for a kind of vocabulary that octavo does not know, or one with holes."""
    facts = GGUFFile(path).metadata
    model = facts.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ConfigError(
            f"{path}: tokenizer.ggml.model is {model!r}; gpt2 and llama are supported. Use "
            "--tokenizer with the model's tokenizer.json"
        )
    tokens = facts.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{path}: tokenizer.ggml.tokens is missing, the file has no vocabulary")
    ids = _named_ids(facts, len(tokens), path)
    types = _types(facts, len(tokens), ids, path)
    if model == "gpt2":
        backend, adds_bos = _byte_level(facts, tokens, types, path)
        spelling, adds_space = Spelling.BYTE_LEVEL, False
    else:
        adds_space = bool(facts.get("tokenizer.ggml.add_space_prefix", True))
        backend = sentencepiece_backend(
            tokens,
            _scores(facts, len(tokens), path),
            types,
            add_space_prefix=adds_space,
            where=path,
        )
        adds_bos = True
        has_bytes = PieceType.BYTE in types
        spelling = Spelling.SENTENCEPIECE_BYTES if has_bytes else Spelling.SENTENCEPIECE
    adds_bos = bool(facts.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(facts.get("tokenizer.ggml.add_eos_token", False))
    ends = (ids.get(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    return Vocabulary(
        backend=backend,
        spelling=spelling,
        bos_id=ids.get("bos_token_id"),
        eos_ids=list(dict.fromkeys(index for index in ends if index is not None)),
        special_ids=frozenset(index for index, kind in enumerate(types) if kind in special),
        prefix_ids=_required(ids, "bos_token_id", path) if adds_bos else [],
        suffix_ids=_required(ids, "eos_token_id", path) if adds_eos else [],
        adds_space=adds_space,
        templates=_templates(facts),
        named_tokens={name: tokens[ids[key]] for name, key in _NAMED_IDS.items() if key in ids},
    )


def _byte_level(
    facts: dict[str, Any], tokens: list[str], types: Sequence[int], path: Path
) -> tuple[Backend, bool]:
    pre = facts.get("tokenizer.ggml.pre")
    split = split_named("default" if pre is None else pre, path)
    if pre is None or pre == "default":
        logger.warning(
            "%s: tokenizer.ggml.pre is %s: words are cut by GPT-2's rule. If the model was trained "
            "with another, it gets ids it never saw and answers worse: convert it again with a "
            "current converter, or use --tokenizer with its tokenizer.json",
            path,
            "missing" if pre is None else repr(pre),
        )
    merges = facts.get("tokenizer.ggml.merges")
    if merges is None:
        raise ConfigError(
            f"{path}: tokenizer.ggml.merges is missing, without which a gpt2 vocabulary cannot "
            "tokenize; convert the model again, or use --tokenizer with its tokenizer.json"
        )
    # The first character may itself be a space in old files, so the separator comes after it.
    cuts = [(merge, merge.find(" ", 1)) for merge in merges]
    try:
        model = models.BPE(
            vocab=index_tokens(tokens, path),
            merges=[(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts],
            ignore_merges=split.whole_words,
        )
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend = Backend(model)
    backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added_tokens(tokens, types))
    return backend, split.adds_bos


def _named_ids(facts: dict[str, Any], num_tokens: int, path: Path) -> dict[str, int]:
    keys = [*_NAMED_IDS.values(), "eot_token_id", "eom_token_id"]
    ids = {key: facts.get(f"tokenizer.ggml.{key}") for key in keys}
    for key, value in ids.items():
        if value is not None and not 0 <= value < num_tokens:
            raise ConfigError(
                f"{path}: tokenizer.ggml.{key} is {value}, the vocabulary has {num_tokens:,} tokens"
            )
    return {key: int(value) for key, value in ids.items() if value is not None}


def _required(ids: dict[str, int], key: str, path: Path) -> list[int]:
    if key not in ids:
        flag = "add_bos_token" if key.startswith("bos") else "add_eos_token"
        raise ConfigError(
            f"{path}: tokenizer.ggml.{flag} holds, but tokenizer.ggml.{key} is missing"
        )
    return [ids[key]]


def _types(facts: dict[str, Any], num_tokens: int, ids: dict[str, int], path: Path) -> list[int]:
    found = facts.get("tokenizer.ggml.token_type")
    if found is not None:
        if len(found) != num_tokens:
            raise ConfigError(
                f"{path}: tokenizer.ggml.token_type has {len(found):,} entries, the vocabulary "
                f"{num_tokens:,}"
            )
        return [int(kind) for kind in found.tolist()]
    types = [int(PieceType.NORMAL)] * num_tokens
    for key, index in ids.items():
        types[index] = PieceType.UNKNOWN if key == "unknown_token_id" else PieceType.CONTROL
    return types


def _scores(facts: dict[str, Any], num_tokens: int, path: Path) -> list[float]:
    scores = facts.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != num_tokens:
        count = "missing" if scores is None else f"{len(scores):,} entries"
        raise ConfigError(
            f"{path}: tokenizer.ggml.scores: {count}; a llama vocabulary of {num_tokens:,} tokens "
            "needs one for each"
        )
    return [float(score) for score in scores.tolist()]


def _templates(facts: dict[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template`` is the default one, ``tokenizer.chat_template.NAME`` others."""
    found = {key: value for key, value in facts.items() if key.startswith(_TEMPLATE + ".")}
    named = {key[len(_TEMPLATE) + 1 :]: value for key, value in found.items()}
    if facts.get(_TEMPLATE):
        named["default"] = facts[_TEMPLATE]
    return {name: source for name, source in named.items() if isinstance(source, str)}
