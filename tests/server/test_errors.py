"""What is refused, with which status, and that a refusal costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest

from octavo.server.errors import on_unexpected_error
from tests.fixtures.waiting import PATIENCE
from tests.server import mock_server

CHAT = {"messages": [{"role": "user", "content": "say:x"}]}
ROUTES = {"/v1/completions": {"prompt": "say:x"}, "/v1/chat/completions": CHAT}
OUT_OF_RANGE = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "0.5"), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -2), ("min_p", 1.1), ("presence_penalty", 3),
    ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("repetition_penalty", 1e300),
    ("n", 0), ("n", True), ("n", 9), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**9),
    ("min_tokens", 100000), ("stop", [""]), ("stop", 5), ("bad_words", [""]), ("seed", 2**65),
    ("stop_token_ids", [260]), ("stop_token_ids", [-1]), ("logit_bias", {"191222": -100}),
    ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}), ("logit_bias", {"1": 1e9}),
    ("allowed_token_ids", []), ("allowed_token_ids", [2**40]), ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0), ("priority", 3), ("priority", 2**40), ("request_id", "a\nb"),
    ("cache_salt", ""), ("stream", "yes"), ("stream_options", {"include_usage": True}),
    ("guided_json", {"type": 7}), ("guided_regex", "([a"), ("guided_choice", [""]),
    ("guided_grammar", "root ::= 1"), ("guided_decoding_backend", "outlines"),
    ("structured_outputs", {"regex": "a", "json": {}}), ("structured_outputs", {}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "yaml"}),
    ("early_stopping", True), ("length_penalty", 2.0), ("store", True), ("service_tier", "flex"),
    ("chat_template", "{{ x }}"), ("no_such_field", 1),
    ("n", 2**64 - 1), ("stop", ["ab"] * 1025), ("stop", ["a" * 65537]), ("bad_words", ["a"] * 1025),
    ("stop_token_ids", [97] * 261), ("allowed_token_ids", [97] * 261), ("x" * 100_000, 1),
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_out_of_range_is_400_naming_the_field(server, route, stream):
    for field, value in OUT_OF_RANGE:
        body = {**ROUTES[route], "stream": stream, field: value}
        if stream and field == "stream_options":
            continue
        answer = server.client.post(route, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 400, (field, value, answer.text)
        error = json.loads(answer.text)["error"]
        assert error["param"].startswith(field[:2000]), (field, value, error)
        assert field[:1900] in error["message"]
        assert len(answer.content) < 5000
        assert error["code"] == "invalid_request"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_non_finite_numbers_are_400_in_valid_json(server, route, number):
    for field in ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "min_p"):
        body = json.dumps({**ROUTES[route], field: 0}).replace(
            f'"{field}": 0', f'"{field}": {number}'
        )
        answer = server.client.post(route, content=body, headers=JSON)
        assert answer.status_code == 400
        error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
        assert error["param"] == field


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "a"} x', b'{"prompt": "\\ud800"}',
     b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}"],
)  # fmt: skip
def test_malformed_bodies_are_400(server, raw):
    answer = server.client.post("/v1/completions", content=raw, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_wrong_content_type_is_400(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.client.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
        )
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]


def test_oversized_body_is_refused_unread(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % (64 << 20)
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


@pytest.mark.parametrize(
    "prompt", [[], {}, 5, None, [[1], "a"], ["a", 5], [[]], [300], [-1], [2**70], [1.5], [True]]
)
def test_bad_prompts_are_400(server, prompt):
    answer = server.post("/v1/completions", prompt=prompt)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "prompt"


def test_missing_field_is_named(server):
    assert "prompt is missing" in server.post("/v1/completions").json()["error"]["message"]
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "contents": "x"}])
    assert answer.json()["error"]["message"] == "unknown field 'messages.0.contents'"


def test_unknown_model_is_404_and_no_model_is_the_served_one(server):
    answer = server.post("/v1/completions", prompt="say:x", model="gpt-9")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert "'mock'" in answer.json()["error"]["message"]
    assert server.complete("say:x")["model"] == "mock"
    assert server.complete("say:x", model="alias")["model"] == "alias"


def test_length_is_refused_at_the_exact_boundary_with_both_numbers(server):
    """T34; the mock's length is 512, BOS included."""
    assert server.complete("a" * 507, max_tokens=4)["usage"]["prompt_tokens"] == 508
    answer = server.post("/v1/completions", prompt="a" * 508, max_tokens=4)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "509" in message and "512" in message
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    for length in (511, 512, 5120):
        answer = server.post("/v1/completions", prompt="a" * length, max_tokens=1)
        assert answer.status_code == 400
        assert str(length + 1) in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = server.post("/v1/completions", prompt="a", max_tokens=512)  # no prompt is short enough
    assert answer.json()["error"]["code"] == "invalid_request"
    long = [{"role": "user", "content": "a" * 600}]
    answer = server.post("/v1/chat/completions", messages=long)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    truncated = server.complete("a" * 5120, max_tokens=4, truncate_prompt_tokens=100)
    assert truncated["usage"]["prompt_tokens"] == 100


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(server):
    text = "a" * 5_000_000
    begin = time.monotonic()
    for route, body, param in (
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = server.post(route, **body).json()["error"]
        assert error["param"] == param
        assert error["code"] == "context_length_exceeded"
        assert "at least 1250000 tokens" in error["message"] and "512" in error["message"]
    assert time.monotonic() - begin < 2


def test_chat_names_the_fields_it_was_sent(server):
    def error(**fields):
        answer = server.post("/v1/chat/completions", **CHAT, **fields)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["param"]

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert error(max_completion_tokens=0) == "max_completion_tokens"
    assert error(top_logprobs=2) == "top_logprobs"
    assert error(logprobs=True, top_logprobs=21) == "top_logprobs"
    assert error(tools=tools) == "tools"
    assert error(tools=tools, tool_choice="auto") == "tool_choice"
    assert error(tool_choice="auto") == "tool_choice"
    assert error(documents=[{"text": "x"}]) == "documents"
    assert error(reasoning_effort="low") == "reasoning_effort"
    assert error(chat_template_kwargs={"enable_thinking": False}) == "chat_template_kwargs"
    assert error(chat_template_kwargs={"messages": []}) == "chat_template_kwargs"
    assert error(chat_template_kwargs={"add_generation_prompt": False}) == "chat_template_kwargs"
    answer = server.post("/v1/chat/completions", messages=[])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"response_format": {"type": "json_schema"}}, "of type json_schema needs json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
         "response_format.json_schema.schema"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs asks for 21"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages.0.content.0.type is 'image_url': only text is served in this version"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
         "unknown field 'messages.0.content.0.y'"),
    ],
)  # fmt: skip
def test_chat_says_what_is_not_served(server, fields, says):
    answer = server.post("/v1/chat/completions", **{**CHAT, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert "--max-top" not in answer.json()["error"]["message"]


def test_unexpected_error_announces_that_the_connection_closes():
    response = asyncio.run(on_unexpected_error(None, RuntimeError("a bug")))
    assert (response.status_code, response.headers["connection"]) == (500, "close")
    assert b"a bug" not in response.body


def test_best_of_equal_to_n_only(server):
    assert len(server.complete("say:x", n=2, best_of=2)["choices"]) == 2
    assert server.post("/v1/completions", prompt="x", best_of=2).status_code == 400


def test_harmless_fields_and_defaults_spelled_out_are_accepted(server):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k",
        "store": False, "service_tier": "auto", "parallel_tool_calls": True, "suffix": None,
        "use_beam_search": False, "length_penalty": 1.0, "guided_json": None, "best_of": 1,
        "response_format": {"type": "text"}, "temperature": None, "n": None, "top_k": -1,
        "max_tokens": 16.0,
    }  # fmt: skip
    assert server.complete("say:ok", **harmless)["choices"][0]["text"] == "ok"


@pytest.mark.parametrize(
    "path, says",
    [
        ("/chat/completions", "no route /chat/completions; did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "no route /v1/v1/models; did you mean /v1/models?"),
        ("/nothing", "no route /nothing; GET /openapi.json lists the routes"),
        ("/v1/responses", "/v1/responses: the responses API is not in this version"),
        ("/v1/audio/speech", "/v1/audio/speech: audio is not in this version"),
        ("/rerank", "/rerank: reranking is not in this version"),
        ("/v1/batches/b", "/v1/batches/b: batches over HTTP"),
    ],
)
def test_an_unknown_route_names_the_one_that_may_be_meant(server, path, says):
    answer = server.post(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(says)


def test_what_is_sent_in_a_wrong_form_or_to_a_wrong_route_is_told_the_right_one(server):
    def message(path, **fields):
        return server.post(path, **fields).json()["error"]["message"]

    chat, plain = "/v1/chat/completions", "/v1/completions"
    assert message(plain, **CHAT) == f"unknown field 'messages'; that is a field of {chat}"
    assert message(chat, prompt="x") == f"unknown field 'prompt'; that is a field of {plain}"
    assert message(chat, messages=[]) == "messages must have at least 1 item, not 0"
    assert message(chat, messages="x") == "messages must be a list"
    form = server.client.post(plain, data={"prompt": "x"}).json()["error"]["message"]
    assert form.endswith("send application/json (curl: -H 'content-type: application/json')")


def test_unknown_routes_and_methods(server):
    answer = server.client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert server.client.get("/v1/models/").status_code == 404
    answer = server.client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "GET is not allowed on /v1/completions; use POST"
    assert server.client.options("/v1/completions").status_code == 204
    head = server.client.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")


def test_bad_requests_do_not_disturb_a_neighbour(server):
    """T07, T08: refusals while another request is in flight."""
    alone = server.complete("neighbour", max_tokens=300)["choices"][0]["text"]
    results = []
    thread = threading.Thread(
        target=lambda: results.append(server.complete("neighbour", max_tokens=300))
    )
    thread.start()
    for bias in ({"191222": -100}, {"-1": 5}, {"1": 1e9}):
        assert server.post("/v1/completions", prompt="x", logit_bias=bias).status_code == 400
        bad = server.post("/v1/completions", prompt="x", stop_token_ids=[261], min_tokens=5)
        assert bad.status_code == 400
    thread.join()
    assert results[0]["choices"][0]["text"] == alone


def test_lenient_server_lists_unknown_fields_as_warnings():
    with mock_server.start(server={"lenient": True}) as server:
        answer = server.complete("say:x", no_such_field=1, temperatur=0)
        assert answer["choices"][0]["text"] == "x"
        assert len(answer["warnings"]) == 2
        assert "did you mean 'temperature'" in answer["warnings"][1]
        events = server.events("/v1/completions", prompt="say:x", guided_decoding_backend="x")
        assert "llguidance" in events[-1]["warnings"][0]


def test_empty_prompt_depends_on_bos(server):
    """T13."""
    assert server.complete("", max_tokens=3)["usage"]["prompt_tokens"] == 1
    mixed = server.complete(["a", ""], max_tokens=2)
    assert mixed["usage"]["prompt_tokens"] == 3
    with mock_server.start(bos=False, template=None) as plain:
        for prompt in ("", [""], ["a", ""], [], [[]]):
            answer = plain.post("/v1/completions", prompt=prompt)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        # T30: no chat template.
        answer = plain.post("/v1/chat/completions", **CHAT)
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]
        assert "no chat template" in plain.log
        assert plain.complete("say:still works")["choices"][0]["text"] == "still works"


def test_engine_refusal_and_failed_step_are_told():
    with mock_server.start(engine={"reject": "does not fit"}) as server:
        for stream in (False, True):
            answer = server.post("/v1/completions", prompt="x", stream=stream)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        server.wait_idle()
        assert server.metric("octavo_requests_rejected_total") == 2
    with mock_server.start(engine={"step_error": True}) as server:
        answer = server.post("/v1/completions", prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "step_failed")
        answer = server.post("/v1/completions", prompt="x", stream=True)
        assert answer.status_code == 200
        last = [line for line in answer.text.split("\n\n") if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "step_failed"
        server.wait_idle()
