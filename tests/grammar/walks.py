"""Random walks through grammars: what a model that knows nothing would write."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from octavo.grammar.compile import grammar_text
from octavo.grammar.compiled import Compiler
from octavo.grammar.grammars import Grammars
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import StructuredOutputsParams
from tests.fixtures import tokenizers

_SPECIALS, _TOKENS, _ = tokenizers.small_vocabulary()
BYTES = {name: byte for byte, name in enumerate(tokenizers.byte_alphabet())}
# R's: four special tokens, every byte, and merges of the commonest English letters. And some that
# JSON is made of, whose ends lie where its parts meet.
MORE = [b'{"', b'":', b'", "', b"}, {", b"]]", b"\n  ", b'"}', b": ", b"true", b"12", b"</", b">\n"]
TOKENS = [
    *(name.encode() for name in _SPECIALS),
    *(bytes(BYTES[char] for char in token) for token in _TOKENS),
    *MORE,
]
EOS = [1, 3]
VOCABULARY = Vocabulary(TOKENS, [0, 1, 2, 3], EOS)
SPECIAL = {name: index for index, name in enumerate(_SPECIALS)}


@cache
def grammars() -> Grammars:
    found = Grammars()
    found.set_vocabulary(VOCABULARY)
    found.build()
    return found


@cache
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


def text_of(params: StructuredOutputsParams) -> str:
    return grammar_text(params, SPECIAL)


def matcher(params: StructuredOutputsParams, **options: object) -> Matcher:
    after = {"after": params.after} if params.after else {}
    return grammars().matcher(text_of(params), **after, **options)  # type: ignore[arg-type]


def allowed(found: Matcher) -> list[int] | None:
    """The ids that may come next; None where the matcher is done."""
    mask = np.zeros(VOCABULARY.words, dtype=np.int32)
    if not found.fill(mask):
        return None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(found: Matcher, rng: random.Random, most: int = 400) -> bytes | None:
    """What came until the end; None if it took more than ``most`` tokens. The longer it gets, the
    likelier are the tokens that close things."""
    out = b""
    for step in range(most):
        ids = allowed(found)
        if ids is None:
            break
        closing = [i for i in ids if i in EOS or TOKENS[i][:1] in b'"}],']
        token = rng.choice(closing if closing and rng.random() < step / 60 else ids)
        found.consume(token)
        out += b"" if token in EOS else TOKENS[token]
    assert not found.failure, found.failure
    return out if found.ended else None
