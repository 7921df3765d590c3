"""Grammars that make an answer call: of each format, so that a model stays in the form it knows.

Two kinds: *forced* answers are calls and nothing else (``tool_choice`` required or a name); *free*
ones are any text, in which what begins like a call is one (auto, where a function is strict).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.server.tools import deepseek_v3 as deepseek
from octavo.server.tools import openai as harmony
from octavo.server.tools.coder_grammar import coder_parameters
from octavo.server.tools.format import Format
from octavo.server.tools.lark import Lark, closed
from octavo.server.tools.marks import Marks
from octavo.server.tools.python_grammar import python_arguments
from octavo.server.tools.reasoning import Reasons
from octavo.server.tools.requests import Function, ToolUse
from octavo.types import InvalidRequest

Functions = Sequence[tuple[Function, dict[str, Any]]]  # with the closed schema of its arguments

BREAKS = "/\\n{0,2}/"  # after reasoning
_NAMED = r"\"(name|type|function|id)\""


@dataclass
class Marked:
    """``begin`` is a mark, ``rest`` an expression; ``separator`` None: there is one block."""

    begin: str
    rest: str
    separator: str | None = None


@dataclass
class Bare:
    """``calls``: an expression. ``openings``: how a line of calls begins, and an expression for
    what follows that; ``forbidden``: a regex for lines that the reader might take for calls."""

    calls: str
    openings: list[tuple[str, str]]
    forbidden: str


@dataclass
class Messages:
    """Harmony's. ``thoughts`` may come before a call, ``texts`` may come instead of one, too."""

    call: str
    thoughts: str
    texts: str


Written = Marked | Bare | Messages


@dataclass
class Writer:
    """What a format's grammar is made from."""

    lark: Lark
    functions: Functions
    parallel: bool
    template: str = ""
    _objects: dict[str, str] = field(default_factory=dict)

    def tails(self, key: str) -> str:
        """What follows ``{"name": "``."""
        if key not in self._objects:
            literal, schema_of = self.lark.literal, self.lark.json
            self._objects[key] = self.lark.one_of(
                [
                    f"{literal(function.name + chr(34) + ', ' + chr(34) + key + chr(34) + ': ')} "
                    f'{schema_of(schema)} "}}"'
                    for function, schema in self.functions
                ]
            )
        return self._objects[key]

    def objects(self, key: str = "arguments") -> str:
        """``{"name": …, key: {…}}`` of any of the functions."""
        name = f"object {key}"
        if name not in self._objects:
            opening = self.lark.literal(_OPENING)
            self._objects[name] = self.lark.rule(f"{opening} {self.tails(key)}")
        return self._objects[name]

    def list(self) -> str:
        return self.lark.rule(f'"[" {self.lark.listed(self.objects(), ", ", self.parallel)} "]"')


_OPENING = '{"name": "'


def forced(
    kind: type[Format],
    marks: Marks,
    use: ToolUse,
    template: str,
    may_think: type[Reasons] | None = None,
    instead: dict[str, Any] | None = None,
) -> str:
    """The Lark grammar of calls. ``template``: the chat template, which tells versions of a format
    apart. ``may_think``: reasoning may come before. ``instead``: a schema for the answer that may
    be given in place of calls."""
    lark, written = _written(kind, marks, use, template)
    if isinstance(written, Messages):
        ends = [written.call]
        if instead is not None:
            ends.append(f"{_final(lark)} {lark.json(instead)}")
        return lark.text(f"({written.thoughts} {_next_message(lark)})* {lark.one_of(ends)}")
    if isinstance(written, Bare):
        calls = written.calls
    else:
        block = lark.rule(f"{lark.mark(written.begin)} {written.rest}")
        several = use.parallel and written.separator is not None
        calls = lark.listed(block, written.separator or "", several)
    if instead is not None:
        calls = lark.one_of([calls, lark.json(instead)])
    return lark.text(f"{_first(lark, kind, may_think)} {calls}")


def json_after(marks: Marks, may_think: type[Reasons] | None, schema: dict[str, Any]) -> str:
    """The Lark grammar of JSON after reasoning: that which has ended, or which may come."""
    lark = Lark(marks)
    return lark.text(f"{_first(lark, Format, may_think)} {lark.json(schema)}")


def _first(lark: Lark, kind: type[Format], may_think: type[Reasons] | None) -> str:
    """What may come before: reasoning, in which no mark of the format is."""
    if may_think is None or not lark.marks.is_token(may_think.BEGIN):
        return lark.rule(BREAKS)
    begin, end = lark.mark(may_think.BEGIN), lark.mark(may_think.END)
    return lark.rule(f"({begin} {lark.text_without(*kind.BEGINS)} {end})? {BREAKS}")


def free(kind: type[Format], marks: Marks, use: ToolUse, template: str) -> str:
    """The Lark grammar of any text in which calls are as their functions' schemas say."""
    lark, written = _written(kind, marks, use, template)
    if isinstance(written, Messages):
        either = lark.one_of([written.call, written.texts])
        return lark.text(f"({written.texts} {_next_message(lark)})* {either}")
    if isinstance(written, Marked):
        times = "*" if use.parallel else "?"
        before = lark.text_before(written.begin)
        after = lark.text_without(written.begin)
        return lark.text(f"({before} {written.rest}){times} {after}")
    body = lark.excluding(rf"((?s:.*)\n)?[ \t\r]*({written.forbidden})(?s:.*)")
    calls = [f"{lark.literal(opening)} {rest}" for opening, rest in written.openings]
    for opening, rest in written.openings:
        before = lark.rule(body, f"[suffix={lark.literal(chr(10) + opening)}]")
        calls.append(f"{before} {rest}")
    return lark.text(lark.one_of([body, *calls]))


def _written(kind: type[Format], marks: Marks, use: ToolUse, template: str) -> tuple[Lark, Written]:
    lark = Lark(marks)
    functions = [(f, closed(f.parameters, f.strict)) for f in use.functions]
    return lark, _WRITERS[kind.name](Writer(lark, functions, use.parallel, template))


def _next_message(lark: Lark) -> str:
    return f'{lark.mark(harmony.END)} {lark.mark(harmony.START)} "assistant"'


def _final(lark: Lark) -> str:
    return f'{lark.mark(harmony.CHANNEL)} "final" {lark.mark(harmony.MESSAGE)}'


# ---- formats ----


def _hermes(w: Writer) -> Written:
    end = w.lark.mark("</tool_call>")
    return Marked("<tool_call>", w.lark.rule(f'"\\n" {w.objects()} "\\n" {end}'), "\n")


def _granite(w: Writer) -> Written:
    return Marked("<|tool_call|>", w.list())


def _mistral(w: Writer) -> Written:
    if not w.lark.marks.is_token("[ARGS]"):
        return Marked("[TOOL_CALLS]", w.list())
    arguments = w.lark.mark("[ARGS]")
    calls = [
        f"{w.lark.literal(function.name)} {arguments} {w.lark.json(schema)}"
        for function, schema in w.functions
    ]
    return Marked("[TOOL_CALLS]", w.lark.one_of(calls), "")


def _deepseek(w: Writer) -> Written:
    literal, mark = w.lark.literal, w.lark.mark
    begin, end = mark(deepseek.CALL_BEGIN), mark(deepseek.CALL_END)
    separator = mark(deepseek.SEPARATOR)
    fenced = "```json" in w.template
    calls = []
    for function, schema in w.functions:
        value = w.lark.json(schema)
        if fenced:
            before, after = literal(f"{function.name}\n```json\n"), literal("\n```")
            calls.append(f'{begin} "function" {separator} {before} {value} {after} {end}')
        else:
            calls.append(f"{begin} {literal(function.name)} {separator} {value} {end}")
    between = "\n" if fenced else ""
    every = w.lark.listed(w.lark.one_of(calls), between, w.parallel)
    return Marked(deepseek.CALLS_BEGIN, w.lark.rule(f"{every} {mark(deepseek.CALLS_END)}"))


def _llama3_json(w: Writer) -> Written:
    calls = w.lark.listed(w.objects("parameters"), "; ", w.parallel)
    more = f'("; " {w.objects("parameters")})*' if w.parallel else ""
    rest = w.lark.rule(f"{w.tails('parameters')} {more}")
    return Bare(calls, [(_OPENING, rest)], rf"\[?\s*\{{\s*{_NAMED}")


def _json(w: Writer) -> Written:
    calls = w.lark.one_of([w.objects(), w.list()])
    more = f'("\\n" {w.objects()})*' if w.parallel else ""
    rest = w.lark.rule(f"{w.tails('arguments')} {more}")
    others = f'(", " {w.objects()})*' if w.parallel else ""
    of_list = w.lark.rule(f'{w.tails("arguments")} {others} "]"')
    return Bare(
        calls, [(_OPENING, rest), ("[" + _OPENING, of_list)], rf"(```\w*\s*)?\[?\s*\{{\s*{_NAMED}"
    )


def _pythonic(w: Writer) -> Written:
    bodies = [
        (function.name, w.lark.rule(python_arguments(w.lark, schema)))
        for function, schema in w.functions
    ]
    call = w.lark.one_of([f'{w.lark.literal(name + "(")} {body} ")"' for name, body in bodies])
    calls = w.lark.rule(f'"[" {w.lark.listed(call, ", ", w.parallel)} "]"')
    more = f'(", " {call})*' if w.parallel else ""
    openings = [(f"[{name}(", w.lark.rule(f'{body} ")" {more} "]"')) for name, body in bodies]
    names = "|".join(name.replace(".", r"\.").replace("-", r"\-") for name, _ in bodies)
    return Bare(calls, openings, rf"\[\s*({names})\s*\(")


def _qwen3_coder(w: Writer) -> Written:
    end = f"{w.lark.literal('</function>' + chr(10))} {w.lark.mark('</tool_call>')}"
    calls = [
        f"{w.lark.literal(f'{chr(10)}<function={function.name}>{chr(10)}')} "
        f"{coder_parameters(w.lark, schema, function.strict)} {end}"
        for function, schema in w.functions
    ]
    return Marked("<tool_call>", w.lark.one_of(calls), "\n")


def _openai(w: Writer) -> Written:
    if not w.lark.marks.is_token(harmony.END):  # nothing would tell text from its end
        raise InvalidRequest(
            "this model's vocabulary has no tokens of the openai format, so its calls cannot be "
            "constrained: leave out strict, and tool_choice required or a name",
            "tools",
        )
    channel, message = w.lark.mark(harmony.CHANNEL), w.lark.mark(harmony.MESSAGE)
    constrain = w.lark.mark(harmony.CONSTRAIN)
    calls = [
        f"{channel} {w.lark.literal(f'commentary to=functions.{function.name} ')} {constrain} "
        f'"json" {message} {w.lark.json(schema)}'
        for function, schema in w.functions
    ]
    text = w.lark.text_without(
        harmony.START, harmony.CHANNEL, harmony.END, harmony.RETURN, harmony.CALL
    )
    thoughts = w.lark.rule(f'{channel} "analysis" {message} {text}')
    texts = w.lark.rule(f'{channel} ("analysis" | "commentary" | "final") {message} {text}')
    return Messages(w.lark.one_of(calls), thoughts, texts)


_WRITERS: dict[str, Callable[[Writer], Written]] = {
    "hermes": _hermes,
    "granite": _granite,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "llama3_json": _llama3_json,
    "json": _json,
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
    "openai": _openai,
}
