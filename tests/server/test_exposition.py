"""What /metrics says: names, formats, cost, and that nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from octavo.config import EngineConfig
from octavo.engine.accounts import no_ends, no_tokens
from octavo.engine.messages import EngineStats
from octavo.server.histograms import PER_TOKEN_BUCKETS
from octavo.server.metrics import Metrics
from tests.fixtures.waiting import PATIENCE

OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
GAUGES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc"),
    *("vllm:gpu_cache_usage_perc", "octavo_kv_blocks", "octavo_startup_seconds"),
    "octavo_kv_internal_fragmentation_ratio",
)
COUNTERS = (
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"),
    *("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prompt_tokens_cached"),
    *("vllm:request_success", "octavo_cow_copies"),
    *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens",
)
FIRST_TOKEN = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
PER_TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
COUNTS = "1 2 5 10 20 50 100 200 500"  # the mock's length is 512
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": f".001 .0025 .005 {PER_TOKEN}",
    "vllm:time_per_output_token_seconds": f".001 .0025 .005 {PER_TOKEN}",
    "vllm:request_time_per_output_token_seconds": f".001 .0025 .005 {PER_TOKEN}",
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": COUNTS,
    "vllm:request_generation_tokens": COUNTS,
    "vllm:request_max_num_generation_tokens": COUNTS,
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:request_params_max_tokens": COUNTS,
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


def engine(index: int) -> SimpleNamespace:
    """A replica of a busy server, as ``Metrics`` sees it."""
    client = SimpleNamespace(num_running=9, num_waiting=2, num_waiting_tokens=77, step_age=0.0)
    return SimpleNamespace(
        index=index, client=client, num_admitted=11, ended=no_ends(), queue_tokens=no_tokens(),
        stats=EngineStats(1.0, blocks_used=7, blocks_cached=2, blocks_free=1), serves=True,
        info=None, restarts=SimpleNamespace(count=0),
    )  # fmt: skip


def metrics_of(num_engines: int, name: str = "toy") -> Metrics:
    client: Any = SimpleNamespace(
        replicas=[engine(i) for i in range(num_engines)], config=EngineConfig()
    )
    return Metrics(client, name)


def test_every_family_is_there_in_both_formats(server):
    server.complete("say:abc", n=2)
    plain = server.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_families(plain.text)}
    assert {name: families[name].type for name in (*GAUGES, *COUNTERS, *HISTOGRAMS)} == {
        **dict.fromkeys(GAUGES, "gauge"),
        **dict.fromkeys(COUNTERS, "counter"),
        **dict.fromkeys(HISTOGRAMS, "histogram"),
    }
    for name, bounds in HISTOGRAMS.items():
        found = [s.labels["le"] for s in families[name].samples if s.name == f"{name}_bucket"]
        assert found == [*(str(float(bound)) for bound in bounds.split()), "+Inf"], name
        counts = [s.value for s in families[name].samples if s.name == f"{name}_bucket"]
        assert counts == sorted(counts) and counts[-1] > 0, name
    for family in families.values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "mock" and sample.labels["engine"] == "0"
    (facts,) = families["vllm:cache_config_info"].samples
    assert facts.labels["block_size"] == "16" and facts.value == 1
    opened = server.client.get("/metrics", headers=OPENMETRICS)
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert {f.name for f in open_families(opened.text)} == {
        re.sub("^vllm:cache_config_info$", "vllm:cache_config", name) for name in families
    }


def test_names_of_models_are_escaped():
    name = 'a "model"\\ of\nmine'
    for accept, families in (("", text_families), (OPENMETRICS["accept"], open_families)):
        page, _ = metrics_of(1, name).page(accept)
        labels = [s.labels for f in families(page.decode()) for s in f.samples]
        assert {label["model_name"] for label in labels} == {name}


def test_a_scrape_takes_no_five_milliseconds():
    """Of the event loop; the engine is not asked. 0.6 ms for one engine alone on a core, 4 ms for
    eight."""
    for num_engines, most in ((1, 5e-3), (8, 40e-3)):
        metrics = metrics_of(num_engines)
        seconds = []
        for _ in range(30):
            began = time.perf_counter()
            metrics.page(OPENMETRICS["accept"])
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < most


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool: apt-get install prometheus")
def test_promtool_finds_nothing_but_vllms_own_names(server):
    page = server.client.get("/metrics").text
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    said = {line for line in (done.stdout + done.stderr).splitlines() if line}
    allowed = 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    colons = "metric names should not contain ':'"
    assert [s for s in said - {allowed} if not (s.startswith("vllm:") and s.endswith(colons))] == []


def samples(server) -> dict[str, float]:
    """Every name, summed over its labels."""
    found: dict[str, float] = {}
    for family in text_families(server.client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def check_sums(found: dict[str, float]) -> None:
    """Holds at any moment."""
    assert found["octavo_requests_admitted_total"] == (
        found["vllm:request_success_total"]
        + found["octavo_requests_rejected_total"]
        + found["octavo_requests_retried_total"]
        + found["vllm:num_requests_running"]
        + found["vllm:num_requests_waiting"]
    )
    assert found["octavo_prompt_tokens_admitted_total"] == (
        found["octavo_prompt_tokens_started_total"]
        + found["octavo_prompt_tokens_dropped_total"]
        + found["octavo_waiting_prompt_tokens"]
    )
    assert found["octavo_tokens_drawn_total"] >= found["vllm:generation_tokens_total"]


KINDS = {
    "stop": {"prompt": "say:abcdef"},
    "length": {"prompt": "endless", "max_tokens": 7},
    "stop string": {"prompt": "say:abcdefgh", "stop": ["de"]},
    "choices": {"prompt": ["say:ab", "say:cd"], "n": 2},
    "refused": {"prompt": "refuse?"},
    "failed": {"prompt": "fail?"},
    "timeout": {"prompt": "endless", "max_tokens": 400, "timeout": 0.05},
    "left": {"prompt": "endless", "max_tokens": 400, "stream": True},
    "invalid": {"prompt": "x", "max_tokens": -1},
}


async def _mix(url: str, kinds: list[str], look: Any) -> list[tuple[str, int, dict[str, Any]]]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        room = asyncio.Semaphore(20)  # the queue would refuse more

        async def ask(kind: str) -> tuple[str, int, dict[str, Any]]:
            async with room:
                if kind == "left":
                    async with client.stream("POST", "/v1/completions", json=KINDS[kind]) as answer:
                        await anext(answer.aiter_lines())
                        return kind, answer.status_code, {}
                answer = await client.post("/v1/completions", json=KINDS[kind])
                return kind, answer.status_code, answer.json()

        asked = [asyncio.create_task(ask(kind)) for kind in kinds]
        for _ in range(10):
            await asyncio.to_thread(look)
        return [await one for one in asked]


def ends(server) -> dict[str, float]:
    page = server.client.get("/metrics").text
    (family,) = [f for f in text_families(page) if f.name == "vllm:request_success"]
    return {s.labels["finished_reason"]: s.value for s in family.samples}


def test_nothing_is_lost_in_any_mix_of_ends(server):
    """Requests and tokens, during the mix and after it; also what clients were told."""
    kinds = [kind for kind in KINDS for _ in range(8)]
    random.Random(5).shuffle(kinds)
    before, ended_before = samples(server), ends(server)
    answers = asyncio.run(_mix(server.url, kinds, lambda: check_sums(samples(server))))
    server.wait_idle()
    check_sums(after := samples(server))
    found = {name: value - before.get(name, 0) for name, value in after.items()}
    ended = {reason: count - ended_before[reason] for reason, count in ends(server).items()}
    assert {(kind, status) for kind, status, _ in answers} == {
        *((kind, 200) for kind in ("stop", "length", "stop string", "choices", "left")),
        *(("refused", 400), ("failed", 500), ("timeout", 408), ("invalid", 400)),
    }
    assert ended == {"stop": 8 + 8 + 4 * 8, "length": 8, "abort": 8 + 8, "error": 8}
    assert found["octavo_requests_rejected_total"] == found["octavo_requests_timed_out_total"] == 8
    assert found["octavo_requests_refused_total"] == 8 + 8  # invalid, and by the engine
    usages = [answer["usage"] for _, status, answer in answers if status == 200 and answer]
    told = sum(usage["completion_tokens"] for usage in usages)
    assert told < found["vllm:generation_tokens_total"]  # those got some who left or were too late
    assert found["vllm:request_generation_tokens_sum"] == told


def test_tokens_of_answers_are_tokens_counted(server):
    before = samples(server)
    answers = [server.complete(f"say:{'x' * i}", n=2) for i in range(1, 6)]
    after = samples(server)
    told = sum(answer["usage"]["completion_tokens"] for answer in answers)
    asked = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    for name, count in (
        ("vllm:generation_tokens_total", told),
        ("octavo_tokens_drawn_total", told),
        ("vllm:prompt_tokens_total", asked),
        ("octavo_prompt_tokens_started_total", asked),
        ("vllm:request_generation_tokens_sum", told),
    ):
        assert after[name] - before[name] == count, name


def test_the_bounds_per_token_are_vllms_and_three_finer_ones():
    assert (0.001, 0.0025, 0.005, *map(float, PER_TOKEN.split())) == PER_TOKEN_BUCKETS
