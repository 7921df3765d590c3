"""Perplexity of a model on this project's own documentation, for each way of keeping its weights.

    python -m benchmarks.perplexity [--chunk 1024] [--save]

Text is what it is: technical English that no model has seen. What counts is the ratio between two
ways on the same tokens. With --save writes benchmarks/results/perplexity.json.
"""

from __future__ import annotations

import argparse
import gc
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from octavo import LLM, SamplingParams
from octavo.quant import int8
from tests.fixtures import models

DOCS = Path(__file__).parents[1] / "docs"
console = Console()

# Name -> fixture and the flags it is loaded with; ``group``: inputs of an int8 group, for once. The
# first of a group is what others of it are compared with.
GROUPS: list[dict[str, tuple[str, dict[str, Any]]]] = [
    {
        "BF16 checkpoint, FP32": ("G-bf16", {"dtype": "float32"}),
        "BF16": ("G-bf16", {"dtype": "bfloat16"}),
        "BF16, cache in int8": ("G-bf16", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
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


def perplexity(model: str, flags: dict[str, Any], chunk: int) -> tuple[float, int]:
    """Over whole chunks of so many tokens, each scored from its second token on."""
    flags, usual = dict(flags), int8.GROUP
    if group := flags.pop("group", None):
        int8.GROUP, flags["quantization"] = group, "int8"
    llm = LLM(str(models.path(model)), **flags)
    int8.GROUP = usual
    try:
        text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
        ids = llm.get_tokenizer().encode(text)
        chunks = [ids[i : i + chunk] for i in range(0, len(ids) - chunk + 1, chunk)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        total, count = 0.0, 0
        for output in llm.generate(chunks, params, use_tqdm=False):
            scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
            total += sum(found[token].logprob for token, found in scored)
            count += chunk - 1
        return math.exp(-total / count), count
    finally:
        llm.close()
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, default=1024, choices=(256, 512, 1024, 2048))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    table = Table("weights and arithmetic", "perplexity", "ratio")
    for group in GROUPS:
        first = 0.0
        for name, (model, flags) in group.items():
            value, count = perplexity(model, flags, options.chunk)
            first = first or value
            found[name] = {"perplexity": value, "ratio": value / first, "tokens": count}
            table.add_row(name, f"{value:.3f}", f"{value / first:.4f}")
            console.print(f"{name}: {value:.3f} over {count:,} tokens")
    console.print(table)
    if options.save:
        console.print(f"saved {save('perplexity', {'weights': found})}")


if __name__ == "__main__":
    main()
