"""The guide's claims, measured on this machine and printed beside the claim (``make bench-guide``).

    python -m benchmarks.guide_claims [--only prefix stall]

Writes docs/guide-claims.md and benchmarks/results/guide_claims.json. Memory is counted on the tiny
random model (its blocks are the same, its steps are quick), time on the demo model's BF16 twin.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import contiguous, guide_parallel, guide_quantization, guide_speculation
from benchmarks import cpu_workload as workload
from benchmarks.claims_page import write_page
from benchmarks.cpu_workload import Work
from benchmarks.driver import Driver
from benchmarks.protocol import Subject
from benchmarks.report import RESULTS, environment, save
from benchmarks.subjects import STATIC_BATCH, command
from octavo import LLM
from octavo.engine.messages import EngineStats
from tests.fixtures import models

MAX_MODEL_LEN = 2048
POOL_TOKENS = 8192
BLOCK = 16

console = Console()


@dataclass
class Claim:
    """``verdict`` begins with "true" or "not true here, because"."""

    topic: str
    guide: str
    measured: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)


@contextmanager
def engine(model: str, **settings: Any) -> Iterator[Driver]:
    with closing(LLM(str(models.path(model)), skip_tokenizer_init=True, **settings)) as llm:
        driver = Driver(llm)
        for work in workload.warm_up() if model != "R" else []:
            driver.add(work)
        driver.run()
        driver.stats.clear()
        yield driver


def small_ids(work: Work) -> Work:
    """The same lengths in the random model's vocabulary."""
    return Work([4 + token % 300 for token in work.prompt], work.max_tokens)


def waited(stats: list[EngineStats]) -> list[EngineStats]:
    """The steps in which memory was wanted: requests waited."""
    return [entry for entry in stats if entry.num_waiting > 0]


def memory() -> list[Claim]:
    """Waste, share in use and requests at once, at equal memory."""
    requests = workload.mixed(count=128)
    lengths = [contiguous.Lengths(len(work.prompt), work.max_tokens) for work in requests]
    rules = contiguous.rules(MAX_MODEL_LEN)
    old = {name: contiguous.simulate(lengths, POOL_TOKENS, rules[name]) for name in rules}
    with engine(
        "R",
        num_gpu_blocks_override=POOL_TOKENS // BLOCK,
        max_model_len=MAX_MODEL_LEN,
        cpu_threads=1,
    ) as driver:
        for work in requests:
            driver.add(small_ids(work))
        driver.run()
    busy = waited(driver.stats)
    filled = statistics.mean(1 - entry.fragmentation for entry in busy)
    held = statistics.mean(entry.blocks_used * BLOCK / POOL_TOKENS for entry in busy)
    running = statistics.mean(entry.num_running for entry in busy)
    preemptions = driver.stats[-1].num_preemptions
    ratio = {name: running / use.running for name, use in old.items()}
    shares = ", ".join(
        f"{name} {use.used:.0%} (internal {use.internal:.0%}, external {use.external:.0%})"
        for name, use in old.items()
    )
    page = f"{filled:.1%} of the places in held blocks hold a token; {held:.0%} of blocks held"
    figures = {
        "contiguous": {name: asdict(use) for name, use in old.items()},
        "padded_static_batch": contiguous.padded(lengths, STATIC_BATCH),
        "paged": {"filled": filled, "held": held, "running": running},
        "preemptions": preemptions,
    }
    return [
        Claim(
            "KV memory in use",
            "contiguous 20–40 %, PagedAttention about 96 %",
            f"contiguous by rule: {shares}; paged: {page}",
            "true against reservation of the full context; knowing output lengths beforehand "
            f"(exact) would reach {old['exact'].used:.0%}"
            if filled > 0.95 and old["max"].used < 0.4
            else "not true here, because the lengths of this workload waste less",
            figures,
        ),
        Claim(
            "KV waste",
            "contiguous: worst case 60–80 % internal, external besides; paged: almost none",
            f"contiguous max: {old['max'].internal:.0%} internal; exact: "
            f"{old['exact'].external:.0%} external; paged: {1 - filled:.1%} internal, 0 external",
            "true",
        ),
        Claim(
            "requests at once in the same memory",
            "3–10 times as many",
            f"{running:.1f} against max {old['max'].running:.1f} ({ratio['max']:.1f}×), power2 "
            f"{old['power2'].running:.1f} ({ratio['power2']:.1f}×), exact "
            f"{old['exact'].running:.1f} ({ratio['exact']:.1f}×)",
            "true against reservation of the full context, less against better guesses"
            if ratio["max"] >= 3
            else "not true here, because answers are long for the context",
        ),
        Claim(
            "a full KV cache",
            "running out of memory after a while",
            f"128 requests on a pool for about {running:.0f}: {preemptions} preemptions, "
            "all answered, no error",
            "not true here, because a full cache means waiting and preemption, never a failure",
        ),
    ]


def sharing() -> list[Claim]:
    """Blocks of 16 requests with a common beginning, with and without sharing."""
    work = [Work(small_ids(item).prompt, 100) for item in workload.shared()]  # all run at once
    peaks = {}
    copies = 0
    for caching in (True, False):
        with engine(
            "R",
            enable_prefix_caching=caching,
            num_gpu_blocks_override=2048,
            max_model_len=MAX_MODEL_LEN,
            cpu_threads=1,
        ) as driver:
            for item in work:
                driver.add(item)
            driver.run()
            peaks[caching] = max(entry.blocks_used for entry in driver.stats)
            copies = max(copies, driver.stats[-1].num_copies)
    return [
        Claim(
            "shared prefixes are stored once",
            "requests share blocks read-only and copy when they diverge",
            f"16 requests with 1,000 tokens in common: {peaks[True]} blocks against "
            f"{peaks[False]}; {copies} blocks copied on write",
            "true" if peaks[True] * 3 < peaks[False] and copies else "not true here",
            {"shared": peaks[True], "apart": peaks[False], "copies": copies},
        )
    ]


def throughput() -> list[Claim]:
    """Against transformers with static batches, in turns."""
    with (
        Subject(command("octavo", models.path("G-bf16"))) as ours,
        Subject(command("transformers", models.path("G-bf16"))) as theirs,
    ):
        turns = []
        for repetition in range(2):
            work = workload.mixed(5000 + repetition, count=16)
            turns.append((ours.run(work).output_rate, theirs.run(work).output_rate))
    ratio = statistics.median(a / b for a, b in turns)
    mine, other = (statistics.median(column) for column in zip(*turns))
    return [
        Claim(
            "throughput against transformers",
            "2–24 times",
            f"16 mixed requests: {mine:.0f} against {other:.0f} output tokens/s, {ratio:.1f}×",
            "true" if ratio >= 2 else "not true here, because 16 requests are few",
            {"turns": turns, "ratio": ratio},
        )
    ]


def skewed(count: int) -> list[Work]:
    """One long answer in eight, as in the guide's example (10 tokens beside 500)."""
    rng = np.random.default_rng([workload.SEED, 7])
    return [
        Work([int(t) for t in rng.integers(17, 49152, 64)], 200 if k % 8 == 3 else 10)
        for k in range(count)
    ]


def run_static(driver: Driver, work: list[Work]) -> float:
    """Seconds when a batch starts only after the one before has ended."""
    return sum(
        run_continuous(driver, work[start : start + STATIC_BATCH])
        for start in range(0, len(work), STATIC_BATCH)
    )


def run_continuous(driver: Driver, work: list[Work]) -> float:
    tracks = [driver.add(item) for item in work]
    driver.run()
    return max(track.times[-1] for track in tracks) - tracks[0].arrival


def batching() -> list[Claim]:
    """Continuous against static batching by the same engine."""
    loads = {"mixed": workload.mixed(6000, count=24), "skewed": skewed(32)}
    seconds: dict[str, dict[str, float]] = {name: {} for name in loads}
    with engine("G-bf16", max_num_seqs=STATIC_BATCH, enable_prefix_caching=False) as driver:
        for name, work in loads.items():
            seconds[name]["static"] = run_static(driver, work)
            seconds[name]["continuous"] = run_continuous(driver, work)
    with engine("G-bf16", enable_prefix_caching=False) as driver:
        for name, work in loads.items():
            seconds[name]["uncapped"] = run_continuous(driver, work)
    gains = {
        name: (entry["static"] / entry["continuous"], entry["static"] / entry["uncapped"])
        for name, entry in seconds.items()
    }
    measured = "; ".join(
        f"{name} lengths: {same:.1f}× with {STATIC_BATCH} rows in both, {free:.1f}× without a cap"
        for name, (same, free) in gains.items()
    )
    best, least = max(max(pair) for pair in gains.values()), min(gains["mixed"])
    verdict = (
        "true"
        if least >= 2
        else "true for skewed lengths; evenly spread ones gain less here, because a CPU's step "
        "is cheaper with fewer rows: what a static batch leaves empty costs little"
        if best >= 2
        else "not true here, because a CPU's step grows with its rows"
    )
    return [Claim("continuous against static batching", "2–10 times", measured, verdict, seconds)]


def prefix() -> list[Claim]:
    """First-token time with a shared prefix of 1,000 tokens."""
    cold, warm = [], []
    with engine("G-bf16") as driver:
        for repetition in range(5):
            first, second = workload.shared(7000 + repetition, count=2)
            for times, work in ((cold, first), (warm, second)):
                track = driver.add(Work(work.prompt, 2))
                driver.run()
                times.append(track.first_token_seconds)
    a, b = statistics.median(cold), statistics.median(warm)
    return [
        Claim(
            "first token with a shared prefix",
            "less than half the time",
            f"1,000 tokens shared, 32 own: {1000 * a:.0f} ms cold, {1000 * b:.0f} ms warm "
            f"({b / a:.2f}×)",
            "true" if b < a / 2 else "not true here, because the rest of the step outweighs it",
            {"cold": cold, "warm": warm},
        )
    ]


def stall_with(chunked: bool) -> dict[str, float]:
    """Four requests decode; a prompt of 2,048 tokens arrives."""
    rng = np.random.default_rng([workload.SEED, 8])
    decoding = [Work([int(t) for t in rng.integers(17, 49152, 64)], 120) for _ in range(4)]
    long = Work([int(t) for t in rng.integers(17, 49152, 2048)], 4)
    settings = {"max_num_batched_tokens": 4096, "max_model_len": 4096}
    with engine(
        "G-bf16", enable_chunked_prefill=chunked, adaptive_chunks=chunked, **settings
    ) as driver:
        tracks = [driver.add(work) for work in decoding]
        driver.run(until=lambda: all(len(track.times) >= 20 for track in tracks))
        arrival = driver.add(long)
        driver.run()
    gaps = [b - a for t in tracks for a, b in zip(t.times[5:18], t.times[6:19], strict=True)]
    return {
        "usual_gap": statistics.median(gaps),
        "longest_gap": max(track.longest_gap for track in tracks),
        "first_token": arrival.first_token_seconds,
    }


def stall() -> list[Claim]:
    """How long decoding stands still under a long prompt, with and without chunking."""
    whole, chunks = stall_with(False), stall_with(True)
    return [
        Claim(
            "a long prompt beside decoding requests",
            "without chunked prefill decoding stands still; with it, it goes on",
            f"longest pause {1000 * whole['longest_gap']:.0f} ms whole, "
            f"{1000 * chunks['longest_gap']:.0f} ms in chunks (usual "
            f"{1000 * chunks['usual_gap']:.0f} ms); the long prompt's first token after "
            f"{whole['first_token']:.1f} s and {chunks['first_token']:.1f} s",
            "true" if chunks["longest_gap"] < whole["longest_gap"] / 2 else "not true here",
            {"whole": whole, "chunks": chunks},
        )
    ]


def formula() -> list[Claim]:
    """The guide's example of KV size, computed."""
    layers, heads, kv_heads, dim, length, batch = 80, 64, 8, 128, 2048, 32
    with_heads = 2 * layers * heads * dim * length * 2 * batch
    with_kv_heads = 2 * layers * kv_heads * dim * length * 2 * batch
    return [
        Claim(
            "KV cache of Llama-2-70B, batch 32, 2,048 tokens",
            "about 26 GB",
            f"{with_heads / 1e9:.1f} GB by the formula as written, {with_kv_heads / 1e9:.1f} GB "
            "with the model's 8 KV heads",
            "not true here, because neither the formula nor the model gives that figure",
        )
    ]


MEASUREMENTS: dict[str, Callable[[], list[Claim]]] = {
    "memory": memory,
    "sharing": sharing,
    "throughput": throughput,
    "batching": batching,
    "prefix": prefix,
    "stall": stall,
    "formula": formula,
}


def _others() -> list[dict[str, Any]]:
    """What other benchmarks have measured."""
    others = (guide_quantization, guide_parallel, guide_speculation)
    return [claim for module in others for claim in module.claims()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=MEASUREMENTS, help="and write no file")
    parser.add_argument("--page", action="store_true", help="write the page from kept figures")
    options = parser.parse_args()
    if options.page:
        kept = json.loads((RESULTS / "guide_claims.json").read_text())
        console.print(write_page(kept["claims"] + _others(), kept["environment"]))
        return
    claims = []
    for name in options.only or MEASUREMENTS:
        with console.status(f"measuring: {name}"):
            found = MEASUREMENTS[name]()
        for claim in found:
            console.print(f"[bold]{claim.topic}[/]", highlight=False)
            console.print(f"  guide:    {claim.guide}", highlight=False)
            console.print(f"  measured: {claim.measured}", highlight=False)
            console.print(f"  {claim.verdict}\n", highlight=False)
        claims += found
    if not options.only:
        entries = [asdict(claim) for claim in claims]
        file = save("guide_claims", {"claims": entries})
        page = write_page(entries + _others(), environment())
        console.print(f"saved {file} and {page}")


if __name__ == "__main__":
    main()
