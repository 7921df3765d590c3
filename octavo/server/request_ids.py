"""X-Request-Id: the client's or a random one, sent back on every response if so configured."""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from typing import Any

from octavo import logs
from octavo.server.auth import App, Receive, Scope, Send


class RequestIds:
    """ASGI middleware that leaves the request's id in ``scope["octavo.request_id"]``, and in
    ``scope["octavo.send"]`` a way past all further middlewares of ours for the parts of a body:
    none of them looks at these."""

    def __init__(self, app: App, echo: bool) -> None:
        self.app = app
        self.echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = next((v for name, v in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sent.decode("latin-1") or uuid.uuid4().hex
        scope["octavo.request_id"] = request_id
        scope["octavo.send"] = send
        logs.request_id.set(request_id)  # of all records of this request's task

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", request_id.encode("latin-1"))
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        await self.app(scope, receive, send_with_id if self.echo else send)
