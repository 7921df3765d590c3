"""No request, whatever it holds, pauses the streams of others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.waiting import PATIENCE, least
from tests.server import mock_server
from tests.server.mock_server import MockServer

# Alone, all of these stay below 0.1 s. A machine that runs other things pauses everybody, but not
# each time: the least of a few tries counts.
LIMIT = 0.5
LENGTH = 600_000
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c }}{% endfor %}\n"
    "{% endfor %}{{ tools | tojson }}{% for i in range(turns or 0) %}{% for k in range(100) %}"
    "{% set x = k %}{% endfor %}{% endfor %}{{ 'y' * (width or 0) }}"
)
WORDS = "The quick brown fox, it is said, jumps over the lazy dog. "
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "say:x"}], "max_tokens": 1, **fields}


def messages(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}] * count


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **schema}
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"k": [value]}
    return value


# Name -> (route, body or its bytes, the status it gets).
HOSTILE: dict[str, tuple[str, Callable[[], Any], int]] = {
    "text_of_4_megabytes": ("/tokenize", lambda: {"prompt": WORDS * 70_000}, 400),
    "text_of_a_million_tokens": ("/tokenize", lambda: {"prompt": "é" * 600_000}, 200),
    "text_of_30_megabytes": (TEXT, lambda: {"prompt": WORDS * 520_000}, 400),
    "long_text_to_be_cut": (
        TEXT,
        lambda: {"prompt": "say:x" + WORDS * 15_000, "truncate_prompt_tokens": 9, "max_tokens": 1},
        200,
    ),
    "thousands_of_texts": (TEXT, lambda: {"prompt": [WORDS * 8] * 24_000}, 400),
    "millions_of_ids": (TEXT, lambda: {"prompt": [12] * 8_000_000}, 400),
    "a_million_ids_but_one": (TEXT, lambda: {"prompt": [*[12] * 900_000, "x"]}, 400),
    "lists_of_ids": (TEXT, lambda: {"prompt": [[1]] * 160_000}, 400),
    "hundred_thousand_messages": (CHAT, lambda: chat(messages=messages(100_000)), 400),
    "ten_thousand_messages": (CHAT, lambda: chat(messages=messages(9_000)), 200),
    "messages_of_wrong_type": (CHAT, lambda: chat(messages=[{"role": 1}] * 12_000), 400),
    "millions_of_objects": (CHAT, lambda: b'{"metadata":[' + b"{}," * 8_000_000 + b"{}]}", 400),
    "objects_in_a_text": (CHAT, lambda: chat(user="{},[]," * 2_000_000), 200),
    "deep_nesting": (CHAT, lambda: chat(metadata=nested(150)), 400),
    "unknown_fields": (CHAT, lambda: {f"temperaturee{i}": i for i in range(20_000)}, 400),
    "tools_of_megabytes": (
        CHAT,
        lambda: chat(
            tools=[
                {"type": "function", "function": {"name": f"f{i}", "description": "é" * 200}}
                for i in range(1000)
            ],
            tool_choice="none",
        ),
        200,
    ),
    "template_of_many_turns": (
        CHAT,
        lambda: chat(chat_template_kwargs={"turns": 15_000}),
        200,
    ),
    "template_of_too_many_turns": (
        CHAT,
        lambda: chat(chat_template_kwargs={"turns": 90_000}),
        400,
    ),
    "template_of_wide_text": (CHAT, lambda: chat(chat_template_kwargs={"width": 400_000}), 200),
    "bad_words": (TEXT, lambda: {"prompt": "say:x", "bad_words": ["é" * 32] * 1000}, 200),
    "stop_strings": (
        TEXT,
        lambda: {"prompt": "say:" + "x" * 500, "stop": ["é" * 32] * 1000, "max_tokens": 99},
        200,
    ),
    "schema_of_thousands_of_fields": (
        CHAT,
        lambda: chat(
            response_format=json_schema(
                {
                    "properties": {
                        f"f{i}": {"type": "string", "pattern": f"a{{{i}}}b*"} for i in range(5000)
                    }
                }
            )
        ),
        400,
    ),
    "regex_that_explodes": (
        TEXT,
        lambda: {"prompt": "say:x", "structured_outputs": {"regex": "(((a?){99}){99}){99}b"}},
        200,
    ),
    "texts_to_be_embedded": ("/v1/embeddings", lambda: {"input": [WORDS * 60] * 2000}, 200),
    "a_long_text_to_be_rendered": (CHAT + "/render", lambda: chat(user=WORDS * 9000), 200),
    "broken_json": (TEXT, lambda: b'{"prompt":[' + b"1," * 490_000, 400),
    "quotes_without_end": (TEXT, lambda: b'{"prompt":"' + b'\\"' * 9_000_000, 400),
    "ids_to_text": ("/detokenize", lambda: {"tokens": [97] * 900_000}, 200),
    "log_probabilities_of_the_prompt": (
        TEXT,
        lambda: {"prompt": "say:" + "x" * 60_000, "prompt_logprobs": 1, "max_tokens": 1},
        200,
    ),
}


class Watcher:
    """The process that streams."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._read() == "streaming"

    def pause(self) -> float:
        """The largest one since this was last asked for."""
        assert self._process.stdin is not None
        print("tell", file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def watching(server: MockServer) -> Iterator[Watcher]:
    host, port = server.url.removeprefix("http://").split(":")
    script = Path(__file__).with_name("watch_stream.py")
    process = subprocess.Popen(
        [sys.executable, str(script), host, port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Watcher(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[MockServer, Watcher]]:
    engine = {"step_seconds": 0.005, "max_model_len": LENGTH, "num_blocks": LENGTH}
    quiet = {"disable_uvicorn_access_log": True}
    with mock_server.start(engine, quiet, template=TEMPLATE) as server, watching(server) as watcher:
        yield server, watcher


@pytest.mark.parametrize("name", HOSTILE)
def test_no_request_pauses_the_stream_of_another(busy, name):
    server, watcher = busy
    path, make, status = HOSTILE[name]
    made = make()
    content = made if isinstance(made, bytes) else json.dumps(made, ensure_ascii=False).encode()
    headers = {"content-type": "application/json"}

    def measure(_: int) -> float:
        watcher.pause()
        with httpx.Client(timeout=2 * PATIENCE) as client:
            answer = client.post(server.url + path, content=content, headers=headers)
        pause = watcher.pause()
        print(f"{name}: {pause * 1000:.0f} ms, {answer.elapsed.total_seconds():.2f} s")
        assert answer.status_code == status, answer.text[:300]
        return pause

    assert least(measure, LIMIT) < LIMIT
