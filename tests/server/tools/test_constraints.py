"""Grammars of calls: what they allow, and that whatever they allow is read as valid calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from octavo.grammar.compile import grammar_text
from octavo.server.tools import constraints
from octavo.server.tools.deltas import Message
from octavo.server.tools.lark import closed
from octavo.server.tools.marks import Marks
from octavo.server.tools.parser import AnswerParser
from octavo.server.tools.reasoning import Qwen3
from octavo.server.tools.registry import FORMATS
from octavo.server.tools.requests import Function, ToolUse
from octavo.types import InvalidRequest, StructuredOutputsParams

KINDS = {kind.name: kind for kind in FORMATS.values()}
TEMPLATE = "```json"
THINK = ("<think>", "</think>")
SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F°"]},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "note": {"type": ["string", "null"]},
            "any": {},
            "kind": {"enum": ["a b", 3, None]},
        },
        "required": ["city", "days"],
    },
    "tree": {
        "properties": {"root": {"$ref": "#/$defs/node"}, "ids": {"items": {"type": "number"},
                                                                "type": "array"}},
        "required": ["root"],
        "$defs": {"node": {
            "type": "object",
            "properties": {"name": {"const": "n"}, "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                                      {"type": "null"}]}},
            "required": ["name"], "additionalProperties": False,
        }},
    },
    "now": {},
}  # fmt: skip


def use_of(*names: str, parallel: bool = True) -> ToolUse:
    functions = tuple(Function(name, "", SCHEMAS[name], True) for name in names)
    return ToolUse(functions, "required", parallel)


class Vocabulary:
    """Bytes, an end, and perhaps the marks of a format as tokens."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, kind: str, tokens: bool, special: bool = False) -> None:
        texts = (*KINDS[kind].MARKS, *THINK)
        self.ids = {text: 257 + i for i, text in enumerate(texts)} if tokens else {}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        self.tokens += [text.encode() for text in self.ids]
        self.special_token_ids = [256, *self.ids.values()] if special else [256]
        self.marks = Marks(texts, self.ids.get, self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("nothing is forced")

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        text = grammar_text(StructuredOutputsParams(grammar=grammar), {})
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=[256])
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((mark for mark in self.ids if text.startswith(mark)), None)
            ids += [self.ids[mark]] if mark else list(text[0].encode())
            text = text[len(mark or text[0]) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        parts: list[str] = []
        for index in ids:
            parts.append(self.marks.tokens.get(index) or chr(0xE000 + index))
        raw = "".join(parts)
        out, run = "", b""
        for char in raw:
            if "\ue000" <= char <= "\ue0ff":
                run += bytes([ord(char) - 0xE000])
            else:
                out, run = out + run.decode(errors="replace") + char, b""
        return out + run.decode(errors="replace")


# Harmony without its tokens cannot be constrained.
BOTH = [
    (kind, vocabulary)
    for kind in KINDS
    for vocabulary in ("as text", "tokens", "special")
    if (kind, vocabulary) != ("openai", "as text")
]
VOCABULARIES = {"as text": (False, False), "tokens": (True, False), "special": (True, True)}


def allowed(matcher: llguidance.LLMatcher) -> list[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


# Ways out of free text.
EXITS = ["</think>", "\n</parameter>\n", "<|end|><|start|>assistant<|channel|>commentary to="]
HURRY = [*b"\"}])'0123456789:/,eaolCFnNTr<>.\n "]


def drawn(table: Vocabulary, grammar: str, rng: random.Random, most: int = 60) -> list[int]:
    """A walk through what is allowed; after ``most`` ids towards the end, as fast as it goes."""
    ids: list[int] = []
    matcher = table.matcher(grammar)
    exits = [table.encode(text) for text in EXITS]
    while len(ids) < 4000:
        for out in [*exits] if len(ids) > most else ():
            if matcher.validate_tokens(out) == len(out):
                assert matcher.consume_tokens(out)
                exits = [one for one in exits if one != out or 10 in out]
                ids += out
        choices = allowed(matcher)
        assert choices, matcher.get_error()
        usual = [i for i in choices if 32 <= i < 127 or i > 255] or choices
        draw = rng.choice(usual)
        if len(ids) > most or rng.random() < 0.3:
            marks = table.ids.values()
            ends = [i for i in (*b'"}]', *marks) if i in choices and rng.random() < 0.5]
            draw = next((i for i in [256, *ends, *HURRY] if i in choices), draw)
        if draw == 256:
            return ids
        assert matcher.consume_token(draw)
        ids.append(draw)
    raise AssertionError(f"no end: {table.decode(ids)[-200:]}")


def read(kind: str, vocabulary: Vocabulary, text: str) -> Message:
    parser = AnswerParser(vocabulary.marks, KINDS[kind], Qwen3, SCHEMAS)
    message = Message()
    message.add(parser.feed(text))
    message.add(parser.finish())
    return message


@pytest.mark.parametrize("kind, vocabulary", BOTH)
def test_whatever_a_forced_grammar_allows_is_valid_calls(kind: str, vocabulary: str) -> None:
    table = Vocabulary(kind, *VOCABULARIES[vocabulary])
    validators = {
        name: jsonschema_rs.Draft202012Validator(closed(schema)) for name, schema in SCHEMAS.items()
    }
    seen: set[str] = set()
    rng = random.Random(7)
    alone = [use_of(name, parallel=False) for name in SCHEMAS]
    for use in (use_of("look", "tree", "now"), *alone):
        grammar = constraints.forced(KINDS[kind], table.marks, use, TEMPLATE, Qwen3)
        for _ in range(5):
            text = table.decode(drawn(table, grammar, rng))
            message = read(kind, table, text)
            assert message.calls and not message.content.strip(), text
            assert use.parallel or len(message.calls) == 1
            for call in message.calls.values():
                validators[call.name].validate(json.loads(call.arguments))
                seen.add(call.name)
    assert seen == set(SCHEMAS)


ARGUMENTS = '{"city": "</tool_call>", "days": 3}'
# What each format's grammar allows, written as its model writes it: forced, two calls.
FORCED = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": @}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "look", "arguments": @}, {"name": "now", "arguments": {}}]',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": @}, {"name": "now", "arguments": {}}]',
    "llama3_json": '{"name": "look", "parameters": @}; {"name": "now", "parameters": {}}',
    "json": '[{"name": "look", "arguments": @}, {"name": "now", "arguments": {}}]',
    "pythonic": '[look(city="</tool_call>", days=3), now()]',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\n</tool_call>\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=now>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    "```json\n@\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.look <|constrain|>json<|message|>@",
}


def follows(table: Vocabulary, grammar: str, text: str) -> tuple[bool, bool]:
    """Whether the grammar allows the text, and an end after it."""
    matcher = table.matcher(grammar)
    for index in table.encode(text):
        if index not in allowed(matcher):
            return False, False
        matcher.consume_token(index)
    return True, 256 in allowed(matcher)


@pytest.mark.parametrize("kind, vocabulary", BOTH)
def test_grammars_allow_what_models_write(kind: str, vocabulary: str) -> None:
    tokens, special = VOCABULARIES[vocabulary]
    table = Vocabulary(kind, tokens, special)
    text = FORCED[kind].replace("@", ARGUMENTS)
    if kind == "mistral" and tokens:  # such a vocabulary has [ARGS]
        text = f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}"
    text = text.replace('"</tool_call>"', '"x"') if tokens else text
    text = text.replace(">\n</tool_call>\n</par", ">\nx\n</par") if tokens else text
    use = use_of("look", "tree", "now")
    grammar = constraints.forced(KINDS[kind], table.marks, use, TEMPLATE, None)
    assert follows(table, grammar, text) == (True, True)
    assert follows(table, grammar, "Hello")[0] is False
    free = constraints.free(KINDS[kind], table.marks, use, TEMPLATE)
    before = "" if kind == "openai" else "See: 1 < 2, {x}\n"
    assert follows(table, free, before + text) == (True, True)
    if kind != "openai":
        assert follows(table, free, before) == (True, True)
    else:
        assert follows(table, free, "<|channel|>final<|message|>Hi") == (True, True)
    wrong = text.replace('"days": 3', '"days": "x"').replace("days=3", "days='x'")
    wrong = wrong.replace("days>\n3", "days>\nx")
    assert wrong != text
    assert follows(table, free, before + wrong)[0] is False
    assert follows(table, grammar, wrong)[0] is False


def test_reasoning_may_come_before_forced_calls() -> None:
    table = Vocabulary("hermes", True)
    grammar = constraints.forced(KINDS["hermes"], table.marks, use_of("now"), "", Qwen3)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text in (call, "<think>\nHm {\n</think>\n\n" + call):
        assert follows(table, grammar, text) == (True, True)
    assert follows(table, grammar, "<think>\nHm {\n</think>x")[0] is False


@pytest.mark.parametrize("kind", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"anyOf": [{"properties": {}}]},
        {"properties": {}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
    ],
)
def test_what_a_format_cannot_be_held_to_is_refused(kind: str, schema: dict[str, Any]) -> None:
    table = Vocabulary(kind, False)
    use = ToolUse((Function("f", "", schema, True),), "auto")
    with pytest.raises(InvalidRequest, match="cannot be enforced in"):
        constraints.free(KINDS[kind], table.marks, use, "")
