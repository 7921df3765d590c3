"""The files of deploy/ agree with the server. tests/net/test_fronts.py runs the load balancers',
tests/server/test_monitoring.py those of Prometheus and Grafana."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.cli.arguments import parse
from octavo.cli.serve import COMMAND
from octavo.config import EngineConfig, ServerConfig
from octavo.server.auth import PUBLIC, SCOPES_OF
from octavo.server.bodies import MAX_BODY_BYTES
from octavo.server.http import KEEP_ALIVE_SECONDS

DEPLOY = Path(__file__).parents[1] / "deploy"
OF_ONE_SERVER = {"/metrics", "/load", "/server_info", "/reset_prefix_cache"}


def built(words: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """What ``octavo serve`` makes of these words."""
    arguments = parse(COMMAND, words)
    return arguments.build(EngineConfig), arguments.build(ServerConfig)


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


def test_kubernetes_waits_for_the_drain_and_asks_the_right_routes():
    parts = yaml.safe_load_all((DEPLOY / "kubernetes/octavo.yaml").read_text())
    found = {part["kind"]: part for part in parts}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _, server = built(["MODEL", *container["args"][1:]])
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + server.drain_timeout + 5
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {
        "startup": "/health", "liveness": "/health/live", "readiness": "/health/ready",
    }  # fmt: skip
    assert all(SCOPES_OF[path] == PUBLIC for path in paths.values())
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    adapter = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    assert rule["seriesQuery"].startswith("vllm:num_requests_waiting{")
    assert found["Service"]["spec"]["selector"] == {"app": "octavo"}


def test_compose_has_the_files_and_the_patience():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services.keys() == {"octavo", "prometheus", "grafana"}
    drain = ServerConfig().drain_timeout
    assert int(services["octavo"]["stop_grace_period"].removesuffix("s")) >= drain + 5
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_dir(), volume
    (target,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())[
        "scrape_configs"
    ][0]["static_configs"][0]["targets"]
    assert target == "octavo:8000"
    build = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", build, re.M):
        assert all((DEPLOY.parent / name).exists() for name in line.split()), line
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", build, re.M)
    _, server = built(["MODEL", *json.loads(entry)[2:]])
    assert (server.host, server.port) == ("0.0.0.0", 8000)


def test_systemd_waits_for_the_drain_and_does_not_repeat_mistakes(tmp_path):
    text = (DEPLOY / "systemd/octavo.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    assert int(settings["TimeoutStopSec"]) >= ServerConfig().drain_timeout + 5
    assert settings["KillMode"] == "mixed"
    assert settings["RestartPreventExitStatus"] == "2"
    words = settings["ExecStart"].split()
    assert words[1:4] == ["serve", "--config", "/etc/octavo/config.yaml"]
    config = tmp_path / "config.yaml"
    config.write_text("model: org/name\ndrain-timeout: 20\n")
    engine, server = built(["--config", str(config), *words[4:]])
    assert (engine.model.model, server.drain_timeout, server.log_format) == ("org/name", 20, "json")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze: systemd")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "systemd/octavo.service").read_text()
    unit = tmp_path / "octavo.service"
    unit.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
