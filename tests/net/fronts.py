"""nginx and Envoy with the files of deploy/, in front of servers on loopback ports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fixtures.server import free_port
from tests.fixtures.waiting import PATIENCE, until

DEPLOY = Path(__file__).parents[2] / "deploy"
OWN_PORTS = (8001, 8002)  # of the servers, in the files


def _nginx(directory: Path, program: str, port: int, text: str) -> list[str]:
    (directory / "octavo.conf").write_text(text.replace("listen 8080", f"listen 127.0.0.1:{port}"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
    (directory / "nginx.conf").write_text(
        f"daemon off; worker_processes 2; pid {directory}/pid; error_log stderr info;\n"
        + ("user root;\n" if os.geteuid() == 0 else "")
        + f"events {{}}\nhttp {{ access_log off;\n{paths}include {directory}/octavo.conf; }}\n"
    )
    return [program, "-p", str(directory), "-c", str(directory / "nginx.conf")]


def _envoy(directory: Path, program: str, port: int, text: str) -> list[str]:
    file = directory / "octavo.yaml"
    text = text.replace("port_value: 9901", f"port_value: {free_port()}")
    file.write_text(
        text.replace(
            "address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}"
        )
    )
    quiet = ("-l", "warning", "--concurrency", "2", "--use-dynamic-base-id")
    return [program, "-c", str(file), *quiet]


# Name -> (its file, who adapts it and says the command).
FRONTS: dict[str, tuple[str, Callable[[Path, str, int, str], list[str]]]] = {
    "nginx": ("nginx/octavo.conf", _nginx),
    "envoy": ("envoy/octavo.yaml", _envoy),
}


def program_of(name: str) -> str | None:
    """Also where Debian puts servers, and where pip does."""
    places = [os.environ.get("PATH", ""), "/usr/sbin", str(Path(sys.executable).parent)]
    return shutil.which(name, path=os.pathsep.join(places))


@dataclass
class Front:
    """A running one. ``client``: its base is the front."""

    name: str
    url: str
    client: httpx.Client
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


@contextmanager
def start(name: str, directory: Path, ports: tuple[int, int]) -> Iterator[Front]:
    """In front of two servers. Ready when it answers, whether they do or not."""
    path, adapt = FRONTS[name]
    program, port = program_of(name), free_port()
    assert program is not None
    text = (DEPLOY / path).read_text()
    for own, real in zip(OWN_PORTS, ports):
        text = text.replace(f"127.0.0.1:{own}", f"127.0.0.1:{real}")
        text = text.replace(f"port_value: {own}", f"port_value: {real}")
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(adapt(directory, program, port, text), stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    front = Front(name, url, httpx.Client(base_url=url, timeout=PATIENCE), log)

    def answers() -> bool:
        assert process.poll() is None, front.log
        try:
            return front.client.get("/metrics").status_code == 404
        except httpx.TransportError:
            return False

    try:
        until(answers, lambda: front.log)
        yield front
    finally:
        front.client.close()
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
