"""What tests name with --middleware."""

from __future__ import annotations


class Stamp:
    """Puts a header on every response, and a comment before every part of an event stream."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        streamed = False

        async def stamped(message):
            nonlocal streamed
            if message["type"] == "http.response.start":
                streamed = (b"content-type", b"text/event-stream; charset=utf-8") in [
                    (name.lower(), value) for name, value in message["headers"]
                ]
                message["headers"] = [*message["headers"], (b"x-stamp", b"1")]
            elif streamed and message.get("body"):
                message = {**message, "body": b": stamped\n\n" + message["body"]}
            await send(message)

        await self.app(scope, receive, stamped)


async def teapot(request, call_next):
    """Answers one path itself."""
    if request.url.path == "/teapot":
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("short and stout", 418)
    response = await call_next(request)
    response.headers["x-tea"] = "yes"
    return response


NOTHING = 3


class Broken:
    def __init__(self, app):
        raise RuntimeError("no such luck")
