"""``octavo collect-env``: the facts a bug report needs, and nothing private."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from octavo import __version__
from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import size, table
from octavo.config import kernel_cache_dir, model_cache_dir
from octavo.flags import flag
from octavo.machine import available_cores, available_memory

_PACKAGES = (
    *("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "huggingface-hub"),
    *("jinja2", "fastapi", "pydantic", "uvicorn", "uvloop", "httptools", "msgspec", "pyzmq"),
    *("prometheus-client", "transformers"),
)
# Instruction sets that decide which CPU code is fast.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True)
class CollectOptions:
    json: bool = flag(False, "print JSON", group="collect-env")


COMMAND = Command(
    "collect-env", "Prints facts about this machine for a bug report.", (CollectOptions,)
)


def run(arguments: Arguments) -> int:
    facts = collect()
    if arguments.build(CollectOptions).json:
        print(json.dumps(facts, indent=2))
    else:
        print(table(list(facts.items()), indent=""))
    return 0


def collect() -> dict[str, str]:
    facts = {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu(),
        "cores": f"{available_cores()} usable",
        "memory": f"{size(available_memory())} free",
        "cpu kernels": "built" if find_spec("octavo.ops.native.kernels") else "not built",
        "gpus": _gpus(),
        "model cache": "present" if model_cache_dir().is_dir() else "empty",
        "kernel cache": _kernels(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _cpu() -> str:
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    info = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = info.get("flags", "").split()
    found = [name for name in _CPU_FLAGS if name in flags]
    return f"{info.get('model name', 'unknown')} ({' '.join(found) or 'no AVX2'})"


def _kernels() -> str:
    """How many GPU kernels have been compiled, and what they take."""
    directory = kernel_cache_dir()
    if directory is None:
        return "Triton's own: octavo's cannot be written"
    files = [path for path in directory.rglob("*") if path.is_file()]
    count = sum(path.suffix == ".cubin" for path in files)
    return f"{count} kernels, {size(sum(path.stat().st_size for path in files))}"


def _gpus() -> str:
    if not shutil.which("nvidia-smi"):
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return "; ".join(answer.stdout.strip().splitlines()) or answer.stderr.strip()
