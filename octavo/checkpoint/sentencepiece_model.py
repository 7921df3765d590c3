"""Sentencepiece's ``tokenizer.model``: a protocol buffer, read without the sentencepiece package.

Fields of ModelProto (sentencepiece_model.proto): 1 pieces {1 piece, 2 score, 3 type},
2 trainer_spec {3 model_type}, 3 normalizer_spec {2 precompiled_charsmap, 3 add_dummy_prefix,
4 remove_extra_whitespaces}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from octavo.types import ConfigError

_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Field = tuple[int, int | bytes]


class PieceType(IntEnum):
    """Of tokenizer.model's pieces (a piece that states none is NORMAL), and of a GGUF file's
    ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class SentencepieceModel:
    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    charsmap: bytes = b""
    add_space_prefix: bool = True
    collapse_spaces: bool = True
    is_unigram: bool = False  # else BPE


def read_sentencepiece_model(path: Path) -> SentencepieceModel:
    """Raises ConfigError when it is broken, or neither a BPE nor a unigram model."""
    model = SentencepieceModel()
    kind = _UNIGRAM
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                model.tokens.append(_raw(piece.get(1, b"")).decode())
                model.scores.append(struct.unpack("<f", _raw(piece.get(2, bytes(4))))[0])
                model.types.append(int(piece.get(3, PieceType.NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                kind = int(dict(_fields(value)).get(3, kind))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
                model.charsmap = _raw(normalizer.get(2, b""))
                model.add_space_prefix = bool(normalizer.get(3, True))
                model.collapse_spaces = bool(normalizer.get(4, True))
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ConfigError(f"{path}: not a sentencepiece model, or truncated ({error})") from None
    if not model.tokens:
        raise ConfigError(f"{path}: not a sentencepiece model: it holds no pieces")
    if kind not in (_BPE, _UNIGRAM):
        raise ConfigError(
            f"{path}: a sentencepiece {_KINDS.get(kind, kind)} model; BPE and unigram are "
            "supported. Convert it to a tokenizer.json (transformers: AutoTokenizer … "
            "save_pretrained)"
        )
    model.is_unigram = kind == _UNIGRAM
    return model


def _raw(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"found the number {value} for a string")
    return value


def _fields(data: bytes) -> Iterator[Field]:
    """(field number, value): numbers as int, strings, messages and fixed widths as bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"field {tag >> 3} ends beyond byte {len(data)}")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"number without an end at byte {position}")
