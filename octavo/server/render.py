"""POST /v1/chat/completions/render and /v1/completions/render: what the model would be given."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from octavo.engine.messages import AddRequest, num_ids, unpack_ids
from octavo.server.state import ServerState
from octavo.server.streaming import encode_json


async def rendered(
    state: ServerState, model: str, requests: list[AddRequest], warnings: list[str], several: bool
) -> Response:
    """The prepared requests as JSON, one or a list (``several``); nothing of them is computed."""

    def build() -> bytes:
        entries = [_entry(state, model, request) for request in requests]
        for entry in entries if warnings else ():
            entry["warnings"] = warnings
        return encode_json(entries if several else entries[0])

    size = sum(num_ids(request.prompt_ids) for request in requests)
    content = await state.encode(build, size)
    return Response(content, 200, None, "application/json")


def _entry(state: ServerState, model: str, request: AddRequest) -> dict[str, Any]:
    ids = unpack_ids(request.prompt_ids).tolist()
    tokenizer = state.tokenizer
    return {
        "request_id": request.request_id,
        "model": model,
        "prompt": None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False),
        "token_ids": ids,
        "count": len(ids),
        "max_model_len": state.client.info.max_model_len,
        "sampling_params": request.params,
    }
