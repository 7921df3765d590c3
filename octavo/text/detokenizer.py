"""Token ids to text as they come: a UTF-8 state machine over the tokens' bytes."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing sequence. A character comes out when its last byte has come in.

    ``at_start`` says that the sequence begins a text, so the space that sentencepiece puts before
    the first word is dropped; an answer continues its prompt and keeps it.
    """

    __slots__ = ("_at_start", "_bytes_of", "_rest")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, at_start: bool = False
    ) -> None:
        table = tokenizer.text_bytes_of if skip_special_tokens else tokenizer.bytes_of
        self._bytes_of = table.__getitem__
        self._rest = b""  # the beginning of a character
        self._at_start = at_start and tokenizer.vocabulary.adds_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that is complete now, and was not before."""
        data = b"".join(map(self._bytes_of, ids))
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decode(data, False)

    def finish(self) -> str:
        """U+FFFD when the sequence ended inside a character, else nothing."""
        return self._decode(b"", True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._rest + data
        text, consumed = utf_8_decode(data, "replace", final)
        self._rest = data[consumed:]
        return text
