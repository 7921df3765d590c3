"""deploy/: dashboards, rules and alerts name what the server exports, and promtool accepts them.
The commands of docs/operations.md, promtool's among them, are run as they are written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
PAGE = (ROOT / "docs/operations.md").read_text()
ANCHORS = {
    re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    for title in re.findall(r"^#+ (.+)$", PAGE, re.M)
}
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
RUNNABLE = ("octavo", "curl", "promtool")  # the others need what is not on this machine
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
NAME = re.compile(r"\b(?:vllm|octavo|instance|engine)[:_][\w:]+\b")
# Of servers that speculate.
ELSEWHERE = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "octavo_spec_decode_saved_seconds",
}
promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool: apt-get install prometheus"
)
# What the dashboards in vLLM's repository (examples/observability) ask for.
OF_VLLMS_DASHBOARDS = [
    *(
        f"vllm:{name}_{part}"
        for name in (
            *("e2e_request_latency_seconds", "time_to_first_token_seconds"),
            *("time_per_output_token_seconds", "inter_token_latency_seconds"),
            *("request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_max_num_generation_tokens", "request_time_per_output_token_seconds"),
        )
        for part in ("bucket", "count", "sum")
    ),
    *("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:num_preemptions_total", "vllm:cache_config_info"),
]


@pytest.fixture(scope="module")
def exported(shared_server) -> set[str]:
    shared_server.complete("say:abc", n=2)
    page = shared_server.client.get("/metrics").text
    families = text_string_to_metric_families(page)
    return {sample.name for family in families for sample in family.samples}


def queries(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def rules(name: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def run(*command: str | Path, **kwargs: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROMETHEUS, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_is_exported(path, exported):
    named = {name for query in queries(path) for name in NAME.findall(query)}
    assert named and named - exported - ELSEWHERE == set()


def test_rules_and_alerts_ask_for_what_is_exported_or_recorded(exported):
    recorded = rules("octavo.rules.yml")
    known = exported | {rule["record"] for rule in recorded}
    named = {
        name
        for rule in recorded + rules("octavo.alerts.yml")
        for name in NAME.findall(rule["expr"])
    }
    assert named - known == set()


def test_vllms_own_dashboards_find_their_metrics_and_their_label(shared_server, exported):
    assert set(OF_VLLMS_DASHBOARDS) - exported == set()
    page = shared_server.client.get("/metrics").text
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
    of_vllm = [s.labels for s in samples if s.name in OF_VLLMS_DASHBOARDS]
    assert all(labels["model_name"] == "mock" for labels in of_vllm)


def test_the_dashboards_are_what_their_script_writes():
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import dashboards as d; "
        "print(json.dumps({name: d.text(name) for name in d.SPECS}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "scripts"], capture_output=True, text=True, check=True
    )
    written = json.loads(done.stdout)
    assert written == {path.stem: path.read_text() for path in DASHBOARDS}, (
        "python scripts/dashboards.py"
    )
    for text in written.values():
        panels = json.loads(text)["panels"]
        assert all(panel["description"] for panel in panels)


def test_the_guides_advice_has_thresholds():
    panels = {
        panel["title"]: panel
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
    }
    steps = panels["KV cache usage"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps] == [None, 0.85, 0.95]
    assert "octavo_kv_blocks" in panels["KV blocks: used, cached, free"]["targets"][0]["expr"]
    assert "deriv(vllm:num_requests_waiting" in panels["Queue growth"]["targets"][0]["expr"]


def test_each_alert_has_a_section_of_the_operations_page():
    for alert in rules("octavo.alerts.yml"):
        where, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert where == "docs/operations.md" and anchor in ANCHORS, alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


@promtool
def test_promtool_accepts_the_dashboards_queries(tmp_path):
    found = [query for path in DASHBOARDS for query in queries(path)]
    written = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(found)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": written}]}))
    run("promtool", "check", "rules", path)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[0] in RUNNABLE])
def test_a_command_of_the_operations_page_works_as_written(command, shared_server):
    tool = command.split()[0]
    if tool != "octavo" and not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    here = f"{sys.executable} -m octavo.cli.main"
    words = command.replace("http://localhost:8000", shared_server.url)
    if tool == "octavo":
        words = words.replace("octavo", here, 1)
        if shared_server.url in words:
            words += " --seconds 0.2"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, cwd=ROOT)
    # The machine that runs this may have its troubles; a healthy server has none.
    allowed = {0, 1} if command == "octavo doctor" else {0}
    assert done.returncode in allowed, done.stdout + done.stderr


def test_files_and_sections_that_the_operations_page_names_are_there():
    for link in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", PAGE):
        assert not link or (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"(?:-f |`)((?:deploy|tests|scripts)/[\w./-]+)", PAGE):
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= ANCHORS
    assert {command.split()[0] for command in COMMANDS} == {
        *(*RUNNABLE, "kubectl", "MODEL=org/name"),
    }
