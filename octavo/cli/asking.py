"""What chat and complete share: whom to ask (a running server, or one of our own), and how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Arguments, to_tokens
from octavo.cli.connection import DEFAULT_URL, Connection
from octavo.cli.local_server import local_server
from octavo.config import EngineConfig, environment_api_keys
from octavo.flags import flag
from octavo.types import ConfigError


@dataclass(frozen=True)
class AskOptions:
    url: str | None = flag(
        None,
        f"the server to ask (default {DEFAULT_URL}, when no MODEL is named)",
        group="ask",
        top=True,
    )
    model_name: str | None = flag(
        None, "name of the model there (default: its first)", group="ask", top=True
    )
    api_key: str | None = flag(
        None, "key of the server (also OCTAVO_API_KEY, VLLM_API_KEY)", group="ask", top=True
    )
    quick: str | None = flag(
        None, "ask this one thing, print the answer and end", "-q", group="ask", top=True
    )
    max_tokens: int | None = flag(
        None, "most tokens of an answer", group="ask", top=True, minimum=1
    )
    temperature: float | None = flag(
        None, "0: always the likeliest token", group="ask", top=True, minimum=0, maximum=2
    )


@contextlib.contextmanager
def asked_server(arguments: Arguments, options: AskOptions) -> Iterator[tuple[Connection, str]]:
    """(connection, model name): of ``--url``, or of a server started here for MODEL."""
    model = arguments.values.get("model")
    if model is not None:
        if len(str(model).split()) > 1 and not Path(model).exists():
            raise ConfigError(f"{model!r} is taken for MODEL; a text to ask goes behind -q")
        if options.url:
            raise ConfigError("give either MODEL, to run it here, or --url, to ask a server")
        with local_server(to_tokens(EngineConfig, arguments.values), model) as connection:
            yield connection, connection.served_model()
        return
    idle = to_tokens(EngineConfig, arguments.values)
    if idle:
        raise ConfigError(f"{idle[0]} is for a model that is run here: name MODEL too")
    keys = [options.api_key] if options.api_key else environment_api_keys()
    connection = Connection(options.url or DEFAULT_URL, keys[0] if keys else None)
    yield connection, options.model_name or connection.served_model()


def sampling_fields(options: AskOptions) -> dict[str, Any]:
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    return {name: value for name, value in fields.items() if value is not None}


def lines_from_user(prompt: str) -> Iterator[str]:
    """What the user types, line by line, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line
