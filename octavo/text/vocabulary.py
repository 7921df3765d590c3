"""What every tokenizer file is turned into, and how a token is spelled in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from tokenizers import Tokenizer as Backend


class Spelling(Enum):
    """How the vocabulary writes bytes in its tokens."""

    BYTE_LEVEL = "byte level"  # one printable character per byte (GPT-2's alphabet)
    SENTENCEPIECE = "sentencepiece"  # UTF-8, ▁ for a space
    SENTENCEPIECE_BYTES = "sentencepiece with bytes"  # as before, and <0x0A> for single bytes


class PrefixSpace(Enum):
    """Before which parts of a text a space is put that is not written there. Where ``backend`` does
    it by itself, NONE."""

    NONE = "none"
    FIRST = "first"  # the beginning, unless a special token is there
    EACH = "each"  # the beginning, and what follows a special token


@dataclass
class Vocabulary:
    """A tokenizer as its files describe it; ``Tokenizer`` gives it behaviour."""

    backend: Backend
    spelling: Spelling
    bos_id: int | None
    eos_ids: list[int]
    special_ids: frozenset[int]  # left out of text by skip_special_tokens
    prefix_ids: list[int]  # put before a text that asks for special tokens
    suffix_ids: list[int]
    adds_space: bool  # a text's first token carries a space that is not part of the text
    prefix_space: PrefixSpace = PrefixSpace.NONE
    templates: dict[str, str] = field(default_factory=dict)  # chat templates: name -> source
    named_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> its text


def _alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable Latin-1 stands for itself, the rest for
    the characters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    pairs = [(chr(byte), byte) for byte in own]
    return dict(pairs + [(chr(0x100 + rank), byte) for rank, byte in enumerate(others)])


BYTE_OF = _alphabet()
_TO_LATIN1 = str.maketrans({char: chr(byte) for char, byte in BYTE_OF.items()})
_OUTSIDE_ALPHABET = re.compile(f"[^{re.escape(''.join(BYTE_OF))}]")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelled_bytes(token: str, spelling: Spelling) -> bytes:
    """The bytes a normal (not an added) token stands for."""
    if spelling is Spelling.BYTE_LEVEL:
        if _OUTSIDE_ALPHABET.search(token):
            return token.encode()
        return token.translate(_TO_LATIN1).encode("latin-1")
    if spelling is Spelling.SENTENCEPIECE_BYTES:
        found = _BYTE_PIECE.fullmatch(token)
        if found:
            return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode()
