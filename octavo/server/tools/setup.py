"""The formats a server reads, and the plan for reading one request's answers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import ServerConfig
from octavo.server.protocol import ChatRequest
from octavo.server.tools.constraints import forced, free, json_after
from octavo.server.tools.format import Format, Tools
from octavo.server.tools.generic import Json
from octavo.server.tools.marks import Marks
from octavo.server.tools.openai import CHANNEL, MESSAGE, START, OpenAI
from octavo.server.tools.parser import AnswerParser
from octavo.server.tools.pythonic import Pythonic
from octavo.server.tools.qwen3_coder import Qwen3Coder
from octavo.server.tools.reasoning import Reasons
from octavo.server.tools.registry import FORMATS, REASONING, detected
from octavo.server.tools.requests import ToolUse
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import ConfigError, InvalidRequest, StructuredOutputsParams

logger = logging.getLogger("octavo")

BLANK = " "  # the white space that models write, and need, in the JSON of calls
HARMONY = ("openai", "openai_gptoss")


def check_flags(server: ServerConfig, skip_tokenizer_init: bool = False) -> None:
    """Raises ConfigError for flags that contradict each other."""
    tools, reasoning = server.tool_call_parser, server.reasoning_parser
    if server.enable_auto_tool_choice and tools is None:
        raise ConfigError(
            "--enable-auto-tool-choice needs --tool-call-parser: name the format of the model's "
            "calls, or auto to take the one its chat template shows"
        )
    if skip_tokenizer_init and (tools or reasoning):
        flag = "--tool-call-parser" if tools else "--reasoning-parser"
        raise ConfigError(f"{flag} reads text, and --skip-tokenizer-init serves none: drop one")
    if reasoning in HARMONY and tools not in (None, "auto", "openai"):
        raise ConfigError(
            f"--reasoning-parser {reasoning} reads the whole of an answer, calls too: with "
            f"--tool-call-parser {tools} it cannot; use openai for both"
        )
    if tools == "openai" and reasoning not in (None, *HARMONY):
        raise ConfigError(
            f"--tool-call-parser openai reads reasoning, too: drop --reasoning-parser {reasoning}"
        )


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers to one request are read."""

    format: type[Format]
    marks: Marks
    reasoning: type[Reasons] | None
    use: ToolUse
    tools: Tools
    in_reasoning: bool | None  # whether the prompt ended inside of reasoning
    prefix: str  # what the prompt already holds of the answer
    skip_special: bool
    shows_reasoning: bool  # whether the client wants it

    @property
    def reads_reasoning(self) -> bool:
        return self.reasoning is not None or self.format is OpenAI

    def parser(self) -> AnswerParser:
        """For one choice."""
        parser = AnswerParser(
            self.marks,
            self.format,
            self.reasoning,
            self.tools,
            in_reasoning=self.in_reasoning,
            most_calls=None if self.use.parallel else 1,
            skip_special=self.skip_special,
        )
        parser.feed(self.prefix)
        return parser

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """The table of docs/tools.md; ``reason`` is the engine's, ``num_calls`` counts whole
        calls."""
        if reason == "stop" and num_calls and self.use.choice != "named":
            return "tool_calls"
        return reason


class Parsing:
    """A server's formats, resolved against its vocabulary."""

    def __init__(
        self, server: ServerConfig, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        """Raises ConfigError as ``check_flags``."""
        check_flags(server)
        self._tokenizer = tokenizer
        self._template = template.source if template else ""
        self._auto = server.enable_auto_tool_choice
        self.format: type[Format] | None = None
        shown = detected(self._template)
        if server.tool_call_parser == "auto":
            self.format = shown
            why = "shows no format" if shown is Json else "shows them so"
            logger.info("tool calls are read as %s: the chat template %s", shown.name, why)
        elif server.tool_call_parser is not None:
            self.format = FORMATS[server.tool_call_parser]
            if shown not in (self.format, Json):
                logger.warning(
                    "--tool-call-parser %s: the chat template shows calls as %s does",
                    server.tool_call_parser,
                    shown.name,
                )
        self.reasoning: type[Reasons] | None = None
        if server.reasoning_parser in HARMONY:
            if self.format not in (None, OpenAI):
                self.format = OpenAI
            self._plain: type[Format] = OpenAI
        else:
            self._plain = OpenAI if self.format is OpenAI else Format
            if server.reasoning_parser is not None:
                self.reasoning = REASONING[server.reasoning_parser]
        self._marks: dict[str, Marks] = {}

    @property
    def example(self) -> str:
        """A call as the server reads it where nothing else is said."""
        return (self.format or Json).EXAMPLE

    def marks(self, kind: type[Format]) -> Marks:
        if kind.name not in self._marks:
            self._marks[kind.name] = self._resolved(kind)
        return self._marks[kind.name]

    def _resolved(self, kind: type[Format]) -> Marks:
        texts = (*kind.MARKS, *(self.reasoning.all_marks() if self.reasoning else ()))
        return Marks(texts, self._tokenizer.added_id, self._tokenizer.special_ids)

    def plan(self, body: ChatRequest, use: ToolUse, prompt: Sequence[int]) -> AnswerPlan | None:
        """None when nothing but text is to be read. Raises InvalidRequest for a choice left to
        the model on a server that has not been told the model's format."""
        if use.choice == "auto" and not (self._auto and self.format):
            raise InvalidRequest(
                "tool_choice 'auto', the default with tools, needs a server started with "
                "--enable-auto-tool-choice and --tool-call-parser FORMAT (or auto); on this one "
                "'required', a function by name and 'none' work",
                "tools" if body.tool_choice is None else "tool_choice",
            )
        kind = self._plain
        if use.calls:
            kind = self.format or (OpenAI if self._plain is OpenAI else Json)
            if use.forced and kind in (Pythonic, Qwen3Coder) and not _enforceable(kind, use):
                kind = Json
        if kind is Format and self.reasoning is None:
            return None
        marks = self.marks(kind)
        tools: Mapping[str, Mapping[str, object]] = {
            function.name: function.parameters for function in use.functions if use.calls
        }
        return AnswerPlan(
            format=kind,
            marks=marks,
            reasoning=self.reasoning,
            use=use,
            tools=tools,
            in_reasoning=self._in_reasoning(prompt),
            prefix=self._prefix(marks, prompt) if kind is OpenAI else "",
            skip_special=body.skip_special_tokens is not False,
            shows_reasoning=body.include_reasoning is not False,
        )

    def constraint(
        self, plan: AnswerPlan, sent: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """What the answer must match: calls, what the client ``sent``, or either. A constraint
        begins after reasoning. Raises InvalidRequest for two that exclude each other."""
        use, marks, thinks = plan.use, plan.marks, plan.reasoning
        surely = thinks is not None and (
            plan.in_reasoning or (plan.in_reasoning is None and thinks.AT_ONCE)
        )
        after = thinks.END if thinks is not None and surely else None
        maybe = thinks if plan.in_reasoning is None and not surely else None
        schema = _schema(sent)
        if use.forced:
            if sent is not None:
                raise InvalidRequest(
                    "tool_choice asks for a call and the request constrains its text, too "
                    f"({sent.kind}): send one of them",
                    "tool_choice",
                )
            grammar = forced(plan.format, marks, use, self._template, maybe)
        elif use.calls and schema is not None:
            grammar = forced(plan.format, marks, use, self._template, maybe, schema)
        elif sent is not None:
            if plan.format is OpenAI:
                return replace(sent, after=f"{CHANNEL}final{MESSAGE}")
            if schema is None or (after is None and maybe is None):
                return replace(sent, after=after)
            grammar = json_after(marks, maybe, schema)
        elif use.calls and any(function.strict for function in use.functions):
            grammar = free(plan.format, marks, use, self._template)
        else:
            return None
        return StructuredOutputsParams(
            grammar=grammar,
            after=after,
            disable_any_whitespace=sent is not None and sent.disable_any_whitespace,
            whitespace_pattern=sent.whitespace_pattern if sent is not None else BLANK,
        )

    def _in_reasoning(self, prompt: Sequence[int]) -> bool | None:
        """By the last control token of the prompt, which is the template's: what clients write is
        never one. A vocabulary without the marks as tokens: by the prompt's last characters."""
        if self.reasoning is None:
            return None
        tokenizer, begin, end = self._tokenizer, self.reasoning.BEGIN, self.reasoning.END
        ids = tokenizer.added_id(begin), tokenizer.added_id(end)
        if None not in ids:
            last = next((i for i in reversed(prompt) if i in tokenizer.control_ids), None)
            return None if last not in ids else last == ids[0]
        text = tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip()
        return None if not text.endswith((begin, end)) else text.endswith(begin)

    def _prefix(self, marks: Marks, prompt: Sequence[int]) -> str:
        """The header of the message that the answer goes on with, and what follows it."""
        start = self._tokenizer.added_id(START)
        if start is None or start not in prompt:
            return ""
        place = len(prompt) - 1 - list(reversed(prompt)).index(start)
        table = self._tokenizer.bytes_of
        texts = [marks.tokens.get(i) or table[i].decode("utf-8", "replace") for i in prompt[place:]]
        return "".join(texts)


def _schema(sent: StructuredOutputsParams | None) -> dict[str, Any] | None:
    """The schema of a constraint that is one."""
    if sent is None or sent.kind not in ("json", "json_object"):
        return None
    if sent.kind == "json_object":
        return {"type": "object"}
    found = sent.json
    if isinstance(found, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(found)
    return found if isinstance(found, dict) else None


def _enforceable(kind: type[Format], use: ToolUse) -> bool:
    """Whether calls can be held to all functions' schemas in this format."""
    try:
        forced(kind, Marks(()), use, "")
    except InvalidRequest:
        return False
    return True
