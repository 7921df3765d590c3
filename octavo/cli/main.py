"""``octavo COMMAND``: picks the command's module, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed while running, 2 the command line, a file or the model is at fault,
130 interrupted. Nothing heavy is imported before the command needs it.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

from octavo import __version__
from octavo.types import ConfigError, OctavoError

# name -> (module with COMMAND and run, what it does)
COMMANDS = {
    "serve": ("octavo.cli.serve", "start the OpenAI-compatible server"),
    "chat": ("octavo.cli.chat", "talk with a model in the terminal"),
    "complete": ("octavo.cli.complete", "continue a text"),
    "pull": ("octavo.cli.pull", "fetch a model into the cache"),
    "models": ("octavo.cli.models", "what can be served, and what is on this machine"),
    "template-check": ("octavo.cli.template_check", "try a model's chat template"),
    "run-batch": ("octavo.cli.run_batch", "answer a file of requests"),
    "plan": ("octavo.cli.plan", "what a model takes, whether it fits, how fast it can be"),
    "quantize": ("octavo.cli.quantize", "make a quantized checkpoint, and measure its loss"),
    "eval": ("octavo.cli.eval", "perplexity of a model, and its divergence from another"),
    "bench": ("octavo.cli.bench.main", "measure: serve, throughput, latency, startup"),
    "doctor": ("octavo.cli.doctor", "what is wrong with this machine or a running server"),
    "collect-env": ("octavo.cli.collect_env", "facts about this machine for a bug report"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the process's exit code."""
    tokens = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(tokens)
    except ConfigError as error:
        print(f"octavo: {_line(error)}", file=sys.stderr)
        return 2
    except OctavoError as error:
        print(f"octavo: {_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\noctavo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone (`octavo models | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1


def _line(error: OctavoError) -> str:
    """In one line, and without what would steer a terminal: names in it come from files."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(error))


def _dispatch(tokens: list[str]) -> int:
    name = tokens[0] if tokens else "--help"
    if name in ("-v", "-V", "--version"):
        print(__version__)
        return 0
    if name in ("-h", "help") or name.partition("=")[0] == "--help":
        print(_overview(name.partition("=")[2]))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown command {name!r}{hint} (octavo --help lists the commands)")
    module = import_module(COMMANDS[name][0])
    return run_command(module, tokens[1:])


def run_command(module: object, tokens: list[str]) -> int:
    """Parses ``tokens`` for ``module.COMMAND`` and calls ``module.run(arguments)``."""
    if not hasattr(module, "COMMAND"):  # a command of commands takes the tokens as they are
        return int(module.main(tokens))  # type: ignore[attr-defined]
    from octavo.cli.arguments import HelpRequested, parse
    from octavo.cli.help import command_help

    command = module.COMMAND
    try:
        arguments = parse(command, tokens)
    except HelpRequested as request:
        print(command_help(command, request.topic))
        return 0
    for note in arguments.notes:
        print(f"octavo: {note}", file=sys.stderr)
    return int(module.run(arguments))  # type: ignore[attr-defined]


def _overview(topic: str) -> str:
    from octavo.cli.arguments import Command
    from octavo.cli.help import command_help
    from octavo.config import EngineConfig, ServerConfig

    lines = [f"octavo {__version__}: serve language models", "", "commands:"]
    lines += [f"  octavo {name:<16}{summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "octavo COMMAND --help shows a command's flags. Of serve, those people need:", ""]
    serve = Command("serve", COMMANDS["serve"][1], (EngineConfig, ServerConfig), migrating=True)
    lines += command_help(serve, topic).splitlines()
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
