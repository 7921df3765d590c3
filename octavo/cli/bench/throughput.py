"""``octavo bench throughput``: tokens per second of the engine in this process, no server."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.arguments import Arguments, Command
from octavo.cli.bench.datasets import DatasetOptions, load_dataset
from octavo.cli.bench.offline import as_prompt, load_llm
from octavo.cli.console import table
from octavo.config import EngineConfig
from octavo.flags import flag
from octavo.types import SamplingParams


@dataclass(frozen=True)
class ThroughputOptions(DatasetOptions):
    n: int = flag(1, "answers per prompt", group="request", minimum=1)
    output_json: str | None = flag(None, "write the figures to this file", group="report")
    disable_tqdm: bool = flag(False, "no progress", group="report")


COMMAND = Command(
    "bench throughput",
    "Gives the engine many prompts at once, offline, and reports tokens per second.",
    (ThroughputOptions, EngineConfig),
    examples=("octavo bench throughput smollm2-135m --num-prompts 64 --input-len 256",),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(ThroughputOptions)
    samples = load_dataset(options, None)
    params = [
        SamplingParams(
            n=options.n, temperature=1.0, ignore_eos=True, max_tokens=s.num_output_tokens
        )
        for s in samples
    ]
    prompts = [as_prompt(sample.prompt) for sample in samples]
    with closing(load_llm(arguments)) as llm:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not options.disable_tqdm)
        seconds = time.perf_counter() - begin
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    figures = {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(samples) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }
    rows = [
        ("requests", f"{len(samples):,} in {seconds:.2f} s"),
        ("tokens", f"{num_input:,} in, {num_output:,} out"),
        ("requests per second", f"{figures['requests_per_second']:.2f}"),
        ("output tokens per second", f"{figures['output_tokens_per_second']:.1f}"),
        ("all tokens per second", f"{figures['tokens_per_second']:.1f}"),
    ]
    print(table(rows))
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0
