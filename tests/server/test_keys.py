"""Keys with scopes: from flags and files, reloaded, never shown."""

from __future__ import annotations

import hashlib
import json
import logging
import os

import pytest
from starlette.responses import Response

from octavo.config import EngineConfig, ServerConfig, child_environment
from octavo.server.app import create_app
from octavo.server.auth import SCOPES_OF, KeyGuard
from octavo.server.keys import SCOPES, Keys
from octavo.types import ConfigError
from tests.fixtures.waiting import until
from tests.server import mock_server

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
FILE = """\
# name key scopes
alice   alice-key    infer          weight=3
alice   alice-new    infer          # the next one
prom    scrape-key   metrics
root    root-key     infer,metrics,admin
hashed  sha256:{} admin
""".format(hashlib.sha256(b"hashed-key").hexdigest())
SECRETS = ["alice-key", "alice-new", "scrape-key", "root-key", "hashed-key"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


def replace_file(path, text):
    """As editors do it, and with another time."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    os.replace(new, path)


def test_every_route_is_open_to_the_scopes_of_the_table_and_no_other(key_file):
    with mock_server.start(server={"api_key_file": str(key_file)}) as server:
        paths = server.client.get("/openapi.json", headers=bearer("root-key")).json()["paths"]
        allowed = {"alice-key": {"infer"}, "scrape-key": {"metrics"}, "hashed-key": {"admin"}}
        for path in [*paths, "/docs", "/openapi.json", "/docs/oauth2-redirect"]:
            url, scopes = (
                path.replace("{name}", "mock"),
                SCOPES_OF[path.replace("}", ":path}") if "{" in path else path],
            )
            for method in METHODS:
                answer = server.client.request(method, url)
                assert answer.status_code == 401 or not scopes, (method, path)
                for key, held in allowed.items():
                    status = server.client.request(method, url, headers=bearer(key)).status_code
                    refused = bool(scopes) and not scopes & held
                    assert (status == 403) == refused, (method, path, key, status)
        answer = server.client.get("/metrics", headers=bearer("alice-key"))
        assert answer.json()["error"]["code"] == "insufficient_scope"
        assert "admin or metrics" in answer.json()["error"]["message"]
        for path in ("/nowhere", "//metrics", "/METRICS", "/metrics/"):
            whole = server.url + path  # "//metrics" alone would be another host's address
            assert server.client.get(whole, headers=bearer("alice-key")).status_code == 404
        shown = server.client.get("/server_info", headers=bearer("root-key")).text + server.log
        assert not [secret for secret in SECRETS if secret in shown]


class _Client:
    on_step = None


def test_a_new_route_without_a_scope_is_refused_when_the_server_starts(monkeypatch):
    from octavo.server import app as module

    def with_one_more(api, state):
        api.get("/brand/new")(lambda: Response())

    monkeypatch.setattr(module, "add_health_routes", with_one_more)
    state = module.ServerState(EngineConfig(), ServerConfig(), _Client())
    with pytest.raises(RuntimeError, match="/brand/new"):
        create_app(state)


def test_scopes_are_those_of_the_route_behind_a_root_path():
    guard = KeyGuard(None, Keys(), create_routes(), "/proxy/")

    def scopes(path):
        return guard._scopes({"type": "http", "method": "GET", "path": path})

    assert scopes("/proxy/metrics") == scopes("/metrics") == {"metrics", "admin"}
    assert scopes("/proxy/v1/models/a/b") == scopes("/v1/models/a") == {"infer"}
    assert scopes("/proxy/health") == set()
    assert scopes("/proxy/proxy/health") == scopes("/nowhere") == SCOPES


def create_routes():
    from octavo.server.app import ServerState

    app = create_app(ServerState(EngineConfig(), ServerConfig(), _Client()))
    while not hasattr(app, "routes"):
        app = app.app
    return app.routes


def test_a_changed_file_counts_within_seconds_and_a_broken_one_changes_nothing(key_file):
    with mock_server.start(server={"api_key_file": str(key_file)}) as server:

        def status(key):
            return server.client.get("/v1/models", headers=bearer(key)).status_code

        def wait(condition):
            until(condition, lambda: server.log)

        assert (status("alice-key"), status("bob-key")) == (200, 401)
        for broken in ("alice alice-key everything\n", "", "alice\n"):
            count = server.log.count("stay as they were") + 1
            replace_file(key_file, broken)
            wait(lambda count=count: server.log.count("stay as they were") == count)
            assert (status("alice-key"), status("bob-key")) == (200, 401)
        replace_file(key_file, "bob bob-key infer\n")
        wait(lambda: status("bob-key") == 200)
        assert status("alice-key") == 401
        key_file.unlink()
        wait(lambda: "cannot be read" in server.log)
        assert status("bob-key") == 200
        assert "bob-key" not in server.log


@pytest.mark.parametrize(
    "line, says",
    [
        ("alice secret-1", "has 2 words"),
        ("alice secret-1 infer weight=1 more", "has 5 words"),
        ("al/ice secret-1 infer", "a name is"),
        ("alice secret-1 infer,root", "unknown scopes 'root'"),
        ("alice secret-1 ,", "unknown scopes ''"),
        ("alice sha256:secret-1 infer", "64 hexadecimal"),
        ("alice secret-1 infer weight=0", "weight=W"),
        ("alice secret-1 infer weight=nan", "weight=W"),
        ("alice secret-1 infer secret-1", "weight=W"),
        ("alice secret-1 infer\nbob secret-1 infer", "line 2: the key is that of line 1"),
        ("# nothing", "holds no key"),
    ],
)
def test_a_bad_file_is_refused_by_line_without_showing_a_key(tmp_path, line, says):
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ConfigError) as refusal:
        Keys([], str(path))
    assert says in str(refusal.value)
    assert "secret-1" not in str(refusal.value)


def test_what_is_no_plain_file_of_a_sensible_size_is_refused_at_once(tmp_path):
    """Read by the event loop: a pipe would stop the server, a device fill its memory."""
    path = tmp_path / "keys"
    handles = os.listdir("/proc/self/fd")

    def refused(says):
        with pytest.raises(ConfigError, match=says):
            Keys(file=str(path))

    os.mkfifo(path)
    refused("not a plain file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused("not a plain file")
    path.unlink()
    path.mkdir()
    refused("Is a directory")
    path.rmdir()
    path.write_text("# comment\n" * 200_000)
    refused("longer than 1,048,576 bytes")
    assert len(os.listdir("/proc/self/fd")) == len(handles)


def test_a_file_that_all_can_read_is_warned_about(key_file, caplog):
    with caplog.at_level(logging.WARNING, "octavo"):
        Keys([], str(key_file))
        assert not caplog.records
        key_file.chmod(0o644)
        Keys([], str(key_file))
    assert "chmod 600" in caplog.text


def test_keys_of_one_name_are_one_tenant_and_weights_are_read(key_file):
    keys = Keys([], str(key_file))
    old, new = keys.find(b"alice-key"), keys.find(b"alice-new")
    assert old.name == new.name == "alice"
    assert (old.weight, new.weight) == (3.0, 1.0)
    assert keys.find(b"hashed-key").scopes == {"admin"}
    assert keys.find(b"alice-key ") is None


def test_the_engine_is_told_whose_a_request_is_and_what_its_share_is(key_file):
    with mock_server.start(server={"api_key_file": str(key_file)}) as server:
        for body in ({}, {"use_beam_search": True, "n": 1}):
            answer = server.client.post(
                "/v1/completions",
                json={"prompt": "tenant?", "max_tokens": 9, **body},
                headers=bearer("alice-key"),
            )
            assert answer.status_code == 200, answer.text
            if not body:
                assert answer.json()["choices"][0]["text"] == "alice 3.0"


def test_flags_may_limit_a_key():
    keys = Keys(["plain", "some=infer", "two=metrics+admin", "base64==", "odd=word", "=infer"])
    assert keys.find(b"plain").scopes == keys.find(b"base64==").scopes == SCOPES
    assert keys.find(b"some").scopes == {"infer"}
    assert keys.find(b"two").scopes == {"metrics", "admin"}
    assert keys.find(b"odd=word").scopes == keys.find(b"=infer").scopes == SCOPES
    assert keys.find(b"some=infer") is keys.find(b"") is None


def test_no_key_is_kept_as_text(key_file):
    keys = Keys(["from-flag"], str(key_file))
    kept = repr(vars(keys)) + repr(list(keys._by_digest.items()))
    assert not [secret for secret in [*SECRETS, "from-flag"] if secret in kept]
    digest = hashlib.sha256(b"from-flag").digest()
    assert digest not in keys._by_digest, "looked up under a secret of this process"


def test_the_engine_process_gets_no_keys(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "secret" not in json.dumps(child_environment(1))
