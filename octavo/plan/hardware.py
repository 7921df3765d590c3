"""Devices that a plan can be made for: what their data sheets promise, and what of it was reached.

Peaks and link rates are data-sheet figures. Efficiencies are shares of them that octavo reached on
the one machine where it was measured (benchmarks/results/gpu.json and gpu_quantized.json: an H200,
Llama-3.1-8B's shape); for every other device they are an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MEASURED = "h200"
# What a process's CUDA context holds before anything else: 526.8 MiB on the H200.
CONTEXT_BYTES = 527 << 20
# Buffers of NCCL for a rank that talks to others: assumed.
NCCL_BYTES = 512 << 20


@dataclass(frozen=True)
class Gpu:
    """``memory_bytes``: as CUDA shows it. ``bytes_per_second``: of its memory. ``flops``: of 16-bit
    products with FP32 sums, a second; ``flops8``: of FP8, None where it has none. ``link``: its way
    to others of its host; ``link_bytes``: a second in one direction; ``link_seconds``: of an
    all-reduce of nothing. 0: not known."""

    name: str
    memory_bytes: int
    bytes_per_second: float = 0.0
    flops: float = 0.0
    flops8: float | None = None
    link: str = "unknown"
    link_bytes: float = 0.0
    link_seconds: float = 0.0

    @property
    def has_rates(self) -> bool:
        return self.bytes_per_second > 0

    @property
    def has_nvlink(self) -> bool:
        return self.link == "NVLink"


def _nvlink(rate: float) -> tuple[str, float, float]:
    return "NVLink", rate, 12e-6


_PCIE = ("PCIe 4.0 x16", 26e9, 30e-6)

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", int(139.80 * GIB), 4.8e12, 989e12, 1979e12, *_nvlink(450e9)),
        Gpu("h100", int(79.1 * GIB), 3.35e12, 989e12, 1979e12, *_nvlink(450e9)),
        Gpu("a100", int(79.1 * GIB), 2.04e12, 312e12, None, *_nvlink(300e9)),
        Gpu("l40s", int(44.4 * GIB), 0.864e12, 362e12, 733e12, *_PCIE),
        Gpu("l4", int(22.0 * GIB), 0.300e12, 121e12, 242e12, *_PCIE),
        Gpu("4090", int(23.5 * GIB), 1.008e12, 165e12, 330e12, *_PCIE),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks: ``memory`` while decoding, ``compute`` while reading a prompt.
    ``source``: what they were computed from."""

    memory: float
    compute: float
    source: str


# By how weights are kept. Each is (bytes or FLOPs that the model counts) / peak / measured time.
EFFICIENCIES = {
    "16-bit": Efficiency(0.81, 0.64, "260 tokens/s at batch 1, 8,192 tokens in 207 ms"),
    "fp8": Efficiency(0.65, 0.53, "384 tokens/s at batch 1, 8,192 tokens in 143 ms"),
    "awq": Efficiency(0.46, 0.65, "472 tokens/s at batch 1, 8,192 tokens in 204 ms"),
    "gptq": Efficiency(0.50, 0.48, "507 tokens/s at batch 1, 8,192 tokens in 275 ms"),
}


def efficiency_of(kept: str | None) -> tuple[str, Efficiency, bool]:
    """(which row, the row, whether it was measured for this format) for weights kept as ``kept``
    (``--quantization``'s names, None: dense)."""
    name = "16-bit" if kept is None else kept
    if name in EFFICIENCIES:
        return name, EFFICIENCIES[name], True
    if name.startswith(("fp8", "int8")) or name == "compressed-tensors":
        return "fp8", EFFICIENCIES["fp8"], False
    return "gptq", EFFICIENCIES["gptq"], False
