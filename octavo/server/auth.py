"""API keys: every route but the public health ones is closed, known or not, whatever its method."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from octavo.server.page import PAGE_PATHS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Health, for probes, and the chat page, which holds nothing: a browser sends no key when it opens
# an address, and what the page then asks the API for needs one as everything does.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", *PAGE_PATHS})


class KeyGuard:
    """ASGI middleware that answers 401 before a body is read or anything is queued.

    Keys are compared as digests, all of them each time, so that timing tells nothing. The digest
    of the key in use (its name) is left in ``scope["octavo.key"]``; it is b"" without keys.
    """

    def __init__(self, app: App, keys: Iterable[str], root_path: str = "") -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]
        prefix = root_path.rstrip("/")
        self.public = PUBLIC_PATHS | {prefix + path for path in PUBLIC_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        key = self._key(scope)
        if key is None and not (scope["type"] == "http" and scope["path"] in self.public):
            await _refuse(scope, send)
            return
        scope["octavo.key"] = key or b""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server sends the head alone
        await self.app(scope, receive, send)

    def _key(self, scope: Scope) -> bytes | None:
        """The name of the key that was sent: b"" if none is needed, None if it is wrong."""
        if not self.digests:
            return b""
        sent = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, credentials = value.partition(b" ")
                sent = credentials.strip() if scheme.lower() == b"bearer" else b""
        digest = _digest(sent)
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest if sent and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16, person=b"octavo-api-key").digest()


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = {
        "message": "no valid API key: send the header `Authorization: Bearer KEY`",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
