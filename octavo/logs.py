"""How the processes of a server write their logs: lines for people, or a JSON object each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

# Of the HTTP request whose work is done; "" outside of one.
request_id: ContextVar[str] = ContextVar("octavo_request_id", default="")
_ACCESS = ("client", "method", "path", "http_version", "status")  # uvicorn's arguments of a line


class JSONFormatter(logging.Formatter):
    """A line per record: time (UTC), level, process, pid, logger, message; request_id, and what a
    record has as ``extra={"fields": {...}}``; exception with its trace."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {}
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            fields = dict(zip(_ACCESS, record.args))
        fields |= getattr(record, "fields", {})
        if name := request_id.get():
            fields.setdefault("request_id", name)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return line(
            record.levelname, self._process, record.getMessage(), fields, record.name,
            record.created,
        )  # fmt: skip


def line(
    level: str, process: str, message: str, fields: Mapping[str, object],
    logger: str = "octavo", when: float = -1.0,
) -> str:  # fmt: skip
    """A JSON log line. ``when``: seconds since the epoch; -1: now."""
    moment = datetime.fromtimestamp(when, UTC) if when >= 0 else datetime.now(UTC)
    head = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level.lower(),
        "process": process,
        "pid": os.getpid(),
        "logger": logger,
        "message": message,
    }
    return json.dumps({**head, **fields}, ensure_ascii=False, default=str)


def handler(kind: str, process: str, stream: TextIO, text: logging.Formatter) -> logging.Handler:
    """``kind``: --log-format; ``text``: how lines for people look."""
    found = logging.StreamHandler(stream)
    found.setFormatter(JSONFormatter(process) if kind == "json" else text)
    return found


def configure_process(kind: str, process: str, stream: TextIO) -> None:
    """For an engine or a rank: all of its records go to the stream."""
    text = logging.Formatter(f"%(levelname)s {process}: %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[handler(kind, process, stream, text)])


@contextlib.contextmanager
def logging_to_stderr(level: str, log_format: str = "text") -> Iterator[None]:
    """octavo's log lines on stderr for a process that has not set logging up; with ``json`` those
    of uvicorn, too."""
    text = logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")
    ours = handler(log_format, "server", sys.stderr, text)
    logger = logging.getLogger("octavo")
    own = [logger, logging.getLogger("uvicorn")] if log_format == "json" else [logger]
    for each in own:
        each.addHandler(ours)
    logger.setLevel(level.upper() if level != "trace" else "DEBUG")
    try:
        yield
    finally:
        for each in own:
            each.removeHandler(ours)
