"""Errors as HTTP: one table from exception to status, type and code; one body shape (OpenAI's).

``code`` is a string or null: OpenAI's clients expect that.
"""

from __future__ import annotations

import difflib
import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.messages import Finished
from octavo.server.auth import SCOPES_OF
from octavo.types import EngineDead, InvalidRequest, OctavoError, QueueFull

logger = logging.getLogger("octavo")

LONGEST_MESSAGE = 2000  # characters
LONGEST_PATH = 64  # characters of an unknown path that are compared with known ones
# Routes of OpenAI's and vLLM's servers that are missed: the first part of the path after /v1.
LATER_ROUTES: dict[str, str] = {
    "responses": "the responses API is",
    "files": "files are",
    "batches": "batches over HTTP (`octavo run-batch` answers a file) are",
    "audio": "audio is",
    "images": "images are",
    "rerank": "reranking is",
    "score": "scoring is",
    "classify": "classification is",
    "pooling": "pooling (but /v1/embeddings) is",
}


class NotFound(OctavoError):
    """A model or route that does not exist (404)."""

    def __init__(self, message: str, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(OctavoError):
    """The request's body is above the limit (413)."""


class StepError(OctavoError):
    """The engine failed while it computed this request (500)."""


class TimedOut(OctavoError):
    """The request's own ``timeout`` passed, or its body did not come (408)."""


def failure_of(end: Finished) -> OctavoError:
    """The error of a request that ended with one: its own fault (400) or the engine's (500)."""
    if end.own_fault:
        return InvalidRequest(end.message)
    return StepError(end.message or "a step of the engine failed")


class ClientGone(Exception):
    """The client closed its connection: nobody reads an answer."""


def describe(error: Exception) -> tuple[int, dict[str, str | None]]:
    """HTTP status and the ``error`` object of an exception."""
    param = getattr(error, "param", None)
    if isinstance(error, InvalidRequest):
        return 400, _error(str(error), "invalid_request_error", param, error.code)
    if isinstance(error, NotFound):
        return 404, _error(str(error), "invalid_request_error", param, error.code)
    if isinstance(error, TimedOut):
        return 408, _error(str(error), "timeout_error", "timeout", "timeout")
    if isinstance(error, BodyTooLarge):
        return 413, _error(str(error), "invalid_request_error", None, "body_too_large")
    if isinstance(error, QueueFull):
        return 429, _error(str(error), "rate_limit_error", None, "queue_full")
    if isinstance(error, EngineDead):
        return 503, _error(str(error), "server_error", None, "engine_unavailable")
    if isinstance(error, StepError):
        return 500, _error(str(error), "server_error", None, "step_failed")
    return 500, _error("internal error, see the server's log", "server_error", None, "internal")


def error_body(error: Exception) -> bytes:
    return msgspec.json.encode({"error": describe(error)[1]})


def error_response(error: Exception) -> Response:
    status, _ = describe(error)
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    elif isinstance(error, TimedOut):
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it again at once
    elif isinstance(error, BodyTooLarge):
        headers["connection"] = "close"  # the rest of the body stays unread
    return Response(error_body(error), status, headers, "application/json")


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Starlette raises it again: it is logged with its trace, and the connection is closed."""
    response = error_response(error)
    response.headers["connection"] = "close"
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods. OPTIONS on a known route is answered with what it allows."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        message = f"{request.method} is not allowed on {request.url.path}"
        if allowed := headers.get("Allow"):
            message += f"; use {allowed}"
        body = _error(message, "invalid_request_error", None, "method_not_allowed")
    elif error.status_code == 404:
        message = _no_route(request.url.path)
        body = _error(message, "invalid_request_error", None, "not_found")
    else:
        body = _error(str(error.detail), "invalid_request_error", None, None)
    content = msgspec.json.encode({"error": body})
    return Response(content, error.status_code, headers, "application/json")


def _no_route(path: str) -> str:
    if feature := LATER_ROUTES.get(path.removeprefix("/v1").strip("/").partition("/")[0]):
        return f"{path}: {feature} not in this version; GET /openapi.json lists the routes"
    routes = [route for route in SCOPES_OF if "{" not in route]
    near = difflib.get_close_matches(path[:LONGEST_PATH], routes, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "GET /openapi.json lists the routes"
    return f"no route {path}; {hint}"


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, str | None]:
    param = param and _shortened(param)
    return {"message": _shortened(message), "type": kind, "param": param, "code": code}


def _shortened(text: str) -> str:
    """Messages quote what was sent, which may be megabytes."""
    text = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + " …"
    return text.encode("utf-8", "replace").decode()
