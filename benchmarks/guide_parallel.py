"""The guide's words on several devices, from what benchmarks/parallel.py and benchmarks/routing.py
kept."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.report import RESULTS

ONE, MANY, PROMPTS = (
    "1 stream, 128 in, 64 out",
    "16 streams, 128 in, 64 out",
    "prompts of 1,024 alone",
)

BUSY = " (with other work on both cores)"


def claims() -> list[dict[str, Any]]:
    """As ``Claim``; rows without figures are left out."""
    ways = _kept("parallel").get("ways", {})
    found = []
    if ways:
        found += [_tensor(ways), _pipeline(ways), _replicas(ways)]
    found.append(
        {
            "topic": "tensor parallelism: divisibility",
            "guide": "N must divide the number of heads",
            "measured": "9 heads with 3 of keys: greedy ids on 2 and 3 ranks are those of one "
            "(tests/net/test_ranks.py); 6 heads with 3 of keys on 4 ranks: logits within 1e-3",
            "verdict": "not true here, because shares may be uneven and heads of keys replicated: "
            "any N up to the number of heads",
        }
    )
    return found


def _kept(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _shares(ways: dict[str, Any], way: str) -> str:
    one, own = ways["one"]["rows"], ways[way]["rows"]
    shown = (
        f"{own[row]['tokens_per_second'] / one[row]['tokens_per_second']:.2f}× ({row})"
        for row in (ONE, MANY, PROMPTS)
    )
    return ", ".join(shown) + (BUSY if _kept("parallel").get("busy") else "")


def _tensor(ways: dict[str, Any]) -> dict[str, Any]:
    links = _kept("parallel")["all_reduce"]
    memory, gloo = (links[way]["8 KiB, us, fastest tenth"] for way in ("shared memory", "gloo"))
    return {
        "topic": "tensor parallelism",
        "guide": "two all-reduces a layer want a fast link; small batches are held back by it",
        "measured": f"SmolLM2, 2 processes of one core against one of two, an all-reduce of 8 KiB "
        f"{memory:.0f} µs by memory ({gloo:.0f} µs by gloo): {_shares(ways, 'tensor parallel 2')}; "
        "by gloo, on idle cores of another CPU, it was 0.13×, 0.26× and 0.76×",
        "verdict": "true: by gloo the fewer rows, the more of a step is waiting; by memory, little",
    }


def _pipeline(ways: dict[str, Any]) -> dict[str, Any]:
    own, tensor = ways["pipeline 2"], ways["tensor parallel 2"]
    slower = sum(
        own["rows"][row]["tokens_per_second"] < tensor["rows"][row]["tokens_per_second"]
        for row in (ONE, MANY, PROMPTS)
    )
    bubble = own.get("bubble_fraction")
    said = "" if bubble is None else f"; bubble {bubble:.0%} at the end of the last row"
    return {
        "topic": "pipeline parallelism",
        "guide": "little traffic, fit for slow links; bubbles make it somewhat slower than tensor "
        "parallelism",
        "measured": f"SmolLM2, 2 stages of one core against one process of two: "
        f"{_shares(ways, 'pipeline 2')}{said}",
        "verdict": f"true of traffic; of speed in {slower} of the 3 rows",
    }


def _replicas(ways: dict[str, Any]) -> dict[str, Any]:
    routing = _kept("routing")
    hits = ""
    if routing:
        rows = routing["results"]["tight"]["rows"]
        kept, random = (rows[way]["of_one"] for way in ("prefix", "random"))
        hits = (
            f"; of one engine's prefix hits, routing by prefixes keeps {kept:.2f}×, at random "
            f"{random:.2f}×"
        )
    return {
        "topic": "data parallelism",
        "guide": "a replica on each node, balanced",
        "measured": f"SmolLM2, 2 replicas of one core against one engine of two: "
        f"{_shares(ways, 'replicas 2')}{hits}",
        "verdict": "true; on one CPU both share the memory's bandwidth",
    }
