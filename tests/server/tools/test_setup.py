"""Flags, and which format a chat template asks for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from octavo.server.protocol import ChatRequest
from octavo.server.tools.registry import FORMATS, REASONING, detected
from octavo.server.tools.requests import tool_use
from octavo.server.tools.setup import HARMONY, AnswerPlan, Parsing, check_flags
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import load_tokenizer
from octavo.types import ConfigError, InvalidRequest, StructuredOutputsParams
from tests.server.mock_server import write_byte_tokenizer
from tests.text import templates


@pytest.mark.parametrize(
    "flags, part",
    [
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
        ({"reasoning_parser": "openai", "tool_call_parser": "hermes"}, "openai for both"),
        ({"reasoning_parser": "qwen3", "tool_call_parser": "openai"}, "drop --reasoning-parser"),
    ],
)
def test_flags_that_contradict_each_other(flags, part):
    with pytest.raises(ConfigError, match=part):
        check_flags(ServerConfig(**flags))


def test_parsers_need_text():
    for flags in ({"tool_call_parser": "hermes"}, {"reasoning_parser": "qwen3"}):
        with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
            check_flags(ServerConfig(**flags), skip_tokenizer_init=True)
    check_flags(ServerConfig(), skip_tokenizer_init=True)
    check_flags(ServerConfig(reasoning_parser="openai_gptoss", tool_call_parser="auto"))


def test_each_name_of_a_flag_is_a_parser():
    assert set(TOOL_CALL_PARSERS) == {"auto", *FORMATS}
    assert set(REASONING_PARSERS) == {*REASONING, *HARMONY}


@pytest.mark.parametrize(
    "part, name",
    [
        ("<tool_call>\n{\"name\": <function-name>", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("'[TOOL_CALLS] ['", "mistral"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek_v3"),
        ("'<|start|>assistant<|channel|>final<|message|>'", "openai"),
        ("<|tool_call|>", "granite"),
        ('{"name": function name, "parameters": dictionary', "llama3_json"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        (templates.HERMES, "hermes"),
        (templates.MISTRAL, "mistral"),
        (templates.CHATML, "json"),
        (None, "json"),
    ],
)  # fmt: skip
def test_a_template_tells_its_format(part, name):
    assert detected(part).name == name


def test_a_parser_that_is_not_the_templates_is_warned_of(tmp_path, caplog):
    tokenizer = tokenizer_with(tmp_path)
    template = ChatTemplate(templates.MISTRAL, tokenizer)
    with caplog.at_level(logging.INFO, "octavo"):
        Parsing(ServerConfig(tool_call_parser="hermes"), tokenizer, template)
        assert "the chat template shows calls as mistral does" in caplog.text
        Parsing(ServerConfig(tool_call_parser="auto"), tokenizer, template)
        assert "read as mistral" in caplog.text


# ---- what an answer must match ----

THINK = ("<think>", "</think>")
MARKS = (*THINK, "<|turn|>", *FORMATS["openai"].MARKS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tokenizer_with(directory, *marks: str):
    write_byte_tokenizer(directory, False, None, marks)
    return load_tokenizer(directory)


def planned(parsing: Parsing, prompt: list[int], **fields: Any) -> AnswerPlan | None:
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
    return parsing.plan(body, tool_use(body), prompt)


def constraint(directory, parser: str, prompt: list[str], sent: Any = None, **fields: Any):
    """Of a server with that reasoning parser, and calls of Hermes (or none of that)."""
    tokenizer = tokenizer_with(directory, *MARKS)
    tools = None if parser in HARMONY else "hermes"
    flags = ServerConfig(
        enable_auto_tool_choice=tools is not None, tool_call_parser=tools, reasoning_parser=parser
    )
    parsing = Parsing(flags, tokenizer, None)
    ids = [tokenizer.added_id(text) for text in prompt]
    plan = planned(parsing, ids, **fields)
    params = StructuredOutputsParams(**sent) if sent else None
    found = parsing.constraint(plan, params)
    return plan, found, tokenizer


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    "parser, prompt, after",
    [
        ("qwen3", ["<|turn|>", "<think>"], "</think>"),
        ("qwen3", ["<|turn|>", "<think>", "</think>"], None),
        ("deepseek_r1", ["<|turn|>"], "</think>"),
        ("deepseek_r1", ["<think>", "</think>"], None),
        ("openai", ["<|start|>"], "<|channel|>final<|message|>"),
    ],
)
def test_a_clients_constraint_begins_after_reasoning(tmp_path, parser, prompt, after):
    _, found, _ = constraint(tmp_path, parser, prompt, {"regex": "a+"})
    assert (found.regex, found.after) == ("a+", after)
    _, found, _ = constraint(tmp_path, parser, prompt, {"json": SCHEMA})
    assert found.after == after and (found.json or "%json" in found.grammar)


def test_reasoning_may_or_may_not_come_before_json(tmp_path):
    _, found, tokenizer = constraint(tmp_path, "qwen3", ["<|turn|>"], {"json": SCHEMA})
    begin, end = (tokenizer.added_id(text) for text in THINK)
    assert found.after is None and f"(<[{begin}]> " in found.grammar
    assert f" <[{end}]>)?" in found.grammar and '%json {"type": "object"' in found.grammar


@pytest.mark.parametrize("prompt, after", [(["<think>"], "</think>"), (["<|turn|>"], None)])
def test_forced_calls_come_after_reasoning(tmp_path, prompt, after):
    _, found, _ = constraint(tmp_path, "qwen3", prompt, tools=[TOOL], tool_choice="required")
    assert found.after == after and '"<tool_call>"' in found.grammar
    assert ("<[" in found.grammar) is (after is None)  # reasoning that may come


def test_a_choice_left_to_the_model_is_free_unless_a_function_is_strict(tmp_path):
    _, found, _ = constraint(tmp_path, "qwen3", ["<|turn|>"], tools=[TOOL])
    assert found is None
    _, found, _ = constraint(tmp_path, "qwen3", ["<|turn|>"], tools=[STRICT])
    assert '[suffix="<tool_call>"]' in found.grammar
    _, found, _ = constraint(tmp_path, "qwen3", ["<|turn|>"], {"json": SCHEMA}, tools=[TOOL])
    assert "<tool_call>" in found.grammar and found.json is None
    with pytest.raises(InvalidRequest, match="send one of them"):
        constraint(
            tmp_path, "qwen3", ["<|turn|>"], {"regex": "a"}, tools=[TOOL], tool_choice="required"
        )


def test_python_gives_way_to_json_where_a_schema_asks_for_more(tmp_path):
    parsing = Parsing(ServerConfig(tool_call_parser="pythonic"), tokenizer_with(tmp_path), None)
    for extra, name in (({}, "pythonic"), ({"minimum": 1}, "json")):
        schema = {"properties": {"a": {"type": "integer", **extra}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema,
                                                 "strict": True}}  # fmt: skip
        plan = planned(parsing, [], tools=[tool], tool_choice="required")
        assert plan is not None and plan.format.name == name


def test_text_is_read_by_no_parser_where_there_is_nothing_to_find(tmp_path):
    flags = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    parsing = Parsing(flags, tokenizer_with(tmp_path), None)
    assert planned(parsing, []) is None
    assert planned(parsing, [], tools=[TOOL], tool_choice="none") is None
    assert planned(parsing, [], tools=[TOOL]) is not None
