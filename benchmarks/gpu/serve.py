"""Octavo's HTTP server on one GPU: its rate beside the offline one, and the gaps between tokens.

    python -m benchmarks.gpu.serve [--model llama-8b] [--only rate gaps]

rate: the 512 mixed requests through ``octavo bench serve``, 256 streams at a time, against ``LLM``
with as many places on the same requests. gaps: 256 streams decode while a long prompt arrives every
two seconds. Writes benchmarks/results/gpu_serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.cpu_workload import Work
from benchmarks.gpu import workload
from benchmarks.report import ROOT, gpus, save
from tests.fixtures import tokenizers
from tests.fixtures.server import Server, launch
from tests.fixtures.tokenizers import BOS, EOS

READY_TIMEOUT = 300.0
RATE_AT_LEAST = 0.93  # of the offline rate
GAP_AT_MOST = 2.2  # p99 over median


@dataclass(frozen=True)
class Load:
    """``streams`` requests at a time. For the gaps: of so many tokens in and out, while a prompt of
    ``long`` tokens arrives every ``every`` seconds."""

    streams: int
    prompt: int
    output: int
    long: int
    every: float


LOADS = {"tiny": Load(4, 8, 200, 256, 0.2)}
GPU_LOAD = Load(256, 128, 1024, 8192, 2.0)


def load_of(shape: str) -> Load:
    return LOADS.get(shape, GPU_LOAD)


def flags_of(shape: str) -> list[str]:
    length = workload.settings_of(shape)["max_model_len"]
    flags = ["--load-format", "dummy", "--max-model-len", str(length)]
    return [*flags, "--disable-uvicorn-access-log"]


def write_tokenizer(shape: str, directory: Path) -> None:
    """One of the shape's size, so that every id has a text: bytes, then words that nothing merges
    to. Streams then do what they do for any model."""
    config = workload.SHAPES[shape]
    specials = {BOS: config["bos_token_id"], EOS: config["eos_token_id"]}
    ids = [i for i in range(config["vocab_size"]) if i not in specials.values()]
    alphabet = tokenizers.byte_alphabet()
    texts = [*alphabet, *("Ġ" + _word(number) for number in range(len(ids) - len(alphabet)))]
    content = tokenizers.tokenizer_json(specials, dict(zip(texts, ids)), [])
    tokenizers.write_tokenizer(directory, content, {"eos_token": EOS, "bos_token": BOS})


def _word(number: int) -> str:
    """Letters, at least two: no byte of the alphabet."""
    letters = ""
    while number or len(letters) < 2:
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return letters


def start(shape: str) -> Server:
    directory = workload.model_directory(shape)
    write_tokenizer(shape, directory)
    server = launch(directory, *flags_of(shape))
    try:
        server.wait_ready(READY_TIMEOUT)
        settle(server)
    except BaseException:
        server.kill()
        raise
    return server


def settle(server: Server) -> None:
    """Waits until the idle engine has captured all its graphs."""
    deadline = time.monotonic() + READY_TIMEOUT
    while server.metrics().get("octavo_graphs_pending", 0):
        assert time.monotonic() < deadline, "graphs are still pending"
        time.sleep(0.1)


def bench_command(url: str, work: list[Work], streams: int, directory: Path) -> list[str]:
    dataset = directory / "prompts.jsonl"
    lines = [json.dumps({"prompt": w.prompt, "output_tokens": w.max_tokens}) for w in work]
    dataset.write_text("\n".join(lines) + "\n")
    return [
        *(sys.executable, "-m", "octavo", "bench", "serve", "--base-url", url),
        *("--dataset-name", "custom", "--dataset-path", str(dataset)),
        *("--num-prompts", str(len(work)), "--max-concurrency", str(streams)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-detailed"),
        *("--result-dir", str(directory), "--result-filename", "result.json"),
    ]


def bench(url: str, work: list[Work], streams: int) -> dict[str, Any]:
    """What ``octavo bench serve`` writes about these requests."""
    with tempfile.TemporaryDirectory() as name:
        command = bench_command(url, work, streams, Path(name))
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
    return found


def offline_rate(shape: str, streams: int, repetitions: int) -> float:
    """Output tokens per second of ``LLM`` on the requests of ``rate``, best of the repetitions."""
    command = [sys.executable, "-m", "benchmarks.gpu.subject", shape, "--rows", "mixed512"]
    command += ["--repetitions", str(repetitions), "--max-num-seqs", str(streams)]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return float(told["output_tokens"] / min(told["seconds"]))


def measure_rate(server: Server, shape: str, repetitions: int) -> dict[str, Any]:
    """Best of the repetitions, each with fresh prompts."""
    scale, vocabulary = workload.scale_of(shape), workload.vocabulary_of(shape)
    streams = load_of(shape).streams
    runs = []
    for repetition in range(repetitions):
        work = workload.mixed(repetition, scale, vocabulary)
        found = bench(server.url, work, streams)
        assert found["failed"] == 0 and found["total_output_tokens"] == sum(
            item.max_tokens for item in work
        )
        runs.append({name: found[name] for name in ("output_throughput", "median_itl_ms")})
    return {"streams": streams, "runs": runs, "best": max(r["output_throughput"] for r in runs)}


async def disturb(url: str, load: Load, vocabulary: int, until: asyncio.Event) -> list[float]:
    """A long prompt every so many seconds; the seconds each took to its one token."""
    rng = np.random.default_rng(7)
    took: list[float] = []

    async def one(session: aiohttp.ClientSession) -> None:
        prompt = rng.integers(workload.FIRST_ID, vocabulary, load.long).tolist()
        began = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()
        took.append(time.perf_counter() - began)

    async with aiohttp.ClientSession() as session:
        under_way = []
        while not until.is_set():
            under_way.append(asyncio.create_task(one(session)))
            try:
                await asyncio.wait_for(until.wait(), load.every)
            except TimeoutError:
                continue
        await asyncio.gather(*under_way)
    return took


async def disturbed(url: str, shape: str, load: Load) -> tuple[dict[str, Any], list[float]]:
    rng = np.random.default_rng(8)
    vocabulary = workload.vocabulary_of(shape)
    prompts = rng.integers(workload.FIRST_ID, vocabulary, (load.streams, load.prompt)).tolist()
    work = [Work(prompt, load.output) for prompt in prompts]
    until = asyncio.Event()
    prompts_task = asyncio.create_task(disturb(url, load, vocabulary, until))
    try:
        found = await asyncio.to_thread(bench, url, work, load.streams)
    finally:
        until.set()
        took = await prompts_task
    return found, took


def gaps_of(detailed: dict[str, Any]) -> np.ndarray:
    """Seconds between the chunks of all streams, from when the last one had its first token: what
    comes before is the streams' own arrival. All were sent at once."""
    firsts = np.array(detailed["ttfts"])
    began = firsts.max()
    kept = []
    for first, gaps in zip(firsts, detailed["itls"]):
        starts = first + np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) if gaps else np.zeros(0)
        kept.append(np.array(gaps)[starts >= began])
    return np.concatenate(kept)


def measure_gaps(server: Server, shape: str) -> dict[str, Any]:
    load = load_of(shape)
    detailed, took = asyncio.run(disturbed(server.url, shape, load))
    gaps = gaps_of(detailed) * 1e3
    median, p99 = float(np.median(gaps)), float(np.percentile(gaps, 99))
    return {
        "streams": load.streams,
        "long_prompt_tokens": load.long,
        "every_seconds": load.every,
        "long_prompts": len(took),
        "long_prompt_seconds": took,
        "gaps": len(gaps),
        "median_ms": median,
        "p99_ms": p99,
        "longest_ms": float(gaps.max()),
        "ratio": p99 / median,
        "at_most": GAP_AT_MOST,
        "met": p99 / median <= GAP_AT_MOST,
        "output_throughput": detailed["output_throughput"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(workload.SHAPES), default="llama-8b")
    parser.add_argument("--only", nargs="*", choices=("rate", "gaps"), default=("rate", "gaps"))
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--save-as", default="gpu_serve", help="name of the file in results/")
    options = parser.parse_args()
    results: dict[str, Any] = {"model": options.model, "gpus": gpus()}
    began = time.monotonic()
    server = start(options.model)
    results["start_seconds"] = time.monotonic() - began  # to the last graph
    try:
        if "rate" in options.only:
            results["rate"] = measure_rate(server, options.model, options.repetitions)
        if "gaps" in options.only:
            results["gaps"] = measure_gaps(server, options.model)
        server.stop()
    finally:
        server.kill()
    if rate := results.get("rate"):
        offline = offline_rate(options.model, rate["streams"], options.repetitions)
        share = rate["best"] / offline
        rate |= {"offline": offline, "share": share, "at_least": RATE_AT_LEAST}
        rate["met"] = share >= RATE_AT_LEAST
        print(f"{rate['best']:.0f} output tok/s, offline {offline:.0f}: {share:.3f}")
    if gaps := results.get("gaps"):
        shown = f"gaps: median {gaps['median_ms']:.2f} ms, p99 {gaps['p99_ms']:.2f} ms"
        print(f"{shown}: {gaps['ratio']:.2f} with {gaps['long_prompts']} long prompts")
    print(f"saved {save(options.save_as, results)}")


if __name__ == "__main__":
    main()
