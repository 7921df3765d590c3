"""``octavo run-batch``: answers a file of requests (OpenAI's batch format) without a server.

The lines go through the very routes of ``octavo serve``, on a Unix socket of this command's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import aiohttp
import msgspec

from octavo import __version__
from octavo.cli.arguments import Arguments, Command, to_tokens
from octavo.cli.batch_files import (
    STANDARD,
    BatchInput,
    BatchOutput,
    ResumableFile,
    StandardOutput,
    check_local,
)
from octavo.cli.connection import Connection
from octavo.cli.console import CountLine
from octavo.cli.local_server import local_server
from octavo.config import EngineConfig, ServerConfig
from octavo.flags import flag, flag_fields
from octavo.types import ConfigError, OctavoError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
LONGEST_WAIT = 60.0  # seconds, of what a full queue asks for

# Of the server's flags those that concern what is answered, not where it listens.
ANSWER_FLAGS = (
    *("chat_template", "chat_template_content_format", "allow_special_tokens_in_content"),
    *("lenient", "trust_request_chat_template", "structured_outputs_config"),
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
)


@dataclass(frozen=True)
class BatchOptions:
    input_file: str | None = flag(
        None, "JSON lines: custom_id, method, url, body; -: stdin", "-i", group="batch", top=True
    )
    output_file: str | None = flag(
        None, "where answers go; -: stdout, as they come", "-o", group="batch", top=True
    )
    max_concurrency: int | None = flag(
        None,
        "requests at a time (default: a quarter more than the engine runs at once)",
        group="batch",
        top=True,
        minimum=1,
    )
    disable_tqdm: bool = flag(False, "no progress line", group="batch", top=True)


AnswerOptions = make_dataclass(
    "AnswerOptions",
    [
        (
            name,
            f.type,
            field(default=f.default, default_factory=f.default_factory, metadata=f.metadata),
        )
        for name, f in flag_fields(ServerConfig)
        if name in ANSWER_FLAGS
    ],
    frozen=True,
)

COMMAND = Command(
    "run-batch",
    "Answers the requests of a file in OpenAI's batch format. An interrupted run goes on where it "
    "ended when the same command is given again.",
    (BatchOptions, EngineConfig, AnswerOptions),
    examples=("octavo run-batch -i requests.jsonl -o answers.jsonl --model smollm2-135m",),
    migrating=True,
)


def run(arguments: Arguments) -> int:
    options = arguments.build(BatchOptions)
    if options.input_file is None or options.output_file is None:
        raise ConfigError("run-batch needs -i IN.jsonl and -o OUT.jsonl (-: stdin, stdout)")
    check_local("--output-file", options.output_file)
    engine = to_tokens(EngineConfig, arguments.values)
    tokens = [*engine, *to_tokens(AnswerOptions, arguments.values)]
    label = arguments.build(EngineConfig).model.model
    with contextlib.closing(BatchInput(options.input_file)) as requests:
        facts = {"octavo": __version__, "input": requests.digest, "model": label, "flags": tokens}
        with contextlib.closing(_output(options.output_file, facts)) as output:
            batch = Batch(requests, output, not options.disable_tqdm)
            server = [*tokens, "--enable-request-id-headers", "--disable-uvicorn-access-log"]
            try:
                with local_server(server, label) as connection:
                    asyncio.run(batch.run(connection, options.max_concurrency))
                output.finish()
            except BaseException:
                batch.tell_interrupted()
                raise
    batch.tell_finished()
    return 0


def _output(path: str, facts: dict[str, Any]) -> BatchOutput:
    return StandardOutput() if path == STANDARD else ResumableFile(path, facts)


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Fault(Exception):
    """A line that cannot be sent. ``code``: for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# What no JSON raises, and what is nested a thousand times.
_NO_JSON = (msgspec.DecodeError, RecursionError)
_line = msgspec.json.Decoder(_Line).decode
_body = msgspec.json.Decoder(_Body).decode
_answer = msgspec.json.Decoder(_Answer).decode


class Batch:
    """One run: a few requests at a time, each answer written as it comes."""

    def __init__(self, requests: BatchInput, output: BatchOutput, show_progress: bool) -> None:
        self._requests = requests
        self._output = output
        self._show = show_progress
        self._ids: dict[str, int] = {}  # custom_id -> its line
        self.counts: Counter[str] = Counter()  # answered, refused, unreadable
        self._num_tokens = 0

    async def run(self, connection: Connection, max_concurrency: int | None) -> None:
        """Raises OctavoError when the server ends before all lines are answered."""
        limit = max_concurrency
        if limit is None:
            limit = await asyncio.to_thread(_default_concurrency, connection)
        self._began = time.monotonic()
        self._progress = CountLine(self._requests.num_requests, "requests")
        self._lines = self._open_lines()
        async with _session(connection.url) as session:
            workers = [asyncio.create_task(self._work(session)) for _ in range(limit)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def tell_finished(self) -> None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        kept = self._requests.num_requests - self.counts.total()
        before = f"; {kept} of an earlier run" if kept else ""
        print(f"octavo: {self.counts.total()} requests: {kinds or 'none'}{before}", file=sys.stderr)

    def tell_interrupted(self) -> None:
        if isinstance(self._output, ResumableFile):
            print(
                f"\noctavo: {len(self._output.done)} of {self._requests.num_requests} answers are "
                f"in {self._output.partial}; the same command goes on from there",
                file=sys.stderr,
            )

    def _open_lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines not answered yet; ids of the others are known, too."""
        for number, raw in self._requests:
            if number not in self._output.done:
                yield number, raw
                continue
            with contextlib.suppress(*_NO_JSON):
                self._ids.setdefault(_line(raw).custom_id, number)

    async def _work(self, session: aiohttp.ClientSession) -> None:
        for number, raw in self._lines:
            self._output.write(number, await self._answer(session, number, raw))
            if self._show:
                speed = self._num_tokens / max(1e-3, time.monotonic() - self._began)
                self._progress.show(len(self._output.done), f", {speed:.0f} output tokens/s")

    async def _answer(self, session: aiohttp.ClientSession, number: int, raw: bytes) -> bytes:
        custom_id: str | None = None
        try:
            line = self._read(number, raw)
            custom_id = line.custom_id
            status, request_id, body = await self._send(session, line)
        except _Fault as fault:
            self.counts["unreadable"] += 1
            error = {"code": fault.code, "message": f"line {number}: {fault}"}
            return _output_line(custom_id or _id_in(raw), None, error)
        self.counts["answered" if status == 200 else "refused"] += 1
        with contextlib.suppress(*_NO_JSON):
            usage = _answer(body).usage
            self._num_tokens += usage.completion_tokens if usage else 0
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        return _output_line(custom_id, response, None)

    def _read(self, number: int, raw: bytes) -> _Line:
        try:
            line = _line(raw)
        except _NO_JSON as error:
            raise _Fault("invalid_line", f"{error}") from None
        first = self._ids.setdefault(line.custom_id, number)
        if first != number:
            raise _Fault(
                "duplicate_custom_id",
                f"custom_id {line.custom_id!r} is that of line {first}: give each its own",
            )
        if line.method != "POST":
            raise _Fault("invalid_method", f"method is {line.method!r}; it must be 'POST'")
        if line.url not in URLS:
            raise _Fault("invalid_url", f"url is {line.url!r}; it must be one of {', '.join(URLS)}")
        with contextlib.suppress(*_NO_JSON):  # the server says what is wrong with it
            if _body(line.body).stream:
                raise _Fault("invalid_request", "stream is true; a batch holds whole answers")
        return line

    async def _send(self, session: aiohttp.ClientSession, line: _Line) -> tuple[int, str, bytes]:
        """(status, request id, body). Waits and tries again while the queue is full."""
        headers = {"content-type": "application/json"}
        while True:
            try:
                async with session.post(line.url, data=bytes(line.body), headers=headers) as answer:
                    body = await answer.read()
            except aiohttp.ClientError as error:
                raise OctavoError(f"the model's server has ended ({error})") from None
            if answer.status == 503:
                raise OctavoError(f"the model's server cannot go on: {body.decode()}")
            if answer.status != 429:
                return answer.status, answer.headers.get("x-request-id", ""), body
            wait = float(answer.headers.get("retry-after", "1"))
            await asyncio.sleep(min(wait, LONGEST_WAIT))


def _default_concurrency(connection: Connection) -> int:
    """A few more than run at once, so that no place stays empty between two requests."""
    engine = connection.get("/server_info")["engine"]
    return int(engine["max_num_seqs"]) * 5 // 4 + 1


def _session(url: str) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    base = url
    if url.startswith("unix:"):
        connector, base = aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0), "http://octavo"
    else:
        connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(base, connector=connector, timeout=timeout)


def _id_in(raw: bytes) -> str | None:
    """The custom_id of a line that is otherwise at fault."""
    with contextlib.suppress(*_NO_JSON):
        found = msgspec.json.decode(raw)
        if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
            return str(found["custom_id"])
    return None


def _output_line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    entry = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(entry)
