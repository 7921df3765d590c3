"""Ways of keeping Llama-8B's weights on one GPU: memory and speed, each beside BF16 in one run.

    python -m benchmarks.gpu.quantized [--kept fp8 gptq …] [--rows bs1 bs8 mixed512 prefill8k]

Random weights; one process for each way, the first is BF16's; best of the repetitions. Beside FP8's
figures stand vLLM 0.26.0's on an H200. Writes benchmarks/results/gpu_quantized.json, of which what
was not measured this time is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from benchmarks.gpu.__main__ import figures, subject
from benchmarks.gpu.workload import ROWS, SCHEMES, Bar
from benchmarks.report import RESULTS, gpus, save
from octavo.quant.rounding import roundings

NAME = "gpu_quantized"
FP8 = {
    "bs1": Bar(286, 390, 416),
    "bs8": Bar(1880, 2200, 2330),
    "mixed512": Bar(12772, 14000, 15500),
    "prefill8k": Bar(0.144, 0.140, 0.131),
}
INT4 = {"bs1": Bar(286, 500, 537)}  # beside vLLM's FP8: its INT4 was not measured
VARIANTS = {  # further flags
    "fp8+head": ("fp8", "--quantize-head"),
    "fp8+kv": ("fp8", "--kv-cache-dtype", "fp8"),
    "bf16+kv": ("bf16", "--kv-cache-dtype", "fp8"),
}
console = Console(width=None if sys.stdout.isatty() else 140)


def measure(way: str, shape: str, rows: list[str], repetitions: int) -> dict[str, Any]:
    kept, *flags = VARIANTS.get(way, (way,))
    told = subject(shape, repetitions, rows, "--kept", kept, *flags)
    found: dict[str, Any] = {**next(told), "rows": {}}
    bars = FP8 if way.startswith("fp8") else INT4 if way in ("gptq", "awq") else {}
    by_name = {row.name: row for row in ROWS}
    for facts in told:
        row = by_name[facts.pop("row")]
        entry = figures(row, facts, bars.get(row.name))
        found["rows"][row.name] = entry
        console.print(f"{way} {row.title}: {entry['best']:.4g} {entry['unit']}")
    return found


def main() -> None:
    ways = ["bf16", *roundings("cuda"), *SCHEMES, *VARIANTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kept", nargs="*", choices=ways, default=["fp8", "gptq", "awq"])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=names, default=names[:4], metavar="ROW")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    file = RESULTS / f"{NAME}.json"
    kept = json.loads(file.read_text())["ways"] if file.exists() else {}
    for way in ["bf16", *(way for way in options.kept if way != "bf16")]:
        kept[way] = measure(way, options.shape, options.rows, options.repetitions)
        for name, entry in kept[way]["rows"].items():
            base = kept["bf16"]["rows"].get(name)
            if base:
                ratio = entry["best"] / base["best"]
                entry["times_bf16"] = ratio if "tok" in entry["unit"] else 1 / ratio
        console.print(save(NAME, {"gpus": gpus(), "ways": kept}))


if __name__ == "__main__":
    main()
