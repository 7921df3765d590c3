"""Writes deploy/grafana/dashboards: ``python scripts/dashboards.py``.

A dashboard is a list of rows of panels; a panel is a title, a unit, queries, what it tells, and the
values from which it is yellow and red. All read what ``octavo serve`` exports itself, so they
work without the recording rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards"
# What every query is restricted to: the dashboard's variables.
CHOSEN = 'model_name=~"$model_name",engine=~"$engine",instance=~"$instance"'
SERVER = 'model_name=~"$model_name",instance=~"$instance"'
RATE = "[$__rate_interval]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ROW_HEIGHT, COLUMNS = 8, 24


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name of it
    queries: dict[str, str]  # legend -> PromQL
    tells: str
    warn: float | None = None
    bad: float | None = None
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None  # the end of the axis


def rate(name: str, labels: str = CHOSEN, more: str = "") -> str:
    """Per second, over all that is chosen."""
    return f"sum(rate({name}{{{labels}{more}}}{RATE}))"


def ratio(part: str, whole: str) -> str:
    """0 where nothing happened."""
    return f"{rate(part)} / clamp_min({rate(whole)}, 1e-9)"


def quantiles(name: str, by: str = "") -> dict[str, str]:
    legend = f" {{{{{by}}}}}" if by else ""
    group = f"le, {by}" if by else "le"
    return {
        f"p{round(100 * q)}{legend}": f"histogram_quantile({q}, "
        f"sum by ({group}) (rate({name}_bucket{{{CHOSEN}}}{RATE})))"
        for q in ((0.5, 0.95, 0.99) if not by else (0.95,))
    }


def mean(name: str, more: str = "") -> str:
    count = rate(f"{name}_count", CHOSEN, more)
    return f"{rate(f'{name}_sum', CHOSEN, more)} / clamp_min({count}, 1e-9)"


def total(name: str, more: str = "", by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ' '}({name}{{{CHOSEN}{more}}})".replace("sum (", "sum(")


USAGE = Panel(
    "KV cache usage", "percentunit",
    {"mean": f"avg(vllm:gpu_cache_usage_perc{{{CHOSEN}}})",
     "fullest": f"max(vllm:gpu_cache_usage_perc{{{CHOSEN}}})"},
    "gpu_cache_usage_perc: blocks that running sequences hold. Near 1 the next ones wait or are "
    "preempted: add memory or replicas, or let in less (--max-num-seqs, --max-num-queued-reqs). "
    "Cached blocks are not in it: they are given up at once when they are needed.",
    0.85, 0.95, most=1,
)  # fmt: skip
BLOCKS = Panel(
    "KV blocks: used, cached, free", "short",
    {"{{state}}": total("octavo_kv_blocks", by="state")},
    "used: held by running sequences. cached: prefixes that nobody uses now, given up when blocks "
    "are needed. free: nothing in them. Nearly all used is a full cache; much cached a warm one.",
    stacked=True,
)  # fmt: skip
QUEUE = Panel(
    "Queue", "short",
    {"waiting": total("vllm:num_requests_waiting"), "running": total("vllm:num_requests_running"),
     "places": total("octavo_max_num_seqs")},
    "Sequences. A queue that grows while running is below the places waits for KV blocks; one that "
    "grows at the places waits for them: --max-num-seqs, or more replicas.",
)  # fmt: skip
QUEUE_GROWTH = Panel(
    "Queue growth", "short",
    {"sequences per minute": f"60 * sum(deriv(vllm:num_requests_waiting{{{CHOSEN}}}[5m]))",
     "prompt tokens per minute": f"60 * sum(deriv(octavo_waiting_prompt_tokens{{{CHOSEN}}}[5m]))"},
    "Above zero for minutes: more comes than is served.", 1, 10,
)  # fmt: skip
FIRST = Panel(
    "Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"),
    "Arrival to first token, queueing included.", 2, 10,
)  # fmt: skip
GAP = Panel(
    "Time per output token", "s", quantiles("vllm:time_per_output_token_seconds"),
    "Between a sequence's tokens (inter_token_latency_seconds is the same).", 0.1, 0.25,
)  # fmt: skip
WHOLE = Panel(
    "End to end", "s", quantiles("vllm:e2e_request_latency_seconds"), "Arrival to last token.",
)  # fmt: skip
TOKENS = Panel(
    "Tokens per second", "short",
    {"prompt": rate("vllm:prompt_tokens_total"),
     "of these cached": rate("vllm:prompt_tokens_cached_total"),
     "returned": rate("vllm:generation_tokens_total"),
     "drawn": rate("octavo_tokens_drawn_total")},
    "Drawn above returned: clients left, or tokens came behind a stop string.",
)  # fmt: skip
HITS = Panel(
    "Prefix cache hits", "percentunit",
    {"hits": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
    "Share of looked-up prompt tokens that were found. Low with equal prefixes: they differ early "
    "(a date, an id), belong to different keys, or are evicted (see cached blocks).", most=1,
)  # fmt: skip
PREEMPTIONS = Panel(
    "Preemptions per second", "short", {"preemptions": rate("vllm:num_preemptions_total")},
    "A running sequence had to give its blocks back and is computed again later. Often: lower "
    "--max-num-seqs, or give the cache more memory.", 0.1, 1,
)  # fmt: skip
ENDS = Panel(
    "Ends by reason", "reqps",
    {"{{finished_reason}}": "sum by (finished_reason) "
     f"(rate(vllm:request_success_total{{{CHOSEN}}}{RATE}))"},
    "abort: the client left, or the request's own timeout passed. error: a step or the engine "
    "failed.",
    stacked=True,
)  # fmt: skip
REFUSED = Panel(
    "Refused by status", "reqps",
    {"{{status}}": f"sum by (status) (rate(octavo_requests_refused_total{{{SERVER}}}{RATE}))"},
    "Before they were queued. 429: the queue is full. 503: loading, draining, or no engine. 400: "
    "the client's mistake.", stacked=True,
)  # fmt: skip
UP = Panel(
    "Engines that serve", "short", {"serving": total("octavo_engine_up")},
    "0: loading, draining, stalled or dead; /health says which.", kind="stat",
)  # fmt: skip
STEP = Panel(
    "A step", "s",
    {"whole": mean("octavo_step_seconds", ',part="total"'),
     "scheduling": mean("octavo_step_seconds", ',part="schedule"'),
     "oldest now": f"max(octavo_step_age_seconds{{{CHOSEN}}})"},
    "Mean seconds. Scheduling near the whole: the host is the limit (more cores, larger batches). "
    "An age above some seconds: a step that hangs; its stacks are in the log.", 1, 10,
)  # fmt: skip
STEP_TOKENS = Panel(
    "Tokens in a step", "short",
    {"mean": mean("vllm:iteration_tokens_total"), **quantiles("vllm:iteration_tokens_total")},
    "Prompts' chunks and one for each sequence: what batching gives.",
)  # fmt: skip
ACCEPTED = Panel(
    "Accepted draft tokens", "percentunit",
    {"share": ratio("vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_draft_tokens_total")},
    "A low share costs more than it brings: outputs are not predictable, or the temperature is "
    "high. Fewer draft tokens, or none.", most=1,
)  # fmt: skip
LENGTH = Panel(
    "Tokens per verification", "short",
    {"mean": "1 + " + ratio("vllm:spec_decode_num_accepted_tokens_total",
                            "vllm:spec_decode_num_drafts_total")},
    "1: nothing is gained; the number of draft tokens + 1: all are accepted.",
)  # fmt: skip
DRAFTS = Panel(
    "Drafts and draft tokens per second", "short",
    {"drafts": rate("vllm:spec_decode_num_drafts_total"),
     "draft tokens": rate("vllm:spec_decode_num_draft_tokens_total"),
     "accepted": rate("vllm:spec_decode_num_accepted_tokens_total")},
    "Nothing here: the server runs without speculation.",
)  # fmt: skip
POSITIONS = Panel(
    "Accepted by position", "percentunit",
    {"{{position}}": "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total"
     f"{{{CHOSEN}}}{RATE})) / ignoring(position) group_left() "
     f"clamp_min({rate('vllm:spec_decode_num_drafts_total')}, 1e-9)"},
    "Where it nears zero, later draft tokens are in vain: --num-speculative-tokens.", most=1,
)  # fmt: skip

SAVED = Panel(
    "Seconds saved per minute", "s",
    {"saved": f"60 * sum(deriv(octavo_spec_decode_saved_seconds{{{CHOSEN}}}[5m]))"},
    "Against steps without draft tokens that draw as many tokens. Below zero: speculation loses.",
)  # fmt: skip
BELOW_ZERO = {QUEUE_GROWTH.title, SAVED.title}


def by_engine(title: str, unit: str, query: str, tells: str, **more: Any) -> Panel:
    return Panel(title, unit, {"{{instance}} {{engine}}": query}, tells, **more)


def per_engine(name: str, function: str = "") -> str:
    inner = f"rate({name}{{{CHOSEN}}}{RATE})" if function == "rate" else f"{name}{{{CHOSEN}}}"
    return f"sum by (instance, engine) ({inner})"


def pair(name: str, title: str, tells: str, unit: str = "s") -> Panel:
    return Panel(title, unit, {**quantiles(name), "mean": mean(name)}, tells)


SPECS: dict[str, tuple[str, list[list[Panel]]]] = {
    "overview": ("octavo: overview", [
        [UP, QUEUE, USAGE], [FIRST, GAP, WHOLE], [TOKENS, ENDS, REFUSED], [BLOCKS, HITS, STEP],
        [QUEUE_GROWTH, PREEMPTIONS],
    ]),
    "latency": ("octavo: latency", [
        [FIRST, GAP, WHOLE],
        [pair("vllm:request_queue_time_seconds", "Queue", "Arrival to first scheduled."),
         pair("vllm:request_prefill_time_seconds", "Prefill", "First scheduled to first token."),
         pair("vllm:request_decode_time_seconds", "Decode", "First to last token.")],
        [pair("vllm:request_inference_time_seconds", "Inference", "First scheduled to last token."),
         pair("vllm:request_time_per_output_token_seconds", "Mean time per token of a sequence",
              "Decode / (tokens - 1)."), STEP],
        [pair("vllm:request_prompt_tokens", "Prompt tokens", "Of sequences that ended.", "short"),
         pair("vllm:request_generation_tokens", "Output tokens", "Of those.", "short"),
         pair("vllm:request_params_max_tokens", "max_tokens asked for",
              "Far above the outputs: the queue's forecast has little to go by.", "short")],
    ]),
    "kv-cache": ("octavo: KV cache and prefix cache", [
        [USAGE, BLOCKS], [HITS, Panel(
            "Prompt tokens looked up and found", "short",
            {"looked up": rate("vllm:prefix_cache_queries_total"),
             "found": rate("vllm:prefix_cache_hits_total")}, "Per second.")],
        [PREEMPTIONS, QUEUE, QUEUE_GROWTH],
        [Panel("Copies on write per second", "short", {"blocks": rate("octavo_cow_copies_total")},
               "Blocks copied because one of several sharers went on writing."),
         Panel("Internal fragmentation", "percentunit",
               {"mean": f"avg(octavo_kv_internal_fragmentation_ratio{{{CHOSEN}}})"},
               "Share of the used blocks' token places without a token: at most a part of the last "
               "block of each sequence.", most=1),
         by_engine("Blocks of each engine", "short", per_engine("octavo_kv_blocks"),
                   "Times the block size: the tokens that its cache holds.")],
    ]),
    "speculation": ("octavo: speculative decoding", [[ACCEPTED, LENGTH], [DRAFTS, POSITIONS],
                                                     [SAVED, STEP], [GAP]]),
    "replicas": ("octavo: replicas", [
        [by_engine("Serves", "short", per_engine("octavo_engine_up"), "1: it takes requests.",
                   most=1),
         by_engine("Restarts in an hour", "short",
                   "sum by (instance, engine) "
                   f"(increase(octavo_engine_restarts_total{{{CHOSEN}}}[1h]))",
                   "Engines started again after they died.", warn=1, bad=3),
         by_engine("Went on elsewhere per second", "reqps",
                   per_engine("octavo_requests_retried_total", "rate"),
                   "Sequences whose engine was lost before it had answered.")],
        [by_engine("Running", "short", per_engine("vllm:num_requests_running"), "Sequences."),
         by_engine("Waiting", "short", per_engine("vllm:num_requests_waiting"), "Sequences."),
         by_engine("KV cache usage", "percentunit", per_engine("vllm:kv_cache_usage_perc"),
                   "Share of blocks that running sequences hold.", warn=0.85, bad=0.95, most=1)],
        [by_engine("Returned tokens per second", "short",
                   per_engine("vllm:generation_tokens_total", "rate"), "Unequal: routing."),
         by_engine("Prefix hits", "percentunit",
                   f"{per_engine('vllm:prefix_cache_hits_total', 'rate')} / (clamp_min("
                   f"{per_engine('vllm:prefix_cache_queries_total', 'rate')}, 1e-9))",
                   "Of looked-up tokens.", most=1),
         Panel("Time to first token, p95", "s",
               quantiles("vllm:time_to_first_token_seconds", "engine"), "By engine.", 2, 10)],
        [by_engine("Age of the step under way", "s", per_engine("octavo_step_age_seconds"),
                   "Growing: it hangs.", warn=1, bad=10),
         Panel("Start", "s", {"{{instance}} {{engine}} {{phase}}":
               f"octavo_startup_seconds{{{CHOSEN}}}"}, "Seconds of each phase.", stacked=True)],
    ]),
}  # fmt: skip


def panel_json(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for color, value in (("yellow", panel.warn), ("red", panel.bad)):
        if value is not None:
            steps.append({"color": color, "value": value})
    custom: dict[str, Any] = {"fillOpacity": 30 if panel.stacked else 0}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    if len(steps) > 1:
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults: dict[str, Any] = {
        "unit": panel.unit, "min": 0, "custom": custom,
        "thresholds": {"mode": "absolute", "steps": steps},
    }  # fmt: skip
    if panel.title in BELOW_ZERO:
        del defaults["min"]
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.tells,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": ROW_HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend,
             "datasource": SOURCE}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def variable(name: str, label: str, within: str = "") -> dict[str, Any]:
    """A choice of several values of a label; all of them by default."""
    query = f"label_values(vllm:num_requests_running{within}, {label})"
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "multi": True,
        "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1,
    }  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    title, rows = SPECS[name]
    panels: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        width = COLUMNS // len(row)
        for i, panel in enumerate(row):
            place = (len(panels) + 1, i * width, number * ROW_HEIGHT, width)
            panels.append(panel_json(panel, *place))
    source = {
        "name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus",
    }  # fmt: skip
    chosen = '{model_name=~"$model_name"}'
    return {
        "uid": f"octavo-{name}",
        "title": title,
        "tags": ["octavo"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "tags": ["octavo"], "title": "octavo", "asDropdown": True,
             "includeVars": True, "keepTime": True}
        ],
        "templating": {
            "list": [
                source,
                variable("model_name", "model_name"),
                variable("instance", "instance", chosen),
                variable("engine", "engine", chosen),
            ]
        },
        "panels": panels,
    }  # fmt: skip


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in SPECS:
        (DASHBOARDS / f"{name}.json").write_text(text(name))
