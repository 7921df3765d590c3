"""What ``octavo serve`` prints while it starts and when it is ready."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from octavo import __version__
from octavo.cli.console import PhaseLine, process_age, size, table
from octavo.engine.messages import EngineInfo

_WATERFALL = 32


class StartupLog:
    """Phases as they happen, then the waterfall, the effective configuration and the address."""

    def __init__(self, model: str, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.model = model
        self.progress = PhaseLine(self.stream)
        self._print(f"octavo {__version__} · {model}")

    def ready(self, info: EngineInfo, address: str) -> None:
        """``address``: what a client connects to, ``http://host:port`` or ``unix:PATH``."""
        self.progress.end()
        total = process_age()
        lines = ["", f"ready in {total:.1f} s", *waterfall(info.startup_seconds, total), ""]
        lines += ["configuration (and why, where it was not asked for)", configuration(info), ""]
        lines += [f"listening on {address}", "try:", f"  {curl(address, self.model)}", ""]
        self._print("\n".join(lines))

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


def waterfall(phases: dict[str, float], total: float) -> list[str]:
    """A line per phase: seconds, and a bar that starts where the phase before it ended.

    What is not in ``phases`` (interpreters, imports, HTTP) is one line, so that the sum is total.
    """
    rest = max(0.0, total - sum(phases.values()))
    rows = []
    begin = 0.0
    for name, seconds in {"processes and imports": rest, **phases}.items():
        start = round(begin / total * _WATERFALL)
        width = max(1, round(seconds / total * _WATERFALL))
        rows.append((name, f"{seconds:6.2f} s", " " * start + "█" * width))
        begin += seconds
    return table(rows).splitlines()


def configuration(info: EngineInfo) -> str:
    """name, value, reason: what the engine runs with."""
    kv_tokens = info.num_blocks * info.block_size
    values = {
        "architecture": info.architecture,
        "device": info.device,
        "dtype": info.dtype,
        "weights": size(info.weight_bytes),
        "max_model_len": f"{info.max_model_len:,} tokens",
        "block_size": f"{info.block_size} tokens",
        "kv_cache_memory_bytes": (
            f"{size(info.kv_cache_bytes)} = {info.num_blocks:,} blocks = {kv_tokens:,} tokens"
        ),
        "max_num_seqs": f"{info.max_num_seqs:,}",
        "max_num_batched_tokens": f"{info.max_num_batched_tokens:,}",
    }
    if info.device_kind == "cpu":
        values["device"] += f", {info.threads} threads"
    if info.default_sampling:
        values["sampling defaults"] = json.dumps(info.default_sampling)
    rows = [(name, value, info.reasons.get(name, "")) for name, value in values.items()]
    rows += [(name, *_kept(name, why)) for name, why in info.reasons.items() if name not in values]
    rows += [(f"op {name}", chosen, "") for name, chosen in info.implementations.items()]
    return table(rows)


def _kept(name: str, reason: str) -> tuple[str, str]:
    """What weights or cache are kept in, which begins the reason, and the rest of it."""
    if name not in ("quantization", "kv_cache_dtype") or ": " not in reason:
        return "", reason
    value, _, why = reason.partition(": ")
    return value, why


def curl(address: str, model: str) -> str:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    )
    unix = address.removeprefix("unix:")
    target = f"--unix-socket {unix} http://localhost" if unix != address else address
    return f"curl -N {target}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
