"""Log-probabilities in the three shapes clients know: completions, chat and prompt_logprobs.

Minus infinity, which JSON lacks, is sent as -9999.0. Every token is decoded by itself: ``bytes``
are the token's own, and empty where the text hides it (special tokens, the token that stopped the
choice), so that joined they are the UTF-8 bytes of the text. Text cut off before a stop string is
the one exception: the stop's tokens are listed.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.engine.messages import TokenLogprobRow
from octavo.text.tokenizer import Tokenizer

FLOOR = -9999.0
_encode = msgspec.json.Encoder().encode


class TokenNames:
    """How tokens are written in a response: their text, or ``token_id:N`` if the client asked or
    the server has no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._hidden = tokenizer.special_ids if tokenizer and skip_special else frozenset()

    def name(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def shown_bytes(self, token: int) -> bytes:
        """What the token adds to the text."""
        if self._tokenizer is None or token in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token)

    def all_bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def decoded(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)


def floored(value: float) -> float:
    return value if value > FLOOR and math.isfinite(value) else FLOOR


def chat_entries(
    names: TokenNames, rows: Sequence[TokenLogprobRow], stopped: bool
) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``. ``stopped``: the last row's token ended the
    choice and is not in its text."""
    entries = []
    for i, row in enumerate(rows):
        entry = _chat_entry(names, row.ids[0], row.values[0])
        hide = stopped and i == len(rows) - 1
        entry["bytes"] = [] if hide else list(names.shown_bytes(row.ids[0]))
        best = zip(row.ids[1:], row.values[1:])
        entry["top_logprobs"] = [_chat_entry(names, t, v) for t, v in best if t >= 0]
        entries.append(entry)
    return entries


def _chat_entry(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    return {
        "token": names.name(token),
        "logprob": floored(value),
        "bytes": list(names.all_bytes(token)),
    }


class CompletionLogprobs:
    """Blocks of the completions shape for one choice; offsets go on from block to block."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def block(
        self,
        rows: Sequence[TokenLogprobRow | None],
        ids: Sequence[int] | None = None,
        hidden_first: bool = False,
        stopped: bool = False,
    ) -> dict[str, Any]:
        """``rows[i]`` None (a prompt's first token; its id is ``ids[i]``) gives null."""
        result: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for i, row in enumerate(rows):
            token = row.ids[0] if row is not None else (ids or [])[i]
            result["tokens"].append(self._names.name(token))
            result["text_offset"].append(self._offset)
            hide = (hidden_first and i == 0) or (stopped and i == len(rows) - 1)
            if not hide:
                self._offset += len(self._decoder.decode(self._names.shown_bytes(token)))
            if row is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            result["token_logprobs"].append(floored(row.values[0]))
            result["top_logprobs"].append(self._top(row))
        return result

    def _top(self, row: TokenLogprobRow) -> dict[str, float]:
        """The most likely tokens and the drawn one; of two with the same text the likelier."""
        top: dict[str, float] = {}
        for token, value in sorted(zip(row.ids, row.values), key=lambda pair: -pair[1]):
            if token >= 0:
                top.setdefault(self._names.name(token), floored(value))
        return top


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two blocks of one choice as one."""
    return {name: [*values, *second[name]] for name, values in first.items()}


def prompt_logprobs(
    names: TokenNames, num_tokens: int, rows: dict[int, TokenLogprobRow]
) -> list[msgspec.Raw | None]:
    """vLLM's shape: per position null or {token id: {logprob, rank, decoded_token}}. Encoded
    position by position: a million entries at once would keep other threads waiting."""
    result: list[msgspec.Raw | None] = [None]
    for position in range(1, num_tokens):
        row = rows[position]
        entry: dict[str, dict[str, Any]] = {}
        for rank, (token, value) in enumerate(zip(row.ids, row.values)):
            if token >= 0 and str(token) not in entry:
                entry[str(token)] = {
                    "logprob": floored(value),
                    "rank": rank or row.rank,
                    "decoded_token": names.decoded(token),
                }
        result.append(msgspec.Raw(_encode(entry)))
    return result
