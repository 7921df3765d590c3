"""``make demo`` and ``make stop``: the demo model behind a server that stays up afterwards.

The server's process id, address and log lie in .demo/. A second ``make demo`` finds the server
of the first; a port that somebody else has is answered with a free one.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

STATE = Path(__file__).resolve().parents[1] / ".demo"
PID, URL, LOG = STATE / "server.pid", STATE / "server.url", STATE / "server.log"
OCTAVO = [sys.executable, "-m", "octavo"]
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer in one sentence."
READY_SECONDS = 180
STOP_SECONDS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    return start(options.port) if options.action == "start" else stop()


def start(port: int) -> int:
    STATE.mkdir(exist_ok=True)
    step("pull the demo model")
    if code := subprocess.run([*OCTAVO, "pull", MODEL]).returncode:
        return code
    url = running()
    if url is None and server_pid() is not None:
        step("an earlier demo's server does not answer: stop it")
        stop()
    if url:
        step(f"the server of an earlier demo is up at {url}")
    else:
        step("start the server")
        url = launch(port)
        if not url:
            return 1
    step(f"ask it: {QUESTION}")
    ask = [*OCTAVO, "chat", "--url", url, "--max-tokens", "64", "--temperature", "0"]
    if code := subprocess.run([*ask, "-q", QUESTION]).returncode:
        return code
    print(f"\nthe server goes on at {url}, its log is in {short(LOG)}")
    print(f"  chat:  .venv/bin/octavo chat --url {url}")
    print(f"  API:   curl {url}/v1/models")
    print("  stop:  make stop")
    return 0


def step(text: str) -> None:
    print(f"==> {text}", flush=True)


def short(path: Path) -> str:
    return str(path.relative_to(STATE.parent))


def launch(port: int) -> str | None:
    """Starts the server and returns its address once it is ready; None when it failed."""
    if taken(port):
        free = free_port()
        print(f"    port {port} is taken (make demo PORT=… chooses another): using {free}")
        port = free
    url = f"http://127.0.0.1:{port}"
    with open(LOG, "wb") as log:
        process = subprocess.Popen(
            [*OCTAVO, "serve", MODEL, "--port", str(port), "--disable-uvicorn-access-log"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    PID.write_text(str(process.pid))
    URL.write_text(url)
    begin = time.monotonic()
    while time.monotonic() - begin < READY_SECONDS:
        if process.poll() is not None:
            print(LOG.read_text(errors="replace"), file=sys.stderr)
            print(f"the server ended with {process.returncode}", file=sys.stderr)
            PID.unlink()
            return None
        if healthy(url):
            print(f"    ready after {time.monotonic() - begin:.1f} s")
            return url
        time.sleep(0.1)
    print(f"not ready after {READY_SECONDS} s, see {short(LOG)}; stopping it", file=sys.stderr)
    stop()
    return None


def stop() -> int:
    pid = server_pid()
    if pid is None:
        print("no demo server is running")
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while server_pid() is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    if server_pid() is not None:
        os.kill(pid, signal.SIGKILL)
    PID.unlink(missing_ok=True)
    print("stopped")
    return 0


def server_pid() -> int | None:
    """The recorded process, if it still runs and is an octavo server (ids are reused)."""
    try:
        pid = int(PID.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, ValueError):
        return None
    return pid if b"octavo" in words and b"serve" in words and not zombie else None


def running() -> str | None:
    """The address of the server of an earlier demo, if it is healthy."""
    if server_pid() is None or not URL.exists():
        return None
    url = URL.read_text().strip()
    return url if healthy(url) else None


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
