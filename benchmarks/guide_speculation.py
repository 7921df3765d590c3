"""The guide's words on speculative decoding, from what benchmarks/speculation.py and
benchmarks/gpu/speculation.py kept."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.report import RESULTS

METHOD = "ngram"


def claims() -> list[dict[str, Any]]:
    """As ``Claim``; rows without figures are left out."""
    kept = {name: _kept(name) for name in ("speculation", "gpu_speculation")}
    workloads = kept["speculation"].get("workloads")
    return (
        [_predictable(workloads, kept["gpu_speculation"]), _random(workloads)] if workloads else []
    )


def _kept(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _shown(workloads: dict[str, Any], words: tuple[str, ...]) -> str:
    rows = [name for name in workloads if any(word in name for word in words)]
    return ", ".join(f"{name}: {workloads[name][METHOD]['ratio']:.2f}×" for name in rows)


def _predictable(workloads: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    rates = gpu.get("ratios", {})
    scripted = ", ".join(f"{way}: {ratio:.2f}×" for way, ratio in rates.items() if "0.7" in way)
    return {
        "topic": "speculative decoding of predictable output",
        "guide": "structured output and code take 30–70 % less time",
        "measured": f"n-grams, SmolLM2 on a CPU: {_shown(workloads, ('repeat', 'JSON'))}; "
        f"Llama-8B's shape on an H200, guesses right by a script: {scripted}",
        "verdict": "true of text that repeats what stands before, with few requests at once (1.43× "
        "to 3.3× would be the guide's figures); less with more of them, for then each token costs",
    }


def _random(workloads: dict[str, Any]) -> dict[str, Any]:
    return {
        "topic": "speculative decoding at a high temperature",
        "guide": "little gain, or a loss",
        "measured": f"n-grams, SmolLM2 on a CPU: {_shown(workloads, ('random',))}",
        "verdict": "true that nothing is gained; requests whose guesses do not pay bring none, and "
        "tries take 1 % of the time at most (measured before that bound; docs/speculative.md)",
    }
