"""From the ids of one choice to the text its client sees, streamed or not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from octavo.text.detokenizer import Detokenizer
from octavo.text.stops import StopScanner
from octavo.text.tokenizer import Tokenizer
from octavo.types import InvalidRequest, SamplingParams


class ChoiceText:
    """Text of one choice while its tokens arrive.

    What ``push`` and ``finish`` return, joined, is ``text``, however the tokens were cut into
    pushes. Text that could be the beginning of a stop string is held back until it is decided.

    ``token_ids`` counts the tokens up to and including the one that completed a stop string;
    what the engine sent after it (it may be some steps ahead) is dropped.
    """

    __slots__ = (
        "_detokenizer",
        "_end_ids",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_pieces",
        "_scanner",
        "_shown_stops",
        "stop_string",
        "token_ids",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        eos_ids: Collection[int] | None = None,
        at_start: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """``tokenizer`` None, or ``params.detokenize`` false: ids are counted, no text is made.

        ``eos_ids``: the engine's (None: the tokenizer's). EOS and stop ids end a choice; their
        text is left out unless ``include_stop_str_in_output``. ``at_start``, ``marks``: see
        Detokenizer. A mark's text inside a stop string stands for the mark.
        Raises InvalidRequest for stop strings without text.
        """
        wants_text = tokenizer is not None and params.detokenize
        if params.stop and not wants_text:
            raise InvalidRequest("stop needs text: set detokenize, and serve a tokenizer", "stop")
        self.token_ids: list[int] = []
        self.stop_string: str | None = None
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens, at_start, marks)
            if tokenizer is not None and params.detokenize
            else None
        )
        self._shown_stops = {stop: stop for stop in params.stop}
        if marks and tokenizer is not None:
            for stop in params.stop:
                shown = stop
                for index, mark in marks.items():
                    shown = shown.replace(tokenizer.token_text(index), mark)
                self._shown_stops[shown] = stop
        self._scanner = StopScanner([*self._shown_stops]) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        if eos_ids is None:
            eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        ends = () if params.ignore_eos else eos_ids
        self._end_ids = frozenset() if self._include_stop else {*ends, *params.stop_token_ids}
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All that has come out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def hides_last(self) -> bool:
        """Whether the last token is one that ends a choice and is not in its text."""
        return bool(self.token_ids) and self.token_ids[-1] in self._end_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes in tokens; returns the text that is safe to send now."""
        if self.stop_string is not None:
            return ""
        if self._detokenizer is None:
            self.token_ids += token_ids
            return ""
        hidden = bool(token_ids) and token_ids[-1] in self._end_ids
        visible = token_ids[:-1] if hidden else token_ids
        if self._scanner is None:
            self.token_ids += token_ids
            return self._release(self._detokenizer.push(visible))
        out = [self._push_scanned(token, self._scanner, self._detokenizer) for token in visible]
        if hidden and self.stop_string is None:
            self.token_ids.append(token_ids[-1])
        return "".join(out)

    def finish(self) -> str:
        """The end of the choice: text held back, and U+FFFD for a character that never got whole.
        Calling it again returns nothing."""
        if self._detokenizer is None or self.stop_string is not None:
            return ""
        rest = self._held + self._detokenizer.finish()
        self._held = ""
        return self._release(rest)

    def _push_scanned(self, token: int, scanner: StopScanner, detokenizer: Detokenizer) -> str:
        if self.stop_string is not None:
            return ""
        self.token_ids.append(token)
        piece = detokenizer.push((token,))
        if not piece:
            return ""
        match = scanner.scan(piece, armed=len(self.token_ids) > self._min_tokens)
        if match is not None:
            self.stop_string = self._shown_stops[match.stop]
            text = self._held + piece[: match.end]
            self._held = ""
            return self._release(text if self._include_stop else text[: -len(match.stop)])
        text = self._held + piece
        safe = len(text) - scanner.num_held
        self._held = text[safe:]
        return self._release(text[:safe])

    def _release(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


def stop_string_in(
    tokenizer: Tokenizer, params: SamplingParams, token_ids: Sequence[int]
) -> str | None:
    """The stop string of ``params`` that the last of these tokens completes, as a ``ChoiceText``
    would find it. Reads no more of them than a stop string can span."""
    if len(token_ids) <= params.min_tokens:
        return None
    bytes_of = tokenizer.text_bytes_of if params.skip_special_tokens else tokenizer.bytes_of
    span = 4 * max(map(len, params.stop)) + 4  # bytes: UTF-8 has at most four a character
    begin = len(token_ids)
    while begin and span > 0:
        begin -= 1
        span -= len(bytes_of[token_ids[begin]])
    detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, False)
    scanner = StopScanner(params.stop)
    scanner.scan(detokenizer.push(token_ids[begin:-1]), armed=False)
    match = scanner.scan(detokenizer.push(token_ids[-1:]))
    return match.stop if match is not None else None
