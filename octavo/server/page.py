"""GET /: the chat page, a few static files that ask for nothing outside this server."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FILES = Path(__file__).with_name("pages")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a browser may do with the page: load and ask this origin alone, and run no inline script, so
# that even a text that slipped through as HTML could neither run nor send anything away.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for with its tag each time
}
_NAMES = sorted(p.name for p in FILES.iterdir() if p.suffix in TYPES)
PAGE_PATHS = frozenset({"/", *(f"/pages/{name}" for name in _NAMES if name != INDEX)})


def add_page(api: FastAPI, root_path: str) -> None:
    """The files are read once. ``root_path``: the prefix that a proxy strips; the page's own
    addresses begin with it."""
    for name in _NAMES:
        path = "/" if name == INDEX else f"/pages/{name}"
        content = (FILES / name).read_bytes()
        if name == INDEX:
            base = html.escape(root_path.rstrip("/") + "/")
            content = content.replace(b'<base href="/">', f'<base href="{base}">'.encode())
        route = _file_route(content, TYPES[Path(name).suffix])
        api.add_api_route(path, route, methods=["GET"], include_in_schema=False)


def _file_route(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "etag": tag}

    async def send(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, 200, headers, kind)

    return send
