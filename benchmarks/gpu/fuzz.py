"""Random load on small shapes for minutes, on a GPU, or on a CPU where there is none.

    python -m benchmarks.gpu.fuzz [--seconds 240] [--lives 12] [--seed 1] [--eager] [--sanitize]

Lives follow each other, each with a model, a dtype and settings of its own: few or many blocks,
rows and tokens a step, with graphs and overlap or without. An engine is first asked for some
answers while it is quiet; then requests of all kinds arrive, leave early and push each other out.
In every third life AsyncLLM serves them. What must hold: every request ends as it should, known
answers are heard again up to near-ties, the block pool is sound, nothing is left over.
``--sanitize`` prints how to run this under compute-sanitizer. Writes benchmarks/results/
gpu_fuzz.json; exits 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from contextlib import closing
from typing import Any

from benchmarks.gpu.load import GOLDEN, QUIET, Golden, Load, hear_goldens, random_params
from benchmarks.report import gpus, save
from octavo import LLM, AsyncLLM
from tests.fixtures import models

MODELS = ("L64", "Q128", "R-bf16")
MAX_LEN = 384
CLIENTS = 40
SANITIZE = """\
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
    --error-exitcode 9 python -m benchmarks.gpu.fuzz --seconds {seconds:g} --lives 4 --eager
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
    python -m benchmarks.gpu.fuzz --seconds {seconds:g} --lives 4
compute-sanitizer --tool racecheck --kernel-name kns=_kernel --error-exitcode 9 \\
    python -m benchmarks.gpu.fuzz --seconds {seconds:g} --lives 4 --eager
"""


def random_settings(rng: random.Random, eager: bool) -> dict[str, Any]:
    size = rng.choice((16, 64, 128))
    fewest = -(-MAX_LEN // size)
    return {
        "dtype": rng.choice(("bfloat16", "bfloat16", "float16")),
        "max_model_len": MAX_LEN,
        "block_size": size,
        "num_gpu_blocks_override": int(fewest * rng.choice((1.7, 3, 20))),
        "max_num_seqs": rng.choice((4, 16, 60)),
        "max_num_batched_tokens": rng.choice((24, 100, 600, 2048)),
        "long_prefill_token_threshold": rng.choice((0, 0, 13)),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.8,
        "enforce_eager": eager or rng.random() < 0.2,
        "adaptive_chunks": rng.random() < 0.5,
    }


def offline_life(path: str, settings: dict[str, Any], seconds: float, rng: random.Random) -> Load:
    with closing(LLM(path, **settings)) as llm:
        load = Load(llm, hear_goldens(llm, rng), rng)
        load.run(seconds)
        load.counts["preemptions"] = llm.stats.num_preemptions
    return load


class Crowd:
    """Clients of an AsyncLLM, one request after the other."""

    def __init__(self, llm: AsyncLLM, rng: random.Random) -> None:
        self.llm = llm
        self.rng = rng
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.goldens: list[Golden] = []

    async def run(self, seconds: float) -> None:
        for length in (3, 40, 90):
            prompt = [self.rng.randrange(4, 300) for _ in range(length)]
            async for output in self.llm.generate(prompt, QUIET):
                quiet = output
            self.goldens.append(Golden.of(quiet))
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._live(end) for _ in range(CLIENTS)))

    async def _live(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                await self._request()
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")

    async def _request(self) -> None:
        rng, info = self.rng, self.llm.info
        golden = rng.choice(self.goldens) if rng.random() < 0.3 else None
        prompt = [rng.randrange(4, info.vocab_size) for _ in range(rng.choice((2, 30, 150)))]
        params = random_params(rng, info.vocab_size).clone(n=1)
        leaves_after = rng.randint(1, 20) if rng.random() < 0.3 else None
        if golden is not None:
            prompt, params, leaves_after = golden.prompt, GOLDEN, None
        outputs = []
        async for output in self.llm.generate(prompt, params):
            outputs.append(output)
            if len(outputs) == leaves_after:
                self.counts["left"] += 1
                return
        output = outputs[-1]
        if not output.finished or output.outputs[0].finish_reason not in ("stop", "length"):
            self.problems.append(f"{params} ended as {output}")
        self.counts[str(output.outputs[0].finish_reason)] += 1
        if golden is not None:
            verdict = golden.judge(output.outputs[0].token_ids)
            self.counts[verdict] += 1
            if verdict == "wrong":
                self.problems.append(f"{golden} was answered with {output.outputs[0].token_ids}")


def async_life(path: str, settings: dict[str, Any], seconds: float, rng: random.Random) -> Crowd:
    llm = AsyncLLM(path, **settings)
    crowd = Crowd(llm, rng)
    try:
        asyncio.run(crowd.run(seconds))
        deadline = time.monotonic() + 30
        while llm.engine.has_work and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        llm.close()
    stats = llm.stats
    if stats.num_running or stats.num_waiting or stats.blocks_used:
        crowd.problems.append(f"left at the end: {stats}")
    llm.engine.scheduler.check()
    crowd.counts["preemptions"] = stats.num_preemptions
    return crowd


def fuzz(seconds: float, num_lives: int, seed: int, eager: bool) -> dict[str, Any]:
    rng = random.Random(seed)
    lives = []
    for number in range(num_lives):
        name, settings = MODELS[number % len(MODELS)], random_settings(rng, eager)
        serve = async_life if number % 3 == 2 else offline_life
        began = time.monotonic()
        life = serve(str(models.path(name)), settings, seconds / num_lives, rng)
        entry = {
            "model": name,
            "settings": settings,
            "by": serve.__name__,
            "seconds": round(time.monotonic() - began, 1),
            "counts": dict(life.counts),
            "problems": life.problems[:5],
            "num_problems": len(life.problems),
        }
        lives.append(entry)
        print(f"{number + 1}/{num_lives} {name} {entry['by']} {entry['seconds']} s", flush=True)
        print(f"    {settings}\n    {entry['counts']}", flush=True)
        for problem in entry["problems"]:
            print(f"    PROBLEM {problem}", flush=True)
    return {"gpus": gpus(), "seconds": seconds, "seed": seed, "lives": lives}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="of load, without the starts")
    parser.add_argument("--lives", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in any life")
    parser.add_argument("--sanitize", action="store_true", help="print commands, run nothing")
    options = parser.parse_args()
    if options.sanitize:
        print(SANITIZE.format(seconds=options.seconds), end="")
        return
    figures = fuzz(options.seconds, options.lives, options.seed, options.eager)
    print(f"saved {save('gpu_fuzz', figures)}")
    sys.exit(1 if any(life["num_problems"] for life in figures["lives"]) else 0)


if __name__ == "__main__":
    main()
