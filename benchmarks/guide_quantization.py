"""The guide's table of quantizations, row by row, from what benchmarks/quantization.py (a CPU,
SmolLM2) and benchmarks/gpu/quantized.py (an H200, Llama-8B's shape) kept."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.report import RESULTS

# The guide's row: memory, speed and quality there; rows of ours on a CPU and on a GPU; a verdict.
ROWS: dict[str, tuple[str, list[str], list[str], str]] = {
    "GPTQ": (
        "4 or 8 bits, about 0.3× memory, slight loss, 1.1× speed",
        ["GPTQ 4 bits", "GPTQ 8 bits"],
        ["gptq"],
        "true of memory; of speed where reading weights is the limit (few rows), not where "
        "arithmetic is (prompts, many rows: weights are expanded first)",
    ),
    "AWQ": (
        "4 bits, about 0.3× memory, better than GPTQ, 1.2× speed",
        ["AWQ"],
        ["awq"],
        "true of memory; the speed as GPTQ's, for the numbers are stored alike",
    ),
    "FP8": (
        "0.5× memory, nearly lossless, 2.0× speed, where the hardware multiplies it",
        ["fp8"],
        ["fp8"],
        "true of memory, nearly of quality; twice the speed is not true here, because attention, "
        "the head and all else are no faster (vLLM 0.26's own FP8: 1.30 to 1.46×)",
    ),
    "INT8": (
        "arithmetic in INT8 doubles the throughput",
        ["int8"],
        ["int8"],
        "not true here, because a step's bytes and its other work do not halve",
    ),
    "BitsAndBytes": (
        "8 or 4 bits, 0.5× or 0.3× memory, 0.7× speed",
        ["bitsandbytes NF4", "bitsandbytes int8"],
        ["bitsandbytes"],
        "true of memory; on this CPU NF4 is faster than BF16 with one request, slower with many",
    ),
    "GGUF": (
        "many types, what llama.cpp's ecosystem has",
        ["GGUF Q4_1", "GGUF Q8_0"],
        [],
        "true",
    ),
    "SqueezeLLM": (
        "3 bits, about 0.2× memory, good quality, slow",
        ["SqueezeLLM 3 bits", "SqueezeLLM 3 bits, sparse"],
        ["squeezellm-3"],
        "true of memory and of slow; a model this small loses much more than the word says",
    ),
}


def claims() -> list[dict[str, Any]]:
    """As ``Claim``; rows without figures are left out."""
    quality, speed = (_rows(f"quantization_{name}", "rows") for name in ("quality", "speed"))
    gpu = _rows("gpu_quantized", "ways")
    found = []
    for name, (guide, of_cpu, of_gpu, verdict) in ROWS.items():
        parts = [_on_cpu(row, quality[row], speed.get(row)) for row in of_cpu if row in quality]
        parts += [_on_gpu(way, gpu[way]) for way in of_gpu if way in gpu]
        if parts:
            measured = "; ".join(parts)
            found.append(
                {"topic": f"{name}", "guide": guide, "measured": measured, "verdict": verdict}
            )
    return found


def _rows(name: str, key: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    rows: dict[str, Any] = json.loads(file.read_text())[key] if file.exists() else {}
    return rows


def _on_cpu(name: str, quality: dict[str, Any], speed: dict[str, Any] | None) -> str:
    text = (
        f"{name} (SmolLM2, CPU): {quality['linear_share_of_bf16']:.2f}× memory of linears, "
        f"perplexity × {quality['perplexity_ratio']:.3f}"
    )
    if speed is not None:
        ratios = (f"{speed[f'batch {rows}']['ratio']:.2f}×" for rows in (1, 16))
        text += f", speed {' and '.join(ratios)} at batch 1 and 16"
    return text


def _on_gpu(name: str, figures: dict[str, Any]) -> str:
    ratios = ", ".join(
        f"{row['times_bf16']:.2f}× ({key})"
        for key, row in figures["rows"].items()
        if "times_bf16" in row
    )
    return f"{name} (Llama-8B's shape, H200): {ratios}"
