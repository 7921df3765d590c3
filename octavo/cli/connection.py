"""A blocking client of an OpenAI-compatible server, on the standard library's http.client."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from octavo.types import ConfigError, OctavoError

DEFAULT_URL = "http://127.0.0.1:8000"


class Connection:
    """``url`` is ``http(s)://host:port`` with or without ``/v1``, or ``unix:PATH``."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https", "unix"):
            raise ConfigError(f"--url {url}: must begin with http://, https:// or unix:")
        self._parts = parts
        self._prefix = "" if parts.scheme == "unix" else parts.path

    def get(self, path: str) -> dict[str, Any]:
        with self._request("GET", path, None) as response:
            return self._object(response.read())

    def status(self, path: str) -> int:
        """The HTTP status of a GET; ConfigError when nobody answers."""
        with self._open("GET", path, None) as response:
            return response.status

    def answer(self, path: str) -> tuple[int, str]:
        """Status and text of a GET, whatever they are; ConfigError when nobody answers."""
        with self._open("GET", path, None) as response:
            return response.status, response.read().decode(errors="replace")

    def text(self, path: str) -> str:
        """The text of a GET; OctavoError for a status that is not 200."""
        with self._request("GET", path, None) as response:
            return response.read().decode(errors="replace")

    def served_model(self) -> str:
        """The first model the server offers."""
        models = self.get("/v1/models").get("data")
        if not models:
            raise OctavoError(f"{self.url} serves no model")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON events of a server-sent stream; OctavoError for an error event."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            for data in self._events(response):
                if data == "[DONE]":
                    return
                event = self._object(data)
                if "error" in event:
                    raise OctavoError(f"{self.url}: {event['error'].get('message', data)}")
                yield event
        raise OctavoError(f"{self.url}: the stream broke off before its end")

    def _object(self, text: str | bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError):
            raise OctavoError(
                f"{self.url} does not answer as OpenAI's API does: {text[:100]!r}"
            ) from None

    def _events(self, response: http.client.HTTPResponse) -> Iterator[str]:
        try:
            for raw in response:
                if raw.startswith(b"data:"):
                    yield raw[5:].decode().strip()
        except (OSError, http.client.HTTPException) as error:
            raise OctavoError(f"{self.url}: the stream broke off ({error})") from error

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        response = self._open(method, path, body)
        if response.status != 200:
            raise OctavoError(f"{self.url}{path}: {response.status} {_reason(response)}")
        return response

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        try:
            connection = self._connect()
            payload = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, payload, self._headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"no server answers at {self.url} ({error}); start one with `octavo serve` or "
                "name another address"
            ) from error

    def _connect(self) -> http.client.HTTPConnection:
        if self._parts.scheme == "unix":
            return _UnixConnection(self.url.removeprefix("unix:"), self.timeout)
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.netloc, timeout=self.timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300] or response.reason
