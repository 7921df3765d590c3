"""``octavo serve``: read the flags, find the model, run the server until it is told to stop."""

from __future__ import annotations

import sys
from dataclasses import replace

from octavo.cli.arguments import Arguments, Command
from octavo.cli.startup import StartupLog
from octavo.config import EngineConfig, ServerConfig, environment_api_keys, reject_unsupported
from octavo.logs import logging_to_stderr
from octavo.types import ConfigError

COMMAND = Command(
    "serve",
    "Starts the OpenAI-compatible server.",
    (EngineConfig, ServerConfig),
    examples=(
        "octavo serve                              the demo model on port 8000",
        "octavo serve ./my-model --port 9000       a directory with config.json and safetensors",
        "octavo serve model.gguf --api-key secret  a GGUF file, behind a key",
        "octavo serve org/name --max-model-len 8k  a model of the hub",
        "octavo serve org/name -dp 2 -dpl 1 -dpa 0.0.0.0        a head node with room for another",
        "octavo serve org/name --headless -dpa HEAD             that other node",
    ),
    migrating=True,
)


def run(arguments: Arguments) -> int:
    """Returns when the server has drained; ConfigError before that for what cannot be served."""
    engine_config = arguments.build(EngineConfig)
    server_config = arguments.build(ServerConfig)
    from octavo.server.tools.setup import check_flags

    reject_unsupported(engine_config)
    engine_config = replace(engine_config, log_format=server_config.log_format)
    if engine_config.parallel.headless:
        return run_headless(engine_config, server_config.drain_timeout)
    check_flags(server_config, engine_config.model.skip_tokenizer_init)
    if any(not key or key != key.strip() for key in server_config.api_key):
        raise ConfigError(
            "--api-key: a key is empty or has spaces around it, so no client could send it (is a "
            "variable unset?); drop the flag to serve without keys"
        )
    if any(
        word == key or word.endswith(f"={key}")
        for word in sys.argv
        for key in server_config.api_key
    ):
        print(
            "octavo: --api-key shows the key to everyone who lists this machine's processes; "
            "OCTAVO_API_KEY and --api-key-file do not",
            file=sys.stderr,
        )
    if not server_config.api_key:
        server_config = replace(server_config, api_key=environment_api_keys())
    asked = engine_config.model
    names = asked.served_model_name or [asked.model]
    log = StartupLog(names[0], json_lines=server_config.log_format == "json")

    from octavo.checkpoint.locate import locate, locate_draft

    weights = asked.load_format != "dummy"
    try:
        files = locate(asked.model, asked.revision, weights=weights, progress=log.progress)
        # From here on the model is its files: the engine process must not look for them again.
        model = replace(asked, model=str(files.path), served_model_name=names)
        drafts = locate_draft(engine_config.speculative, weights=weights, progress=log.progress)
        engine_config = replace(engine_config, model=model, speculative=drafts)
        if engine_config.parallel.node_rank:
            return lend_devices(engine_config)
        from octavo.server.lifecycle import serve

        return serve(engine_config, server_config, files, log)
    finally:
        log.progress.end()  # an error's line begins on a line of its own


def lend_devices(config: EngineConfig) -> int:
    """What machines other than the first do: no HTTP, no scheduler."""
    from octavo.worker.node import run_node

    with logging_to_stderr("info", config.log_format):
        return run_node(config)


def run_headless(config: EngineConfig, drain_timeout: float) -> int:
    """The replicas of this node join a head node; until they are told to stop."""
    from octavo.checkpoint.locate import locate, locate_draft
    from octavo.cli.console import PhaseLine
    from octavo.engine.headless import serve

    asked = config.model
    progress = PhaseLine(sys.stderr)
    weights = asked.load_format != "dummy"
    try:
        files = locate(asked.model, asked.revision, weights=weights, progress=progress)
        drafts = locate_draft(config.speculative, weights=weights, progress=progress)
    finally:
        progress.end()
    config = replace(config, model=replace(asked, model=str(files.path)), speculative=drafts)
    with logging_to_stderr("info", config.log_format):
        return serve(config, files.path, drain_timeout)
