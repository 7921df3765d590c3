"""What ``octavo serve`` prints while it starts and when it is ready."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TextIO

from octavo import __version__, logs
from octavo.cli.console import LOG_SECONDS, PhaseLine, size, table
from octavo.engine.messages import EngineInfo
from octavo.machine import process_age

_WATERFALL = 32
FIRST_PART = "interpreter and imports"
ENGINE_PART = "engine"  # the server waits for it


class StartupLog:
    """Phases as they happen, then the waterfall, the effective configuration and the address; with
    ``json_lines`` the same as JSON log lines."""

    def __init__(self, model: str, stream: TextIO | None = None, json_lines: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.model = model
        self._json = json_lines
        self._parts = {FIRST_PART: process_age()}  # what this process did, in order -> seconds
        self._began = self._parts[FIRST_PART]
        self._part = "finding the model"
        line = PhaseLine(self.stream)
        self.progress: PhaseLine | JSONPhases = JSONPhases(self._tell) if json_lines else line
        text = f"octavo {__version__} · {model}"
        self._tell(text, version=__version__, model=model)

    def enter(self, part: str) -> None:
        """This process goes on to another part of its start."""
        now = process_age()
        self._parts[self._part] = self._parts.get(self._part, 0.0) + now - self._began
        self._part, self._began = part, now

    def ready(self, info: EngineInfo, address: str) -> None:
        """``address``: what a client connects to, ``http://host:port`` or ``unix:PATH``."""
        self.progress.end()
        self.enter("")
        total = self._began
        phases = startup_phases(self._parts, info.startup_seconds, total)
        if self._json:
            self._tell(
                f"ready in {total:.1f} s",
                seconds=total,
                phases={name: round(seconds, 3) for name, seconds in phases.items()},
                configuration={name: value for name, value, _ in settings(info)},
                reasons=info.reasons,
                implementations=info.implementations,
                address=address,
            )
            return
        lines = ["", f"ready in {total:.1f} s", *waterfall(phases, total), ""]
        lines += ["configuration (and why, where it was not asked for)", configuration(info), ""]
        lines += [f"listening on {address}", "try:", f"  {curl(address, self.model)}", ""]
        self._tell("\n".join(lines))

    def _tell(self, text: str, **fields: object) -> None:
        """``fields``: what a JSON line has besides the text."""
        written = logs.line("INFO", "server", text, fields) if self._json else text
        print(written, file=self.stream, flush=True)


class JSONPhases:
    """A ``types.Progress`` that tells when a phase begins, and every ten seconds while it lasts."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._phase = ""
        self._told = 0.0

    def __call__(self, phase: str, fraction: float, num_bytes: int = 0) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._told < LOG_SECONDS:
            return
        self._phase, self._told = phase, now
        known = {"fraction": round(fraction, 4)} if fraction >= 0 else {}
        if num_bytes:
            known["num_bytes"] = num_bytes
        self._tell(phase, phase=phase, **known)

    def end(self) -> None:
        """Nothing is left open."""


def startup_phases(
    parts: dict[str, float], engine: dict[str, float], total: float
) -> dict[str, float]:
    """What took the start's seconds, in order: what the server did before the engine was started,
    the engine's phases, what came after, and "other": what nobody has measured."""
    names = list(parts)
    at = names.index(ENGINE_PART) if ENGINE_PART in parts else len(names)
    before = {name: parts[name] for name in names[:at]}
    after = {name: parts[name] for name in names[at + 1 :]}
    phases = {**before, **engine, **after}
    return {**phases, "other": max(0.0, total - sum(phases.values()))}


def waterfall(phases: dict[str, float], total: float) -> list[str]:
    """A line per phase: seconds, and a bar that starts where the phase before it ended."""
    rows = []
    begin = 0.0
    for name, seconds in phases.items():
        start = round(begin / total * _WATERFALL)
        width = max(1, round(seconds / total * _WATERFALL))
        rows.append((name, f"{seconds:6.2f} s", " " * start + "█" * width))
        begin += seconds
    return table(rows).splitlines()


def configuration(info: EngineInfo) -> str:
    """What the engine runs with, and why."""
    rows = settings(info)
    rows += [(f"op {name}", chosen, "") for name, chosen in info.implementations.items()]
    return table(rows)


def settings(info: EngineInfo) -> list[tuple[str, str, str]]:
    """(name, value, reason) of each."""
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
    return rows


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
