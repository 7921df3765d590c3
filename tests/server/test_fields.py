"""What asks for nothing changes nothing, what shapes a conversation reaches the template, and no
small schema has a field without a probe (tests/cases/test_fields.py has the generating routes)."""

from __future__ import annotations

import pytest

from octavo.server.protocol import (
    ChatFields,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tests.cases.asking import CHAT, COMPLETIONS, question
from tests.server import mock_server
from tests.server.test_completions import chat

# Field -> values that ask for nothing that could be missed, and one that would be.
HARMLESS = {
    "user": (["someone"], 1),
    "metadata": ([{"a": "b"}, {}], "x"),
    "safety_identifier": (["x"], 1),
    "prompt_cache_key": (["x"], 1),
    "store": ([False, None], True),
    "service_tier": (["auto", "default"], "flex"),
    "parallel_tool_calls": ([True, False], "no"),
    # octavo puts no spaces between tokens of its own, so there are none to leave out.
    "spaces_between_special_tokens": ([True, False], "no"),
    "suffix": (["", None], "x"),
}


@pytest.mark.parametrize("field", HARMLESS)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_asks_for_nothing_changes_nothing(server, route, field):
    values, missed = HARMLESS[field]
    base = question(route, "say:hello") if route == COMPLETIONS else chat("say:hello")
    plain = server.post(route, **base).json()
    for value in values:
        answer = server.post(route, **{**base, field: value})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain["choices"]
    refused = server.post(route, **{**base, field: missed})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


VARIABLES = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ documents }}{{ reasoning_effort }}"
    "{{ colour }}{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture(scope="module")
def trusting():
    with mock_server.start(
        template=VARIABLES, server={"trust_request_chat_template": True}
    ) as server:
        yield server


@pytest.mark.parametrize("route", ["/v1/chat/completions/render", "/tokenize", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"documents": [{"text": "doc"}]}, "doc"),
        ({"reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": {"colour": "red"}}, "red"),
        ({"chat_template": "own {{ messages[0]['content'] }}"}, "own hi"),
        ({"add_special_tokens": True}, "<s>"),
        ({"add_generation_prompt": True}, ":"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "f"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "hi"),
    ],
)
def test_what_shapes_a_conversation_reaches_the_template(trusting, route, fields, shown):
    if route != "/v1/chat/completions/render":
        fields = {name: value for name, value in fields.items() if name != "tool_choice"}
    answer = trusting.post(route, **chat("hi", **fields), **EXTRA.get(route, {}))
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if route == "/v1/embeddings":
        told = trusting.post(
            "/tokenize", **chat("hi", **{"add_generation_prompt": False, **fields})
        )
        assert said["data"][0]["embedding"][0] == told.json()["count"]
    elif route == "/tokenize":
        assert shown in "".join(said["token_strs"])
    else:
        assert shown in said["prompt"]


EXTRA = {"/tokenize": {"return_token_strs": True}, "/v1/embeddings": {"normalize": False}}


def test_a_template_of_a_request_is_bounded_and_checked(trusting, server):
    for template, said in (
        ("{% for %}", "chat template"),
        ("{% for i in range(99999999) %}{{ i }}{% endfor %}", "chat template"),
        ("{{ messages[0].__class__.__mro__ }}", "chat template"),
    ):
        answer = trusting.post(CHAT, **chat("hi", chat_template=template))
        assert answer.status_code == 400 and said in answer.text, answer.text
    refused = server.post(CHAT, **chat("hi", chat_template="{{ x }}"))
    assert refused.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.text


@pytest.mark.parametrize("field", ChatFields.model_fields)
def test_fields_of_messages_are_refused_beside_a_prompt(server, field):
    kinds = {"tools": [{}], "documents": [{}], "chat_template_kwargs": {"a": 1}}
    value = kinds.get(field, "x" if field in ("reasoning_effort", "chat_template") else True)
    for route, name in (("/tokenize", "prompt"), ("/v1/embeddings", "input")):
        answer = server.post(route, **{name: "a", field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_the_small_schemas_hold_nothing_unprobed():
    """Their fields, beside those of conversations, are in test_completions and test_embeddings."""
    assert {*TokenizeRequest.model_fields} - {*ChatFields.model_fields} == {
        "model", "prompt", "messages", "add_special_tokens", "return_token_strs",
    }  # fmt: skip
    assert {*DetokenizeRequest.model_fields} == {"model", "tokens", "skip_special_tokens"}
    assert {*EmbeddingRequest.model_fields} - {*ChatFields.model_fields} == {
        "model", "input", "messages", "encoding_format", "dimensions", "pooling", "normalize",
        "use_activation", "add_special_tokens", "truncate_prompt_tokens", "priority", "request_id",
        "cache_salt", "timeout", "user",
    }  # fmt: skip
