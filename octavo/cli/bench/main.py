"""``octavo bench WHAT``: measurements of a server or of the engine alone."""

from __future__ import annotations

import difflib
from importlib import import_module

from octavo.cli.main import run_command
from octavo.types import ConfigError

BENCHMARKS = {
    "serve": ("octavo.cli.bench.serve", "load on any OpenAI-compatible server: rates, latencies"),
    "throughput": ("octavo.cli.bench.throughput", "tokens per second of the engine, offline"),
    "latency": ("octavo.cli.bench.latency", "seconds of one batch, offline"),
    "startup": ("octavo.cli.bench.startup", "process start to first token served"),
}


def main(tokens: list[str]) -> int:
    name = tokens[0] if tokens else "--help"
    if name.partition("=")[0] == "--help" or name == "-h":
        print("usage: octavo bench WHAT [flags]\n")
        for what, (_, summary) in BENCHMARKS.items():
            print(f"  octavo bench {what:<12}{summary}")
        print("\noctavo bench WHAT --help shows the flags.")
        return 0
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(BENCHMARKS)}"
        raise ConfigError(f"unknown benchmark {name!r}{hint}")
    return run_command(import_module(BENCHMARKS[name][0]), tokens[1:])
