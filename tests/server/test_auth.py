"""T43: every route and method is closed without a key; the public ones are exactly the stated."""

from __future__ import annotations

import hashlib
import socket

import pytest

from octavo.server.keys import Keys
from tests.fixtures.waiting import PATIENCE
from tests.server import mock_server

PUBLIC = {"/health", "/health/live", "/health/ready", "/ping"}
# The chat page's files hold nothing (tests/server/test_page.py); what lies beside them is closed.
UNKNOWN = [
    "/pages", "/pages/", "/pages/x.js", "/pages/index.html", "//v1/models",
    "/v1/models/", "/V1/MODELS", "/invocations", "/score", "/health/", "/docs",
    "/Health", "/healthx", "/ping/", "//health", "/v1/%2e%2e/health", "/static/x",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]


@pytest.fixture(scope="module")
def guarded():
    with mock_server.start(server={"api_key": ["secret", "other"]}) as server:
        yield server


def auth(key, scheme="Bearer"):
    return {"authorization": f"{scheme} {key}"}


def test_everything_but_health_is_closed(guarded):
    document = guarded.client.get("/openapi.json", headers=auth("secret")).json()
    paths = [*document["paths"], *UNKNOWN, "/openapi.json", "/docs/oauth2-redirect"]
    assert len(document["paths"]) >= 16
    wrong = [
        {}, auth("wrong"), auth("secret", "Basic"), auth("secret2"), {"authorization": "Bearer"},
        {"authorization": "secret"}, {"x-api-key": "secret"}, {"api-key": "secret"},
    ]  # fmt: skip
    for path in paths:
        for method in METHODS:
            if path in PUBLIC:
                assert guarded.client.request(method, path).status_code != 401
                continue
            for headers in wrong:
                answer = guarded.client.request(method, guarded.url + path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_empty_key_does_not_open_the_server_to_all():
    keys = Keys([""])
    assert keys.needed
    assert keys.find(b"") is None


def test_right_keys_open(guarded):
    for key in ("secret", "other"):
        for scheme in ("Bearer", "bearer"):
            answer = guarded.client.get("/v1/models", headers=auth(key, scheme))
            assert answer.status_code == 200
    assert guarded.client.get("//v1/models", headers=auth("secret")).status_code == 404


def test_refused_before_the_body_is_read(guarded):
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\n\r\n{"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_browsers_may_ask_what_is_allowed(guarded):
    headers = {"origin": "http://a", "access-control-request-method": "POST",
               "access-control-request-headers": "authorization"}  # fmt: skip
    answer = guarded.client.options("/v1/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "authorization" in answer.headers["access-control-allow-headers"]


def test_key_is_not_shown_in_server_info(guarded):
    text = guarded.client.get("/server_info", headers=auth("secret")).text
    assert '"secret"' not in text and "***" in text  # as a value: flags have such names, too


def test_salts_keep_tenants_apart():
    from octavo.config import CacheConfig, EngineConfig, ServerConfig
    from octavo.server.state import ServerState

    class Client:
        on_step = None

    def salts(scope, keys):
        config = EngineConfig(cache=CacheConfig(prefix_cache_scope=scope))
        state = ServerState(config, ServerConfig(api_key=keys), Client())
        names = [hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys]
        return [state.salt(name, own) for name in names for own in (None, "x", "y")]

    assert len(set(salts("auto", ["a", "b"]))) == 6
    assert len(set(salts("key", ["a"]))) == 3
    assert b"" not in salts("key", ["a"])
    shared = salts("server", ["a", "b"])
    assert shared[:3] == shared[3:]
    assert salts("auto", ["a"])[0] == b""
