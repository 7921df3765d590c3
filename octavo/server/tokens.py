"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.server.chat import chat_ids, check_without_messages
from octavo.server.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.state import ServerState
from octavo.types import InvalidRequest

MOST_CHARACTERS = 4 << 20  # of a text that need not fit the model; two seconds of a thread


async def tokenize(state: ServerState, body: TokenizeRequest, request: Request) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send exactly one of prompt and messages", "prompt")
    tokenizer = state.require_tokenizer("prompt")
    if body.messages is not None:
        ids = await chat_ids(state, body, body.messages, body.add_special_tokens, request)
    else:
        check_without_messages(body)
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        if len(text) > MOST_CHARACTERS:
            state.check_text_length(len(text), "prompt")
        ids = await state.encode(
            lambda: tokenizer.encode(text, add_special_tokens=special), len(text), request
        )
    result: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.client.info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        result["token_strs"] = await state.encode(
            lambda: [tokenizer.token_text(index) for index in ids], len(ids), request
        )
    return result


async def detokenize(
    state: ServerState, body: DetokenizeRequest, request: Request
) -> dict[str, Any]:
    """Special tokens are shown unless ``skip_special_tokens``: what was sent comes back."""
    tokenizer = state.require_tokenizer("tokens")
    limit = state.client.info.vocab_size

    def decode() -> str:
        for token in body.tokens:
            if not 0 <= token < limit:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary (ids 0 to {limit - 1})", "tokens"
                )
        return tokenizer.decode(body.tokens, bool(body.skip_special_tokens))

    return {"prompt": await state.encode(decode, len(body.tokens), request)}


def tokenizer_info(state: ServerState) -> dict[str, Any]:
    tokenizer = state.require_tokenizer("tokenizer_info")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.vocabulary.named_tokens,  # bos_token, eos_token …
        "bos_token_id": tokenizer.bos_id,
        "eos_token_ids": tokenizer.eos_ids,
        "special_token_ids": sorted(tokenizer.special_ids),
        "adds_bos": tokenizer.adds_bos,
        "chat_template": None if state.template is None else state.template.source,
        "max_model_len": state.client.info.max_model_len,
    }
