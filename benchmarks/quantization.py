"""Every way of keeping SmolLM2's weights: what they take, what is lost, how fast it is on this CPU.

    python -m benchmarks.quantization quality [ROW ...]   checkpoints, bits, perplexity, divergence
    python -m benchmarks.quantization speed [ROW ...]     tokens/s at batch 1 and 16, beside BF16
    python -m benchmarks.quantization caches                what a KV cache of 8 bits loses, in FP32
    python -m benchmarks.quantization table               both as a table of docs/quantization.md

Checkpoints are made with `octavo quantize` from the demo model's BF16 twin, once, in DIR (--made).
Quality is measured over the held-out text in BF16, so that what a CPU does with inputs counts.
Speed is measured in turns with BF16, a process each; the ratio is that of medians. Figures go to
benchmarks/results/quantization_{quality,speed}.json, row by row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import RESULTS, ROOT, save
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.evaluate.corpus import read_text
from octavo.flags import from_flags
from octavo.quantize.recipe import Recipe
from tests.fixtures import models

SOURCE = "G-bf16"
BATCHES = {1: (4, 128), 16: (3, 64)}  # repetitions, tokens of each output
PROMPT = 128
console = Console()


@dataclass(frozen=True)
class Row:
    """``recipe``: makes a checkpoint; ``flags``: keeps the BF16 one in that way, with ``head``
    the head as well; ``model``: a fixture that is so already. ``guide``: the row of the guide's
    table it belongs to."""

    guide: str
    recipe: Recipe | None = None
    flags: str | None = None
    model: str | None = None
    head: bool = False


ROWS = {
    "GPTQ 4 bits": Row("GPTQ", Recipe("gptq", bits=4)),
    "GPTQ 4 bits, act-order": Row("GPTQ", Recipe("gptq", bits=4, act_order=True)),
    "GPTQ 3 bits": Row("GPTQ", Recipe("gptq", bits=3)),
    "GPTQ 8 bits": Row("GPTQ", Recipe("gptq", bits=8)),
    "AWQ": Row("AWQ", Recipe("awq")),
    "W4A16": Row("GPTQ", Recipe("w4a16")),
    "fp8": Row("FP8", flags="fp8"),
    "fp8, head too": Row("FP8", flags="fp8", head=True),
    "fp8_per_tensor": Row("FP8", flags="fp8_per_tensor"),
    "fp8_per_block": Row("FP8", flags="fp8_per_block"),
    "int8": Row("INT8", flags="int8"),
    "int8_weight_only": Row("INT8", flags="int8_weight_only"),
    "W8A8": Row("INT8", Recipe("int8")),
    "bitsandbytes NF4": Row("BitsAndBytes", flags="bitsandbytes"),
    "bitsandbytes FP4": Row("BitsAndBytes", Recipe("fp4")),
    "bitsandbytes int8": Row("BitsAndBytes", flags="bitsandbytes_int8"),
    "GGUF Q4_0": Row("GGUF", Recipe("gguf-q4_0")),
    "GGUF Q4_1": Row("GGUF", model="G"),
    "GGUF Q8_0": Row("GGUF", model="G-Q8_0"),
    "SqueezeLLM 3 bits": Row("SqueezeLLM", Recipe("squeezellm", bits=3)),
    "SqueezeLLM 3 bits, sparse": Row("SqueezeLLM", Recipe("squeezellm", bits=3, sparse=True)),
    "SqueezeLLM 4 bits": Row("SqueezeLLM", Recipe("squeezellm", bits=4)),
}


def model_of(name: str, made: Path) -> tuple[str, dict[str, Any]]:
    """What to load, with which flags; a checkpoint is made where it is not there yet."""
    row = ROWS[name]
    if row.model is not None:
        return str(models.path(row.model)), {}
    if row.flags is not None:
        flags: dict[str, Any] = {"quantization": row.flags}
        return str(models.path(SOURCE)), flags | ({"quantize_head": True} if row.head else {})
    assert row.recipe is not None
    path = made / name.replace(" ", "-").replace(",", "").lower()
    if not path.exists():
        _make(path, row.recipe)
    files = sorted(path.glob("*.gguf"))
    return str(files[0] if files else path), {}


def _make(path: Path, recipe: Recipe) -> None:
    from octavo.quantize.command import quantize
    from octavo.quantize.run import CalibrationText

    content, name = read_text(None, "calibration")
    source = "G-F16" if recipe.kind.gguf else SOURCE
    config = from_flags(EngineConfig, {"model": str(models.path(source))})
    console.print(f"making {path}")
    text = CalibrationText(name, content, 8192)
    quantize(config, path, recipe.checked(), text, "cpu", lambda *news: None)


def quality(names: list[str], made: Path, tokens: int) -> None:
    from octavo.evaluate.evaluate import Text, evaluate

    content, text_name = read_text(None, "heldout")
    against = from_flags(EngineConfig, {"model": str(models.path(SOURCE)), "dtype": "bfloat16"})
    for name in names:
        path, flags = model_of(name, made)
        config = from_flags(EngineConfig, {"model": path, "dtype": "bfloat16", **flags})
        text = Text(text_name, content, max_tokens=tokens)
        report = evaluate(config, against, text, lambda *news: None, "cpu")
        scored, other, found = report.model, report.against, report.comparison
        assert other is not None and found is not None
        figures = {
            "guide": ROWS[name].guide,
            "bits_per_weight": scored.sizes.bits_per_weight,
            "linear_mib": scored.sizes.linear_bytes / 2**20,
            "linear_share_of_bf16": scored.sizes.linear_bytes / other.sizes.linear_bytes,
            "other_mib": scored.sizes.other_bytes / 2**20,
            "perplexity": scored.perplexity,
            "perplexity_of_bf16": other.perplexity,
            **asdict(found),
            "tokens": report.num_tokens,
        }
        console.print(name, figures)
        _add("quantization_quality", name, figures)


def caches(tokens: int) -> None:
    """Against the cache as it is computed, over as many tokens of the held-out text."""
    from octavo.evaluate.evaluate import Text, evaluate

    content, text_name = read_text(None, "heldout")
    flags = {"model": str(models.path(SOURCE)), "dtype": "float32"}
    against, text = from_flags(EngineConfig, flags), Text(text_name, content, max_tokens=tokens)
    for kind in ("int8", "fp8", "fp8_e5m2"):
        config = from_flags(EngineConfig, {**flags, "kv_cache_dtype": kind})
        report = evaluate(config, against, text, lambda *news: None, "cpu")
        assert report.comparison is not None
        figures = {**asdict(report.comparison), "tokens": report.num_tokens}
        console.print(kind, figures)
        _add("quantization_caches", kind, figures)


def speed(names: list[str], made: Path) -> None:
    """Each row's process stands between two of BF16's, with whose mean it is compared."""
    before = _told("BF16", made)
    for name in names:
        own, after = _told(name, made), _told("BF16", made)
        figures: dict[str, Any] = {}
        for key, rates in own.items():
            median = statistics.median(rates)
            sides = [statistics.median(side[key]) for side in (before, after)]
            base = statistics.mean(sides)
            figures[key] = {
                "tokens_per_s": median,
                "bf16_tokens_per_s": base,
                "ratio": median / base,
                "all": {"row": rates, "bf16 before": before[key], "bf16 after": after[key]},
            }
        before = after
        console.print(name, {key: round(value["ratio"], 2) for key, value in figures.items()})
        _add("quantization_speed", name, figures)


def _told(name: str, made: Path) -> dict[str, list[float]]:
    """What a process of its own measured: two engines in one would share the cores' threads."""
    path, flags = (str(models.path(SOURCE)), {}) if name == "BF16" else model_of(name, made)
    command = [sys.executable, "-m", "benchmarks.quantization", "subject", path, json.dumps(flags)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, list[float]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def subject(path: str, flags: dict[str, Any]) -> None:
    rates: dict[str, list[float]] = {}
    llm = LLM(path, dtype="bfloat16", max_num_seqs=16, **flags)
    for batch, (repetitions, tokens) in BATCHES.items():
        found = [_rate(llm, batch, tokens, seed) for seed in range(repetitions + 1)]
        rates[f"batch {batch}"] = found[1:]  # the first one warms up
    llm.close()
    print(json.dumps(rates))


def _rate(llm: LLM, batch: int, tokens: int, seed: int) -> float:
    """Output tokens/s while all decode, from the first token on."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(batch)]
    times = []
    for count in (1, tokens):
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - begin)
        llm.reset_prefix_cache()
    return batch * (tokens - 1) / (times[1] - times[0])


def _add(name: str, row: str, figures: dict[str, Any]) -> None:
    file = RESULTS / f"{name}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    save(name, {"rows": {**rows, row: figures}})


def table() -> None:
    lost = json.loads((RESULTS / "quantization_quality.json").read_text())["rows"]
    speeds = json.loads((RESULTS / "quantization_speed.json").read_text())["rows"]
    print("| | bits | MiB (× BF16) | perplexity | KL, mean | tokens/s × BF16: batch 1 | 16 |")
    print("|---|---|---|---|---|---|---|")
    for name in (name for name in ROWS if name in lost):
        row = lost[name]
        ratios = [speeds.get(name, {}).get(f"batch {batch}") for batch in BATCHES]
        shown = [
            f"{found['tokens_per_s']:.0f} ({found['ratio']:.2f})" if found else "–"
            for found in ratios
        ]
        print(
            f"| {name} | {row['bits_per_weight']:.2f} | {row['linear_mib']:.0f} "
            f"({row['linear_share_of_bf16']:.2f}) | × {row['perplexity_ratio']:.4f} "
            f"| {row['kl_mean']:.4f} | {' | '.join(shown)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("quality", "speed", "caches", "table", "subject"))
    parser.add_argument("rows", nargs="*", help="(default: all)")
    parser.add_argument("--made", type=Path, default=models.ROOT / "quantized")
    parser.add_argument("--tokens", type=int, default=16384, help="of the held-out text")
    options = parser.parse_args()
    if options.what == "subject":
        path, flags = options.rows
        return subject(path, json.loads(flags))
    names = options.rows or list(ROWS)
    if unknown := set(names) - set(ROWS):
        parser.error(f"no rows {sorted(unknown)}; there are {', '.join(ROWS)}")
    if options.what == "quality":
        quality(names, options.made, options.tokens)
    elif options.what == "caches":
        caches(options.tokens)
    elif options.what == "speed":
        speed(names, options.made)
    else:
        table()


if __name__ == "__main__":
    main()
