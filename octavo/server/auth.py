"""Who may do what: every route but the public ones needs a key, and a key with its scope.

``SCOPES_OF`` says for each route which scopes open it. ``create_app`` refuses to start with a route
that is not in it, so nobody adds a route without deciding who may use it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Match

from octavo.server.keys import ADMIN, INFER, METRICS, SCOPES, ApiKey, Keys
from octavo.server.page import PAGE_PATHS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC: frozenset[str] = frozenset()  # no key is needed
# Path of a route -> the scopes of which a key needs one.
SCOPES_OF: dict[str, frozenset[str]] = {
    **dict.fromkeys(("/health", "/health/live", "/health/ready", "/ping"), PUBLIC),
    # The chat page holds nothing: a browser sends no key when it opens an address, and what the
    # page then asks of the API needs a key like any other request.
    **dict.fromkeys(PAGE_PATHS, PUBLIC),
    **dict.fromkeys(
        (
            *("/v1/completions", "/v1/completions/render"),
            *("/v1/chat/completions", "/v1/chat/completions/render"),
            *("/v1/embeddings", "/v1/models", "/v1/models/{name:path}"),
            *("/tokenize", "/detokenize", "/tokenizer_info"),
        ),
        frozenset({INFER}),
    ),
    **dict.fromkeys(("/metrics", "/load"), frozenset({METRICS, ADMIN})),
    **dict.fromkeys(("/reset_prefix_cache", "/server_info"), frozenset({ADMIN})),
    **dict.fromkeys(("/version", "/openapi.json", "/docs", "/docs/oauth2-redirect"), SCOPES),
}


class KeyGuard:
    """ASGI middleware that answers 401 and 403 before a body is read or anything is queued.

    Leaves the key's name in ``scope["octavo.key"]`` (b"" where no key is needed) and its share in
    ``scope["octavo.weight"]``. A path without a route needs a key as well: only then is it a 404.

    Raises RuntimeError for a route that is not in ``SCOPES_OF``.
    """

    def __init__(
        self, app: App, keys: Keys, routes: Iterable[BaseRoute], root_path: str = ""
    ) -> None:
        self.app = app
        self._keys = keys
        self._root = root_path.rstrip("/")
        self._routes = list(routes)
        paths = [_path_of(route) for route in self._routes]
        if missing := sorted(set(paths) - SCOPES_OF.keys()):
            raise RuntimeError(f"routes without a scope in SCOPES_OF: {', '.join(missing)}")
        self._exact = {path: SCOPES_OF[path] for path in paths if "{" not in path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server sends the head alone
        scopes = self._scopes(scope)
        key: ApiKey | None = None
        if self._keys.needed and scopes != PUBLIC:
            key = self._keys.find(_sent(scope))
            if key is None:
                await _refuse(scope, send, 401, _NO_KEY)
                return
            if not scopes & key.scopes:
                await _refuse(scope, send, 403, _not_allowed(scopes))
                return
        scope["octavo.key"] = key.name.encode() if key else b""
        scope["octavo.weight"] = key.weight if key else 1.0
        await self.app(scope, receive, send)

    def _scopes(self, scope: Scope) -> frozenset[str]:
        """Of the route that the router will choose; all scopes where there is none."""
        if scope["type"] != "http":
            return SCOPES
        path = scope["path"]
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        if (found := self._exact.get(path)) is not None:
            return found
        for route in self._routes:
            if route.matches({**scope, "root_path": self._root})[0] is not Match.NONE:
                return SCOPES_OF[_path_of(route)]
        return SCOPES


def _path_of(route: BaseRoute) -> str:
    return str(getattr(route, "path", route))  # a route without a path is in no table


def _sent(scope: Scope) -> bytes:
    sent = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            sent = credentials.strip() if scheme.lower() == b"bearer" else b""
    return sent


_NO_KEY = {
    "message": "no valid API key: send the header `Authorization: Bearer KEY`",
    "type": "authentication_error",
    "param": None,
    "code": "invalid_api_key",
}


def _not_allowed(scopes: frozenset[str]) -> dict[str, str | None]:
    return {
        "message": f"this API key may not do that: it needs the scope {' or '.join(sorted(scopes))}"
        " (--api-key-file)",
        "type": "permission_error",
        "param": None,
        "code": "insufficient_scope",
    }


async def _refuse(scope: Scope, send: Send, status: int, error: dict[str, str | None]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
