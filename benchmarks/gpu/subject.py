"""A process with one engine: ``python -m benchmarks.gpu.subject SHAPE [--rows bs1 bs8]``.

Prints a line of JSON once it is ready and one per row; with no rows it only starts and ends.
``--profile DIR``: also where each row's GPU time goes, on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from typing import Any

from benchmarks.cpu_workload import Work
from benchmarks.gpu import workload
from benchmarks.gpu.workload import ROWS, Row
from octavo import LLM, SamplingParams
from octavo.cli.bench.latency import profile_report
from octavo.machine import process_age


def run(llm: LLM, work: list[Work]) -> float:
    """Seconds from the call to the last answer."""
    params = [
        SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True, detokenize=False)
        for item in work
    ]
    prompts = [{"prompt_token_ids": item.prompt} for item in work]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == [item.max_tokens for item in work]
    return seconds


def measure(llm: LLM, row: Row, repetitions: int, scale: int, vocabulary: int) -> dict[str, Any]:
    """Seconds of each repetition, and what its engine did in the last one. A row ``cached`` repeats
    the prompts of a first run, which is told apart; the others have fresh ones every time."""
    found: dict[str, Any] = {"row": row.name, "seconds": []}
    assert llm.reset_prefix_cache()
    if row.cached:
        work = row.make(0, scale, vocabulary)
        found["cold_seconds"] = run(llm, work)
    for repetition in range(repetitions):
        if not row.cached:
            work = row.make(repetition, scale, vocabulary)
            assert llm.reset_prefix_cache()
        before = llm.stats
        found["seconds"].append(run(llm, work))
    after = llm.stats
    found["input_tokens"] = sum(len(item.prompt) for item in work)
    found["output_tokens"] = sum(item.max_tokens for item in work)
    for name in ("num_steps", "num_preemptions", "prefix_hits"):
        found[name] = getattr(after, name) - getattr(before, name)
    return found


def warm_up(llm: LLM, scale: int, vocabulary: int) -> None:
    """The kinds of steps that the rows have, on prompts that no row has."""
    for count, length in ((1, 512), (8, 128), (64, 64)):
        tail = list(range(10, 10 + length // scale))
        run(llm, [Work([vocabulary - 1 - row, *tail], 8) for row in range(count)])


def tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=list(workload.SHAPES))
    known = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=known, default=[], metavar="ROW")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--kept", default="bf16", metavar="WAY", help="how weights are kept")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--profile", metavar="DIR", help="trace each row once more, into DIR")
    options = parser.parse_args()
    shape, names = options.shape, options.rows
    scale, vocabulary = workload.scale_of(shape), workload.vocabulary_of(shape)
    path = str(workload.model_directory(shape, options.kept))
    settings = {**workload.settings_of(shape), "max_num_seqs": options.max_num_seqs}
    settings |= {"kv_cache_dtype": options.kv_cache_dtype}
    if options.kept not in ("bf16", *workload.SCHEMES):
        settings["quantization"] = options.kept
    if options.quantize_head:
        settings["quantize_head"] = True
    if options.deterministic:
        settings["deterministic"] = True
    with closing(LLM(path, **settings)) as llm:
        info = llm.info
        tell(
            {
                "ready_seconds": process_age(),
                "phases": info.startup_seconds,
                "device": info.device,
                "dtype": info.dtype,
                "block_size": info.block_size,
                "num_blocks": info.num_blocks,
                "weight_bytes": info.weight_bytes,
                "reasons": info.reasons,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "implementations": info.implementations,
            }
        )
        if names:
            warm_up(llm, scale, vocabulary)
        for row in ROWS:
            if row.name in names:
                tell(measure(llm, row, options.repetitions, scale, vocabulary))
                if options.profile:
                    work = row.make(options.repetitions, scale, vocabulary)
                    llm.start_profile(options.profile)
                    run(llm, work)
                    print(row.title, profile_report(llm.stop_profile()), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
