"""Perplexity of a model on the held-out text, for each way of keeping its weights, and how far each
way is from the first of its group.

    python -m benchmarks.perplexity [--chunk 1024] [--save]

With --save writes benchmarks/results/perplexity.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from octavo.checkpoint.catalogue import silent
from octavo.config import EngineConfig
from octavo.evaluate.corpus import read_text
from octavo.evaluate.evaluate import Text, evaluate
from octavo.evaluate.report import Report
from octavo.flags import from_flags
from octavo.quant import rounding
from tests.fixtures import models

console = Console()

# Name -> fixture and the flags it is loaded with; ``group``: inputs of an int8 group, for once. The
# first of a group is what others of it are compared with.
Ways = dict[str, tuple[str, dict[str, Any]]]
GROUPS: list[Ways] = [
    {
        "BF16 checkpoint, FP32": ("G-bf16", {"dtype": "float32"}),
        "BF16": ("G-bf16", {"dtype": "bfloat16"}),
        "BF16, cache in int8": ("G-bf16", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        "BF16, cache in E4M3": ("G-bf16", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        "BF16, cache in E5M2": ("G-bf16", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}),
        "int8, BF16": ("G-bf16", {"dtype": "bfloat16", "quantization": "int8"}),
        "int8, FP32": ("G-bf16", {"dtype": "float32", "quantization": "int8"}),
        "int8 in groups of 32, BF16": ("G-bf16", {"dtype": "bfloat16", "group": 32}),
        "int8 in groups of 128, BF16": ("G-bf16", {"dtype": "bfloat16", "group": 128}),
        "int8 by channel and token, BF16": ("G-bf16", {"dtype": "bfloat16", "group": 1536}),
    },
    {
        "Q4_1 checkpoint, expanded to FP32": ("G", {"dtype": "float32"}),
        "Q4_1 groups, BF16": ("G", {"dtype": "bfloat16"}),
        "Q4_1 groups, FP32": ("G", {"dtype": "float32", "quantization": "gguf"}),
    },
]


def compared(ways: Ways, name: str, text: Text) -> Report:
    """One of the ways, against the first of them."""
    usual = rounding.GROUP
    model, flags = ways[name]
    flags = dict(flags)
    first_model, first_flags = next(iter(ways.values()))
    against = config_of(first_model, first_flags)
    if group := flags.pop("group", None):
        rounding.GROUP, flags["quantization"] = group, "int8"
    try:
        return evaluate(config_of(model, flags), against, text, silent)
    finally:
        rounding.GROUP = usual


def config_of(model: str, flags: dict[str, Any]) -> EngineConfig:
    return from_flags(EngineConfig, {"model": str(models.path(model)), **flags})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, default=1024, choices=(256, 512, 1024, 2048))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    text = Text(name="heldout.txt", content=read_text(None, "heldout")[0], chunk=options.chunk)
    table = Table("weights and arithmetic", "perplexity", "ratio", "KL divergence")
    for ways in GROUPS:
        for name in ways:
            report = compared(ways, name, text)
            difference = report.comparison
            assert difference is not None
            found[name] = report.as_json()
            row = (report.model.perplexity, difference.perplexity_ratio, difference.kl_mean)
            table.add_row(name, f"{row[0]:.3f}", f"{row[1]:.4f}", f"{row[2]:.5f}")
            console.print(f"{name}: {row[0]:.3f} over {report.num_tokens:,} tokens")
    console.print(table)
    if options.save:
        console.print(f"saved {save('perplexity', {'weights': found})}")


if __name__ == "__main__":
    main()
