"""No field of a request is accepted and dropped: each changes the answer, or is refused, or is one
of those that ask for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.protocol import ChatRequest, CompletionRequest
from tests.cases.asking import CHAT, COMPLETIONS, question
from tests.fixtures.server import Server

EOS_FIRST = {"logit_bias": {"1": 100}}
E_ONLY = {"logit_bias": {"105": 100}}  # says "eeeeeeee"
LONG = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SPECIAL_FIRST = {"logit_bias": {"2": 100}, "max_tokens": 2}
BEAMS = {"use_beam_search": True, "n": 3, "stop_token_ids": [*range(3, 160)]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

# Field -> (the rest of the body, the value) whose answer differs from that without the field.
SHARED: dict[str, tuple[dict[str, Any], Any]] = {
    "model": ({}, "another"),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "n": ({}, 2),
    "temperature": ({}, 0),
    "top_p": ({}, 0.01),
    "top_k": ({}, 1),
    "min_p": ({}, 0.9),
    "presence_penalty": (LONG, 2),
    "frequency_penalty": (LONG, 2),
    "repetition_penalty": (LONG, 1.8),
    "seed": ({}, 6),
    "stop": (E_ONLY, "eee"),
    "stop_token_ids": (E_ONLY, [105]),
    "bad_words": (E_ONLY, ["e"]),
    "include_stop_str_in_output": ({**E_ONLY, "stop": "eee"}, True),
    "ignore_eos": (EOS_FIRST, True),
    "max_tokens": ({}, 3),
    "min_tokens": (EOS_FIRST, 4),
    "prompt_logprobs": ({}, 1),
    "skip_special_tokens": (SPECIAL_FIRST, False),
    "truncate_prompt_tokens": ({}, 2),
    "logit_bias": ({}, {"40": 100}),
    "allowed_token_ids": ({}, [40, 41]),
    "priority": ({}, 3),  # refused: this server does not order by it
    "request_id": ({}, "mine"),
    "return_token_ids": ({}, True),
    "return_tokens_as_token_ids": ({"logprobs": True}, True),
    "cache_salt": ({"temperature": 0}, "apart"),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"choice": ["yes", "no"]}),
    "guided_json": ({}, {"type": "object"}),
    "guided_regex": ({}, "[0-9]{3}"),
    "guided_choice": ({}, ["yes", "no"]),
    "guided_grammar": ({}, 'start: "a" "b"+'),
    "guided_whitespace_pattern": ({"guided_json": {"type": "object"}}, "  "),
    "use_beam_search": ({"n": 2, "temperature": 1}, True),
    "length_penalty": (BEAMS, -3),
    "early_stopping": ({**BEAMS, "length_penalty": 3}, True),
    "timeout": ({}, 1e-6),
}
OF_COMPLETIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "prompt": ({}, "another"),
    "logprobs": ({}, 1),
    "best_of": ({}, 2),
    "echo": ({}, True),
    "add_special_tokens": ({}, False),
}
OF_CHAT: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({}, [{"role": "user", "content": "another"}]),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
    "max_completion_tokens": ({}, 3),
    "add_special_tokens": ({"return_token_ids": True}, True),
    "add_generation_prompt": ({"return_token_ids": True}, False),
    "tools": ({}, TOOLS),  # refused: the template shows none
    "tool_choice": ({}, "required"),
    "documents": ({}, [{"text": "x"}]),
    "chat_template_kwargs": ({}, {"no_such_variable": 1}),
    "reasoning_effort": ({}, "low"),
    "chat_template": ({}, "{{ messages }}"),  # refused: this server does not allow it
}
CONTINUED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
OF_CHAT["continue_final_message"] = ({"messages": CONTINUED, "return_token_ids": True}, True)
OF_CHAT["echo"] = ({"messages": CONTINUED, "continue_final_message": True}, True)

# They ask for nothing that could be missed. spaces_between_special_tokens: text is bytes of tokens,
# and nothing is put between them, as in vLLM with any fast tokenizer.
HARMLESS = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "spaces_between_special_tokens",
}

# Changes answers of servers with a reasoning parser only: tests/server/tools.
ELSEWHERE = {(CHAT, "include_reasoning")}

PROBES = {
    **{(COMPLETIONS, field): probe for field, probe in {**SHARED, **OF_COMPLETIONS}.items()},
    **{(CHAT, field): probe for field, probe in {**SHARED, **OF_CHAT}.items()},
}


def answer(server: Server, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and what was said, without what differs from run to run."""
    found = server.client.post(route, json=body)
    if body.get("stream"):
        return found.status_code, '"usage"' in found.text
    said = found.json()
    own_id = body.get("request_id") and said.get("id")
    rest = {key: val for key, val in said.items() if key not in ("id", "created", "timings")}
    return found.status_code, (own_id, rest)


@pytest.mark.parametrize(("route", "field"), PROBES, ids=lambda name: name.removeprefix("/v1/"))
def test_every_field_changes_the_answer_or_is_refused(random_model: Server, route: str, field: str):
    """T05."""
    rest, value = PROBES[route, field]
    base = question(route, "hello there", temperature=1, seed=5, max_tokens=8) | rest
    if route == COMPLETIONS and field == "return_tokens_as_token_ids":
        base["logprobs"] = 1
    answer(random_model, route, base)  # so that both find the same in the cache
    before = answer(random_model, route, base)
    assert before[0] == 200, before
    status, after = answer(random_model, route, {**base, field: value})
    assert status in (200, 400, 404, 408)
    assert (status, after) != before


def test_no_field_is_without_a_probe():
    for route, schema in ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)):
        probed = {field for other, field in {*PROBES, *ELSEWHERE} if other == route}
        assert probed | HARMLESS == set(schema.model_fields), route
        assert not probed & HARMLESS
