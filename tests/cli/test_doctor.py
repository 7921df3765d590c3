"""Each fault is named, with its evidence, from scrapes that were recorded from real servers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from octavo.cli import host
from octavo.cli.diagnosis import Finding, Scrape, Stretch, diagnose
from octavo.cli.main import main

SCRAPES = Path(__file__).with_name("scrapes")
SECONDS = 5.0


def page(name: str) -> str:
    return (SCRAPES / f"{name}.txt").read_text()


def planted(text: str, **values: float) -> str:
    """The page with other values: of families by their names, the colon written ``__``; a name may
    end in ``__LABEL__VALUE``."""
    for key, value in values.items():
        name, *label = key.replace("vllm__", "vllm:").split("__")
        inner = rf'[^}}]*{label[0]}="{label[1]}"[^}}]*' if label else r"[^}]*"
        text, count = re.subn(rf"^({name}\{{{inner}\}}) \S+$", rf"\1 {value}", text, flags=re.M)
        assert count, key
    return text


def findings(before: str, after: str) -> list[Finding]:
    return diagnose(Stretch([Scrape(before, 0.0), Scrape(after, SECONDS)]))


def names(before: str, after: str) -> list[str]:
    return [finding.name for finding in findings(before, after)]


HEALTHY = page("healthy-before"), page("healthy-after")


def test_a_healthy_server_has_no_findings():
    assert findings(*HEALTHY) == []


def test_a_server_whose_cache_was_too_small_is_told_so():
    """Recorded with 244 blocks and 70 clients."""
    found = {f.name: f for f in findings(page("saturated-before"), page("saturated-after"))}
    assert {"cache saturated", "preemption thrash"} <= found.keys()
    (share,) = re.findall(r"\((\d+)% used\)", found["cache saturated"].evidence)
    assert int(share) > 90
    assert "--max-model-len" in found["cache saturated"].checklist
    assert "--max-num-seqs" in found["preemption thrash"].fix


@pytest.mark.parametrize(
    ("name", "before", "after", "evidence"),
    [
        ("engine down", {}, {"octavo_engine_up": 0}, "engine 0"),
        ("engine restarts", {}, {"octavo_engine_restarts_total": 2}, "2"),
        ("step hangs", {}, {"octavo_step_age_seconds": 17.5}, "17.5"),
        (
            "requests fail",
            {"vllm__request_success_total__finished_reason__error": 0},
            {"vllm__request_success_total__finished_reason__error": 7},
            "7 of ",
        ),
        (
            "queue grows",
            {"vllm__num_requests_waiting": 4},
            {"vllm__num_requests_waiting": 19},
            "4 → 19 in 5 s",
        ),
        (
            "requests refused",
            {"octavo_requests_refused_total__status__429": 0},
            {"octavo_requests_refused_total__status__429": 60},
            "60 × 429",
        ),
        (
            "speculation loses",
            {},
            {
                "vllm__spec_decode_num_draft_tokens_total": 1000,
                "vllm__spec_decode_num_accepted_tokens_total": 120,
            },
            "120 of 1000 draft tokens accepted (12%)",
        ),
        (
            "low prefix hits",
            {"vllm__prefix_cache_queries_total": 0, "vllm__prefix_cache_hits_total": 0},
            {"vllm__prefix_cache_queries_total": 90_000, "vllm__prefix_cache_hits_total": 900},
            "900 of 90000 prompt tokens found (1.0%)",
        ),
        (
            "host-bound",
            {
                "octavo_step_seconds_count__part__total": 0,
                "octavo_step_seconds_sum__part__total": 0,
                "octavo_step_seconds_sum__part__schedule": 0,
            },
            {
                "octavo_step_seconds_count__part__total": 1000,
                "octavo_step_seconds_sum__part__total": 4.0,
                "octavo_step_seconds_sum__part__schedule": 3.0,
            },
            "3.00 ms of a step's 4.00 ms (75%)",
        ),
    ],
)
def test_a_planted_fault_is_named_alone(name, before, after, evidence):
    (found,) = findings(planted(HEALTHY[0], **before), planted(HEALTHY[1], **after))
    assert found.name == name and evidence in found.evidence and found.fix


def test_speculation_that_costs_time_loses_whatever_is_accepted():
    line = '{name}{{engine="0",model_name="r"}} {value}\n'
    more = line.format(name="octavo_spec_decode_saved_seconds", value=-1.5)
    counts = {
        "vllm__spec_decode_num_draft_tokens_total": 1000,
        "vllm__spec_decode_num_accepted_tokens_total": 800,
    }
    assert names(HEALTHY[0], planted(HEALTHY[1], **counts)) == []
    (found,) = findings(HEALTHY[0], planted(HEALTHY[1], **counts) + more)
    assert found.evidence.endswith("(80%); 1.5 s lost in 5 s")


def test_a_cache_of_prefixes_that_is_off_is_told():
    off = HEALTHY[1].replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    assert names(HEALTHY[0], off) == ["prefix cache off"]


def test_a_restart_between_two_looks_invents_nothing():
    fresh = planted(HEALTHY[0], vllm__num_preemptions_total=50, octavo_cow_copies_total=9)
    assert names(fresh, HEALTHY[1]) == []


@contextmanager
def serving(pages: list[str], health: tuple[int, str]) -> Iterator[str]:
    """A server that shows one page after the other, the last one again and again."""
    shown = iter(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = health if self.path == "/health" else (200, next(shown, pages[-1]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_command_says_what_it_sees_and_what_to_do(capsys):
    problem = '{"error": {"message": "the model is still loading: weights 40%, 3 s"}}'
    pages = [page("saturated-before"), page("saturated-after")]
    with serving(pages, (503, problem)) as url:
        assert main(["doctor", url, "--seconds", "0.1"]) == 1
        text = capsys.readouterr().out
        assert text.startswith("not healthy: the server takes no requests\n  seen   /health: 503, ")
        assert "weights 40%" in text and "cache saturated: " in text and "\n  guide  " in text
        assert main(["doctor", url, "--seconds", "0.1", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)[0]["name"] == "not healthy"
    with serving([HEALTHY[0]], (200, "")) as url:
        assert main(["doctor", url, "--seconds", "0.1"]) == 0
        assert capsys.readouterr().out == "nothing is wrong\n"
    assert main(["doctor", url]) == 2
    assert capsys.readouterr().err.startswith(f"octavo: no server answers at {url}")


def test_a_report_of_this_machine(capsys, monkeypatch):
    code = main(["doctor", "--json"])
    facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert {"torch", "GPUs", "CPU", "cores", "memory", "disk", "/dev/shm", "port 8000"} <= {*facts}
    assert code == int(any(fact["trouble"] for fact in facts.values()))
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(host, "available_cores", lambda: 1)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "memory: less than 2 GiB" in text and "cores: server and engine share one core" in text
