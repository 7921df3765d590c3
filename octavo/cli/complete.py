"""``octavo complete``: the model continues a text, streamed as it is made."""

from __future__ import annotations

import sys

from octavo.cli.arguments import Arguments, Command
from octavo.cli.asking import AskOptions, asked_server, lines_from_user, sampling_fields
from octavo.config import EngineConfig

COMMAND = Command(
    "complete",
    "Continues a text with a model: of a running server, or of one started here when MODEL is "
    "named. Without -q each line typed is a text; Ctrl-D ends.",
    (AskOptions, EngineConfig),
    examples=('octavo complete smollm2-135m -q "Once upon a time"',),
    migrating=True,
)


def run(arguments: Arguments) -> int:
    options = arguments.build(AskOptions)
    with asked_server(arguments, options) as (connection, model):
        body = {"model": model, **sampling_fields(options)}
        prompts = [options.quick] if options.quick is not None else None
        for prompt in prompts or lines_from_user("> " if sys.stdin.isatty() else ""):
            for event in connection.stream("/v1/completions", {**body, "prompt": prompt}):
                for choice in event["choices"]:
                    print(choice["text"], end="", flush=True)
            print()
    return 0
