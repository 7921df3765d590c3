"""Token ids to text as they come: a UTF-8 state machine over the tokens' bytes."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Mapping

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing sequence. A character comes out when its last byte has come in.

    ``at_start`` says that the sequence begins a text, so the space that sentencepiece puts before
    the first word is dropped; an answer continues its prompt and keeps it. ``marks``: ids that are
    shown as something else than their text, special or not.
    """

    __slots__ = ("_at_start", "_bytes_of", "_marks", "_rest")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        table = tokenizer.text_bytes_of if skip_special_tokens else tokenizer.bytes_of
        self._bytes_of = table.__getitem__
        self._marks = marks
        self._rest = b""  # the beginning of a character
        self._at_start = at_start and tokenizer.vocabulary.adds_space

    def push(self, ids: Collection[int]) -> str:
        """Text that is complete now, and was not before."""
        if self._marks and not self._marks.keys().isdisjoint(ids):
            return self._push_with_marks(ids, self._marks)
        data = b"".join(map(self._bytes_of, ids))
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decode(data, False)

    def _push_with_marks(self, ids: Collection[int], marks: Mapping[int, str]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for index in ids:
            mark = marks.get(index)
            if mark is None:
                run.append(index)
            else:
                parts += (self.push(run), self.finish(), mark)
                run.clear()
        return "".join((*parts, self.push(run)))

    def finish(self) -> str:
        """U+FFFD when the sequence ended inside a character, else nothing."""
        return self._decode(b"", True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._rest + data
        text, consumed = utf_8_decode(data, "replace", final)
        self._rest = data[consumed:]
        return text
