"""The routes. Each reads one schema (``protocol``) and answers; the work is in the other files."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo import __version__
from octavo.server import tokens
from octavo.server.answers import in_time, respond
from octavo.server.auth import App, KeyGuard
from octavo.server.bodies import read_body
from octavo.server.chat import chat_ids
from octavo.server.completions import CompletionAnswer, prompts_of
from octavo.server.embeddings import embed
from octavo.server.errors import (
    ClientGone,
    describe,
    error_response,
    on_http_exception,
    on_unexpected_error,
)
from octavo.server.health import add_health_routes
from octavo.server.middleware import wrapped
from octavo.server.page import add_page
from octavo.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ForModel,
    NoFields,
    TokenizeRequest,
)
from octavo.server.request_ids import RequestIds
from octavo.server.sampling import chat_params, completion_params, renamed_for_chat
from octavo.server.state import ServerState
from octavo.server.tools.answer import reading
from octavo.server.tools.requests import tool_use
from octavo.types import InvalidRequest, OctavoError

M = TypeVar("M", bound=ForModel)

SCHEMAS: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/reset_prefix_cache": NoFields,
}


def create_app(state: ServerState) -> App:
    """The whole application: request ids, --middleware, CORS, keys, then routes. Raises
    ConfigError for a middleware that cannot be used."""
    api = FastAPI(
        title="octavo",
        version=__version__,
        root_path=state.server.root_path.rstrip("/"),
        redirect_slashes=False,
        redoc_url=None,
    )
    api.state.workers = state.workers
    api.add_exception_handler(HTTPException, on_http_exception)
    api.add_exception_handler(OctavoError, _counting_errors(state))
    api.add_exception_handler(ClientGone, _on_client_gone)
    api.add_exception_handler(Exception, on_unexpected_error)
    _add_generating_routes(api, state)
    _add_text_routes(api, state)
    add_health_routes(api, state)
    _add_facts_routes(api, state)
    add_page(api, state.server.root_path)
    api.openapi = lambda: _openapi(api)  # type: ignore[method-assign]
    server = state.server
    guarded: App = CORSMiddleware(
        KeyGuard(api, state.keys, api.routes, server.root_path),
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods,
        allow_headers=server.allowed_headers,
        expose_headers=["x-request-id", "retry-after"],
    )
    return RequestIds(wrapped(guarded, server.middleware), server.enable_request_id_headers)


def _add_generating_routes(api: FastAPI, state: ServerState) -> None:
    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continues a text (or token ids)."""
        return await _complete(state, request)

    @api.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        """What /v1/completions would give the model: nothing is generated."""
        return await _complete(state, request, render=True)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await _chat(state, request)

    @api.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        """What /v1/chat/completions would give the model: nothing is generated."""
        return await _chat(state, request, render=True)

    @api.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        """Vectors of texts (or token ids, or a conversation)."""
        arrival = time.monotonic()
        body, warnings = await _read(state, request, EmbeddingRequest)
        return await embed(state, request, body, arrival, warnings)


async def _complete(state: ServerState, request: Request, render: bool = False) -> Response:
    arrival = time.monotonic()
    body, warnings = await _read(state, request, CompletionRequest)
    params = completion_params(body, state.client.info.default_sampling)
    prompts = await in_time(state, body.timeout, arrival, prompts_of(state, body, request))
    return await respond(
        state, request, CompletionAnswer, body, params, prompts,
        arrival=arrival, prefix="cmpl", warnings=warnings,
        drop_output=bool(body.echo) and body.max_tokens == 0, render=render,
    )  # fmt: skip


async def _chat(state: ServerState, request: Request, render: bool = False) -> Response:
    arrival = time.monotonic()
    body, warnings = await _read(state, request, ChatRequest)
    state.client.check_queue(1)  # before the conversation is rendered
    try:
        use = await state.encode(lambda: tool_use(body), 0, request)
        params = chat_params(body, state.client.info.default_sampling)
        prompt = chat_ids(state, body, body.messages, body.add_special_tokens, request)
        ids = await in_time(state, body.timeout, arrival, prompt)
        answer_type, marks, params = await state.encode(
            lambda: reading(state, body, use, ids, params), 0, request
        )
        return await respond(
            state, request, answer_type, body, params, ([ids], [None]), marks=marks,
            arrival=arrival, prefix="chatcmpl", warnings=warnings, render=render,
        )  # fmt: skip
    except InvalidRequest as error:
        raise renamed_for_chat(error, body) from None


def _add_text_routes(api: FastAPI, state: ServerState) -> None:
    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation through the chat template."""
        body, _ = await _read(state, request, TokenizeRequest)
        return _json(await tokens.tokenize(state, body, request))

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, _ = await _read(state, request, DetokenizeRequest)
        return _json(await tokens.detokenize(state, body, request))

    @api.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Facts of the tokenizer and the chat template."""
        state.check_serving()
        return _json(tokens.tokenizer_info(state))

    @api.get("/v1/models")
    async def models() -> Response:
        """The names this server answers to."""
        state.check_serving()
        return _json({"object": "list", "data": [_card(state, name) for name in state.model_names]})

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        state.check_serving()
        return _json(_card(state, state.check_model(name)))


def _add_facts_routes(api: FastAPI, state: ServerState) -> None:
    @api.get("/version")
    async def version() -> Response:
        """The version of octavo."""
        return _json({"version": __version__})

    @api.get("/load")
    async def load() -> Response:
        """Requests being generated for, and the engines' sequences."""
        return _json(state.load())

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        page, content_type = state.metrics.page(request.headers.get("accept", ""))
        return Response(page, 200, {"content-type": content_type})

    @api.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Forgets cached prefixes; success is false while requests run."""
        await read_body(request, NoFields, optional=True)
        return _json({"success": await state.client.reset_prefix_cache()})

    @api.get("/server_info")
    async def server_info() -> Response:
        """The effective configuration; ``engine.reasons`` says why values not asked for are so."""
        server = dataclasses.asdict(state.server)
        engine = state.client.info if state.client.problem() is None else None
        seat = state.client.seat
        process = {"index": seat.index, "count": seat.count, "pid": os.getpid()}
        return _json(
            {
                "engine": engine,
                "replicas": [replica.facts() for replica in state.client.replicas],
                "engine_config": state.config,
                "server_config": server,
                "api_process": process,
            }
        )


async def _read(state: ServerState, request: Request, schema: type[M]) -> tuple[M, list[str]]:
    """The body of a request for the model, and warnings. Raises EngineDead while it cannot be
    served, NotFound for another model."""
    body, warnings = await read_body(request, schema, state.server.lenient)
    state.check_serving()
    state.check_model(body.model)
    return body, warnings


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), 200, None, "application/json")


def _card(state: ServerState, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.config.model.model,
        "parent": None,
        "max_model_len": state.client.info.max_model_len,
        "permission": [permission],
    }


def _counting_errors(state: ServerState) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(request: Request, error: Exception) -> Response:
        status, _ = describe(error)
        if request.method == "POST" and status in state.metrics.refused:
            state.metrics.refused[status] += 1
        return error_response(error)

    return handler


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _openapi(api: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the schemas of the bodies, which routes read themselves."""
    if api.openapi_schema:
        return api.openapi_schema
    document = get_openapi(title=api.title, version=api.version, routes=api.routes)
    _, schemas = models_json_schema(
        [(schema, "validation") for schema in SCHEMAS.values()],
        ref_template="#/components/schemas/{model}",
    )
    document.setdefault("components", {})["schemas"] = schemas["$defs"]
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own; ours are 400
    for path, schema in SCHEMAS.items():
        reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
        document["paths"][path]["post"]["requestBody"] = {
            "required": schema is not NoFields,
            "content": {"application/json": {"schema": reference}},
        }
    api.openapi_schema = document
    return document
