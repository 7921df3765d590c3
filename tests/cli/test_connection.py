"""The commands' client: streams, and one line for each way in which a server can fail."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from octavo.cli.connection import Connection
from octavo.cli.main import main
from octavo.types import ConfigError, OctavoError

EVENT = b'data: {"choices": [{"delta": {"content": "Hi"}, "text": "Hi"}]}\n\n'
ANSWERS = {
    "whole": EVENT + EVENT + b"data: [DONE]\n\n",
    "cut": EVENT,
    "thinks": b'data: {"choices": [{"delta": {"reasoning": "Hm"}}]}\n\n'
    + EVENT
    + b"data: [DONE]\n\n",
    "only thinks": b'data: {"choices": [{"delta": {"reasoning": "Hm"}}]}\n\ndata: [DONE]\n\n',
    "page": b"<html>hello</html>",
    "noise": b"data: hello\n\n",
    "error": EVENT + b'data: {"error": {"message": "engine died"}}\n\n',
}


class Handler(BaseHTTPRequestHandler):
    answer = "whole"

    def do_GET(self) -> None:
        known = self.path in ("/v1/models", "/health")
        models = ANSWERS["page"] if self.answer == "page" else b'{"data": [{"id": "m"}]}'
        self._send(200 if known else 404, models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._send(404, b"{}")
        elif self.answer == "refuse":
            self._send(400, b'{"error": {"message": "temperature is 9"}}')
        else:
            self._send(200, ANSWERS[self.answer])

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "test"


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    server: socketserver.BaseServer
    if request.param == "tcp":
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        address = f"http://127.0.0.1:{server.server_address[1]}"
    else:
        server = socketserver.ThreadingUnixStreamServer(str(tmp_path / "s"), Handler)
        address = f"unix:{tmp_path / 's'}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_stream_yields_its_events(url: str) -> None:
    connection = Connection(f"{url}/v1" if url.startswith("http") else url)
    assert connection.served_model() == "m"
    assert connection.status("/health") == 200
    assert len(list(connection.stream("/v1/completions", {}))) == 2


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ("cut", "broke off"),
        ("error", "engine died"),
        ("refuse", "400 temperature is 9"),
        ("noise", "does not answer as OpenAI"),
    ],
)
def test_a_failure_is_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, answer: str, part: str
) -> None:
    monkeypatch.setattr(Handler, "answer", answer)
    with pytest.raises(OctavoError, match=part):
        list(Connection(url).stream("/v1/completions", {}))


def test_a_web_page_is_no_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "answer", "page")
    with pytest.raises(OctavoError, match="does not answer as OpenAI's API does"):
        Connection(url).served_model()


def test_nobody_there_is_the_users_to_mend() -> None:
    for url in ("http://127.0.0.1:9", "unix:/no/socket"):
        with pytest.raises(ConfigError, match="octavo serve"):
            Connection(url).served_model()
    with pytest.raises(ConfigError, match="must begin with"):
        Connection("ftp://x")


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_one_question_prints_the_answer(
    url: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--url", url, "-q", "hello", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "HiHi\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_text_in_the_place_of_the_model_is_told_where_it_goes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "Once upon a time"]) == 2
    error = capsys.readouterr().err
    assert "'Once upon a time' is taken for MODEL" in error and "-q" in error


def test_lines_of_a_pipe_are_a_conversation(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "", "/new", "two"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "HiHi\nHiHi\n"


def test_reasoning_is_faint_on_a_terminal_and_left_out_of_a_pipe(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["chat", "--url", url, "-q", "hello"]
    monkeypatch.setattr(Handler, "answer", "thinks")
    assert main(ask) == 0
    assert capsys.readouterr() == ("Hi\n", "")
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdout.isatty", lambda: True)
        assert main(ask) == 0
        assert capsys.readouterr().out == "\x1b[2mHm\x1b[0m\n\nHi\n"
    monkeypatch.setattr(Handler, "answer", "only thinks")
    assert main(ask) == 0
    assert "--max-tokens" in capsys.readouterr().err


def test_an_unknown_command_is_not_sent_to_the_model(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["/help"])

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["chat", "--url", url]) == 0
    out, err = capsys.readouterr()
    assert "Hi" not in out and "no command /help; /new: forget" in err


def test_a_refused_question_does_not_end_an_interactive_chat(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["refuse", "whole"])

    def typed(prompt: str) -> str:
        answer = next(answers, None)
        if answer is None:
            raise EOFError
        monkeypatch.setattr(Handler, "answer", answer)
        return "hello"

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["chat", "--url", url]) == 0
    out, err = capsys.readouterr()
    assert "temperature is 9" in err and out.endswith("HiHi\n")
