"""Flags, and which format a chat template asks for."""

from __future__ import annotations

import pytest

from octavo.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from octavo.server.tools.registry import FORMATS, REASONING, detected
from octavo.server.tools.setup import HARMONY, check_flags
from octavo.types import ConfigError
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
