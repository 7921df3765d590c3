"""Where a measurement was made, and where its figures go."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.machine import available_cores

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Commit, machine, versions and command of this run."""
    packages = ("torch", "triton", "transformers", "tokenizers", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _commit(),
        "command": f"python -m {_module()} {' '.join(sys.argv[1:])}".strip(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def gpus() -> list[str]:
    """Name, memory and driver of each GPU of this machine."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return answer.stdout.strip().splitlines()


def cpu_name() -> str:
    """The model's name and what matters of its instruction sets."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    flags = facts.get("flags", "").split()
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{facts.get('model name', 'unknown').strip()} ({' '.join(known)})"


def save(name: str, figures: dict[str, Any]) -> Path:
    """benchmarks/results/NAME.json, with the environment first."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"environment": environment(), **figures}, indent=1) + "\n")
    return file


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _module() -> str:
    parts = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__main__")


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"

    def ask(*words: str) -> str:
        answer = subprocess.run([git, *words], cwd=ROOT, capture_output=True, text=True)
        return answer.stdout.strip()

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", "octavo")
    return (ask("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changed else "")
