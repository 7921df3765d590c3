"""The files of deploy/ agree with the server. tests/net/test_fronts.py runs them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from octavo.server.auth import PUBLIC, SCOPES_OF
from octavo.server.bodies import MAX_BODY_BYTES
from octavo.server.http import KEEP_ALIVE_SECONDS

DEPLOY = Path(__file__).parents[1] / "deploy"
OF_ONE_SERVER = {"/metrics", "/load", "/server_info", "/reset_prefix_cache"}


def test_nginx_has_the_servers_limits():
    text = (DEPLOY / "nginx/octavo.conf").read_text()
    (limit,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(limit) << 20 == MAX_BODY_BYTES
    idle = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert len(idle) == 2 and all(int(seconds) < KEEP_ALIVE_SECONDS for seconds in idle)
    (names,) = re.findall(r"location ~ \^/\(([^)]*)\)\$", text)
    assert {f"/{name}" for name in names.split("|")} == OF_ONE_SERVER
    first, second = (re.findall(r" server (\S+) ", part) for part in text.split("upstream ")[1:3])
    assert first == second and len(first) == 2


def test_envoy_has_the_servers_limits():
    resources = yaml.safe_load((DEPLOY / "envoy/octavo.yaml").read_text())["static_resources"]
    (listener,) = resources["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    buffer, router = manager["http_filters"]
    assert router["name"].endswith(".router")
    sizes = (buffer["typed_config"]["max_request_bytes"], host["request_body_buffer_limit"])
    assert sizes == (MAX_BODY_BYTES, MAX_BODY_BYTES)
    refused = host["routes"][0]["match"]["safe_regex"]["regex"]
    assert all(re.fullmatch(refused, path) for path in OF_ONE_SERVER)
    assert not re.fullmatch(refused, "/v1/completions")
    routed = {route["route"]["cluster"] for route in host["routes"][1:]}
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    assert routed == clusters.keys()
    needs_no_key = {path for path, scopes in SCOPES_OF.items() if scopes == PUBLIC}
    for cluster in clusters.values():
        (check,) = cluster["health_checks"]
        assert check["http_health_check"]["path"] in needs_no_key
        (options,) = cluster["typed_extension_protocol_options"].values()
        idle = options["common_http_protocol_options"]["idle_timeout"]
        assert int(idle.removesuffix("s")) < KEEP_ALIVE_SECONDS
    first, second = (c["load_assignment"]["endpoints"] for c in clusters.values())
    assert first == second
