"""``octavo bench startup``: from the start of the server's process to the first token it serves."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.locate import locate
from octavo.cli.arguments import Arguments, Command, to_tokens
from octavo.cli.console import CountLine, PhaseLine, table
from octavo.cli.local_server import local_server
from octavo.config import EngineConfig
from octavo.flags import flag


@dataclass(frozen=True)
class StartupOptions:
    num_iters: int = flag(5, "starts", group="startup", top=True, minimum=1)
    output_json: str | None = flag(None, "write the figures to this file", group="startup")


COMMAND = Command(
    "bench startup",
    "Starts a server several times and reports the seconds to its first token. The first start "
    "may read the model from the disk; later ones find it in the page cache.",
    (StartupOptions, EngineConfig),
    examples=("octavo bench startup smollm2-135m --num-iters 5",),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(StartupOptions)
    config = arguments.build(EngineConfig)
    fetch = PhaseLine()
    locate(config.model.model, config.model.revision, progress=fetch)  # not part of a start
    fetch.end()
    tokens = to_tokens(EngineConfig, arguments.values)
    progress = CountLine(options.num_iters, "starts")
    seconds: list[float] = []
    for i in range(options.num_iters):
        seconds.append(start_once(tokens))
        progress.show(i + 1)
    rows = [(f"start {i + 1}", f"{value:.2f} s") for i, value in enumerate(seconds)]
    rows += [("median", f"{statistics.median(seconds):.2f} s"), ("best", f"{min(seconds):.2f} s")]
    print(table(rows))
    if options.output_json:
        figures = {"seconds": seconds, "median": statistics.median(seconds), "best": min(seconds)}
        Path(options.output_json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def start_once(tokens: list[str]) -> float:
    """Seconds until one token has come back from a fresh server."""
    begin = time.perf_counter()
    with local_server(tokens) as connection:
        body = {"model": connection.served_model(), "prompt": "Hello", "max_tokens": 1}
        for _ in connection.stream("/v1/completions", body):
            return time.perf_counter() - begin
    raise AssertionError("a stream without events raises")
