"""Prompts and inputs as clients send them: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.server.state import ServerState
from octavo.types import InvalidRequest


def listed(given: Any, param: str) -> list[str] | list[list[int]]:
    """One input or many, as a list. Raises InvalidRequest for an empty list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{param} is an empty list", param)
    return [given] if isinstance(given[0], int) else list(given)


async def token_ids(
    state: ServerState,
    inputs: list[str] | list[list[int]],
    param: str,
    *,
    add_special_tokens: bool | None,
    truncated: bool,
    request: Request | None,
) -> list[list[int]]:
    """Token ids of each input. ``truncated``: texts of any length will do, as only a part of their
    ids is kept. Raises InvalidRequest."""
    texts = [text for text in inputs if isinstance(text, str)]
    if not texts:
        return [ids for ids in inputs if not isinstance(ids, str)]
    tokenizer = state.require_tokenizer(param)
    if not truncated:
        state.check_text_length(max(map(len, texts)), param)

    def encode() -> list[list[int]]:
        special = add_special_tokens is not False
        return [tokenizer.encode(text, add_special_tokens=special) for text in texts]

    return await state.encode(encode, sum(map(len, texts)), request)
