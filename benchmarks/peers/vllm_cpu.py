"""vLLM's CPU build, offline: ``python -m benchmarks.peers.vllm_cpu MODEL THREADS`` in an
environment that has it.

Settings as its guide to the CPU asks for them: a KV cache of a stated size, one OpenMP thread on
each core, tcmalloc and Intel's OpenMP preloaded where they are found; compiling, chunked prefill
and prefix caching are on by themselves.
"""

from __future__ import annotations

import os
import sys
import time
from ctypes.util import find_library
from pathlib import Path

from benchmarks.cpu_workload import Work
from benchmarks.protocol import Runner, Timing, serve

KV_CACHE_GIB = 4


def preloaded() -> list[str]:
    """Libraries for the worker, which is a process of its own: LD_PRELOAD acts there."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    tcmalloc = find_library("tcmalloc_minimal")
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]


def make(model: str, threads: int) -> Runner:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["LD_PRELOAD"] = ":".join(preloaded())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_model_len=2048, skip_tokenizer_init=True, disable_log_stats=False)

    def run(work: list[Work]) -> Timing:
        params = [
            SamplingParams(
                temperature=0, max_tokens=item.max_tokens, ignore_eos=True, detokenize=False
            )
            for item in work
        ]
        prompts = [{"prompt_token_ids": item.prompt} for item in work]
        start = time.monotonic()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - start
        outputs = [list(answer.outputs[0].token_ids) for answer in answers]
        assert [len(output) for output in outputs] == [item.max_tokens for item in work]
        firsts = [answer.metrics.first_token_ts - start for answer in answers]
        return Timing(seconds, firsts, sum(map(len, outputs)), outputs)

    return run


def main() -> None:
    model, threads = sys.argv[1:]
    serve(lambda: make(model, int(threads)))


if __name__ == "__main__":
    main()
