"""uvicorn inside this process, on a socket bound by us, leaving signals to ``lifecycle``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator

import uvicorn

from octavo.config import ServerConfig
from octavo.server.auth import App, Receive, Scope, Send
from octavo.server.connections import batched_protocol
from octavo.types import ConfigError

KEEP_ALIVE_SECONDS = 60


class HTTPServer(uvicorn.Server):
    def __init__(self, app: App, server: ServerConfig) -> None:
        """Raises ConfigError when the TLS files cannot be used."""
        _check_tls(server)
        super().__init__(
            uvicorn.Config(
                _quiet(app),
                http=batched_protocol(),
                ws="none",
                lifespan="off",
                # With JSON the lines go to octavo's own handler (logs.logging_to_stderr).
                log_config=None if server.log_format == "json" else uvicorn.config.LOGGING_CONFIG,
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


def _quiet(app: App) -> App:
    """``app``, whose requests that are cancelled at the server's end (by uvicorn, when a client
    does not read) leave no trace in the log."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


def _check_tls(server: ServerConfig) -> None:
    certificate, key, authorities = server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs
    if certificate is None:
        if key or authorities:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile FILE")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    given = ", ".join(path for path in (certificate, key, authorities) if path)
    try:
        context.load_cert_chain(certificate, key)
        if authorities:
            context.load_verify_locations(authorities)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS files {given}: {error.strerror or error}") from None
