"""From traces to figures: rates, latencies and their percentiles, goodput."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.cli.bench.load import Trace
from octavo.types import ConfigError

# name in flags -> (title, the samples of one request in seconds)
LATENCIES: dict[str, tuple[str, Callable[[Trace], list[float]]]] = {
    "ttft": ("time to first token", lambda t: [t.first_token_seconds]),
    "tpot": (
        "time per output token, after the first",
        lambda t: [t.seconds_per_token] if t.num_output_tokens > 1 else [],
    ),
    "itl": ("time between chunks", lambda t: [float(g) for g in np.diff(t.chunks)]),
    "e2el": ("whole request", lambda t: [t.seconds]),
}


def parse_latencies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics {name}: choose from {', '.join(LATENCIES)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles {text}: expected numbers, e.g. 50,99") from error
    for value in percentiles:
        if not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles {value:g}: must be between 0 and 100")
    return percentiles


def parse_goodput(items: list[str]) -> dict[str, float]:
    """``ttft:100 tpot:50`` (milliseconds) -> seconds by name."""
    limits: dict[str, float] = {}
    for item in items:
        name, colon, text = item.partition(":")
        if not colon or name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {item}: expected ttft:MS, tpot:MS or e2el:MS")
        try:
            limits[name] = float(text) / 1e3
        except ValueError as error:
            raise ConfigError(f"--goodput {item}: {text!r} is no number") from error
    return limits


def summarize(
    traces: list[Trace],
    duration: float,
    latencies: list[str],
    percentiles: list[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """Figures under the names vLLM's tools use; times in milliseconds, rates per second."""
    good = [trace for trace in traces if not trace.error]
    num_input = sum(trace.num_prompt_tokens for trace in good)
    num_output = sum(trace.num_output_tokens for trace in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(traces) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_concurrent_requests": peak_concurrency(good),
    }
    if goodput:
        met = [trace for trace in good if _meets(trace, goodput)]
        result["request_goodput"] = len(met) / duration
    for name in latencies:
        values = np.array([s for trace in good for s in LATENCIES[name][1](trace)]) * 1e3
        if not len(values):
            continue
        result[f"mean_{name}_ms"] = float(values.mean())
        result[f"median_{name}_ms"] = float(np.median(values))
        result[f"std_{name}_ms"] = float(values.std())
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p))
    return result


def peak_concurrency(traces: list[Trace]) -> int:
    """Most requests that were open at one moment."""
    events = sorted([(t.sent, 1) for t in traces] + [(t.finished, -1) for t in traces])
    return int(np.cumsum([step for _, step in events]).max()) if events else 0


def _meets(trace: Trace, limits: dict[str, float]) -> bool:
    return all(
        value <= limit for name, limit in limits.items() for value in LATENCIES[name][1](trace)
    )
