"""uvicorn inside this process, on a socket bound by us, leaving signals to ``lifecycle``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import uvicorn

from octavo.config import ServerConfig
from octavo.server.auth import App

KEEP_ALIVE_SECONDS = 60


class HTTPServer(uvicorn.Server):
    def __init__(self, app: App, server: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_level=server.uvicorn_log_level,
                access_log=not server.disable_uvicorn_access_log,
                ssl_keyfile=server.ssl_keyfile,
                ssl_certfile=server.ssl_certfile,
                ssl_ca_certs=server.ssl_ca_certs,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        if server.uvicorn_log_level == "info":  # access lines, but not uvicorn's own start and end
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
