"""A server of our own for one command: a child process on a Unix socket that dies with us."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from octavo.cli.connection import Connection
from octavo.cli.console import PhaseLine
from octavo.config import environment_without_keys
from octavo.parent import when_parent_ends
from octavo.types import ConfigError, OctavoError

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02


@contextlib.contextmanager
def local_server(tokens: list[str], label: str | None = None) -> Iterator[Connection]:
    """Runs ``octavo serve TOKENS`` and yields a connection to it once it is ready.

    ``label`` names it on the terminal while it starts; None: nothing is shown.
    Raises ConfigError with the server's own line when it cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        socket_path = Path(directory) / "http.sock"
        log_path = Path(directory) / "log"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo", "serve", *tokens, "--uds", str(socket_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_without_keys(),  # the socket's directory is ours alone
                start_new_session=True,  # Ctrl-C is for the command, which then ends the server
                preexec_fn=partial(when_parent_ends, signal.SIGTERM),
            )
        try:
            connection = Connection(f"unix:{socket_path}")
            progress = PhaseLine() if label else None
            if progress:
                progress(f"starting {label}", -1.0)
            ready = _wait_ready(process, connection)
            if progress:
                progress.end()
            if not ready:
                raise _failure(process.returncode, log_path)
            yield connection
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], connection: Connection) -> bool:
    """False when the process ends instead."""
    while process.poll() is None:
        with contextlib.suppress(ConfigError):  # nobody listens yet
            if connection.status("/health") == 200:
                return True
        time.sleep(_POLL_SECONDS)
    return False


def _failure(code: int, log_path: Path) -> OctavoError:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    cause = lines[-1].removeprefix("octavo: ") if lines else "it printed nothing"
    if code == 2:
        return ConfigError(cause)
    return OctavoError(f"the server ended with {code} while starting: {cause}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
