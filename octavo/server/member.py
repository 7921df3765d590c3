"""A further API process of a group.

    python -m octavo.server.member   < msgpack MemberSettings

Started by ``group`` only. Ends with its parent; SIGTERM drains it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import uvloop

from octavo.checkpoint.locate import ModelFiles
from octavo.engine.client import Seat
from octavo.engine.messages import EngineInfo
from octavo.logs import logging_to_stderr
from octavo.parent import die_with_parent
from octavo.server.group import READY, MemberSettings
from octavo.server.lifecycle import Server


class _TellsParent:
    """The first process has shown the start to the user already."""

    def progress(self, phase: str, fraction: float, num_bytes: int = 0, /) -> None:
        pass

    def enter(self, part: str) -> None:
        pass

    def ready(self, info: EngineInfo, address: str) -> None:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()


def main() -> int:
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=MemberSettings)
    die_with_parent(settings.parent)
    files = ModelFiles(Path(settings.model_path), settings.model_name, settings.is_gguf)
    server = settings.server
    seat = Seat(settings.index, server.api_server_count, Path(settings.directory))
    running = Server(settings.config, server, files, _TellsParent(), None, "", None, seat)
    with logging_to_stderr(server.uvicorn_log_level, server.log_format):
        code = uvloop.run(running.run())
    running.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
