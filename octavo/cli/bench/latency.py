"""``octavo bench latency``: seconds from a batch of prompts to its last token, offline."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.cli.arguments import Arguments, Command
from octavo.cli.bench.datasets import random_ids
from octavo.cli.bench.offline import as_prompt, load_llm
from octavo.cli.console import CountLine, table
from octavo.config import EngineConfig
from octavo.flags import flag
from octavo.types import SamplingParams, StepProfile

if TYPE_CHECKING:
    from octavo.llm import LLM

# Of an answer, in a trace.
PROFILED_TOKENS = 16
_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyOptions:
    input_len: int = flag(32, "prompt tokens", group="latency", top=True, minimum=1)
    output_len: int = flag(128, "output tokens", group="latency", top=True, minimum=1)
    batch_size: int = flag(8, "prompts at a time", group="latency", top=True, minimum=1)
    n: int = flag(1, "answers per prompt", group="latency", minimum=1)
    num_iters_warmup: int = flag(10, "batches before measuring", group="latency", minimum=0)
    num_iters: int = flag(30, "batches measured", group="latency", top=True, minimum=1)
    profile: bool = flag(
        False,
        "trace one batch instead of measuring: a few steps, and their time by kind",
        group="latency",
        top=True,
    )
    profile_result_dir: str = flag("profile", "where traces go", group="latency")
    output_json: str | None = flag(None, "write the figures to this file", group="latency")
    disable_tqdm: bool = flag(False, "no progress", group="latency")


COMMAND = Command(
    "bench latency",
    "Runs one batch again and again, offline, with fresh prompts, and reports its seconds.",
    (LatencyOptions, EngineConfig),
    examples=(
        "octavo bench latency smollm2-135m --batch-size 1 --num-iters 10",
        "octavo bench latency smollm2-135m --batch-size 8 --profile",
    ),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(LatencyOptions)
    with closing(load_llm(arguments)) as llm:
        if options.profile:
            print(profile_report(_profile(llm, options)))
            return 0
        seconds = _measure(llm, options)
    percentiles = {str(p): float(np.percentile(seconds, p)) for p in _PERCENTILES}
    rows = [("mean", f"{np.mean(seconds):.4f} s"), ("best", f"{min(seconds):.4f} s")]
    rows += [(f"p{p}", f"{value:.4f} s") for p, value in percentiles.items()]
    print(table(rows))
    if options.output_json:
        figures = {
            "avg_latency": float(np.mean(seconds)),
            "latencies": seconds,
            "percentiles": percentiles,
        }
        Path(options.output_json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _profile(llm: LLM, options: LatencyOptions) -> StepProfile:
    """Of one batch's prompt and first tokens, after the batches before measuring."""
    short = replace(options, num_iters=1, output_len=min(options.output_len, PROFILED_TOKENS))
    _measure(llm, replace(short, num_iters_warmup=max(0, options.num_iters_warmup - 1)))
    llm.reset_prefix_cache()  # the prompts are the same ones
    llm.start_profile(options.profile_result_dir)
    _measure(llm, replace(short, num_iters_warmup=0, disable_tqdm=True))
    return llm.stop_profile()


def profile_report(profile: StepProfile) -> str:
    """Time by kind, with its share of the span; then idle time and the trace."""
    span = profile.span or 1.0
    rows: list[tuple[str, ...]] = [("kind", "calls", "milliseconds", "share")]
    for kind, (calls, seconds) in profile.kinds.items():
        share = f"{seconds / span:.1%}"
        rows.append((kind, f"{calls:,}", f"{seconds * 1e3:.3f}", share))
    rows.append(("idle", "", f"{profile.idle * 1e3:.3f}", f"{profile.idle / span:.1%}"))
    steps = f"{profile.num_steps} steps in {profile.span * 1e3:.3f} ms"
    gap = f"longest gap {profile.longest_gap * 1e6:.0f} us"
    return f"{table(rows)}\n\n{steps}, {gap}\nsaved {profile.trace}"


def _measure(llm: LLM, options: LatencyOptions) -> list[float]:
    """Seconds of each measured batch; every batch has prompts of its own."""
    rng = np.random.default_rng(0)
    params = SamplingParams(
        n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len
    )
    total = options.num_iters_warmup + options.num_iters
    progress = None if options.disable_tqdm else CountLine(total, "batches")
    seconds: list[float] = []
    for i in range(total):
        prompts = [as_prompt(random_ids(rng, options.input_len)) for _ in range(options.batch_size)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i >= options.num_iters_warmup:
            seconds.append(time.perf_counter() - begin)
        if progress:
            progress.show(i + 1)
    return seconds
