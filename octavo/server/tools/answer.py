"""Chat answers from which reasoning and calls are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.answers import Answer
from octavo.server.chat import ChatAnswer
from octavo.server.generation import Choice, Piece
from octavo.server.protocol import ChatRequest
from octavo.server.state import ServerState
from octavo.server.streaming import encode_json
from octavo.server.tools.deltas import Arguments, CallStart, Content, Delta, Message, Reasoning
from octavo.server.tools.parser import AnswerParser
from octavo.server.tools.requests import ToolUse
from octavo.server.tools.setup import AnswerPlan
from octavo.types import InvalidRequest, SamplingParams


def reading(
    state: ServerState,
    body: ChatRequest,
    use: ToolUse,
    prompt: Sequence[int],
    params: SamplingParams,
) -> tuple[Callable[..., Answer], Mapping[int, str] | None, SamplingParams]:
    """The kind of answer to a request, the tokens that its text shows as marks, and ``params``
    with what the answer must match. Raises InvalidRequest."""
    assert state.parsing is not None  # there is a template, so there is a tokenizer
    plan = state.parsing.plan(body, use, prompt)
    if plan is None:
        return ChatAnswer, None, params
    constraint = state.parsing.constraint(plan, params.structured_outputs)
    if body.use_beam_search and constraint is not None:
        raise InvalidRequest(
            "calls that are constrained (tool_choice required or a name, strict functions) and "
            "use_beam_search cannot be combined in this version",
            "tool_choice" if use.forced else "tools",
        )
    if constraint is not params.structured_outputs:
        params = params.settled(structured_outputs=constraint)
    return partial(ReadChatAnswer, plan=plan), plan.marks.tokens, params


class ReadChatAnswer(ChatAnswer):
    """As ChatAnswer, with a parser between text and message for each choice."""

    def __init__(self, *args: Any, plan: AnswerPlan) -> None:
        super().__init__(*args)
        self._plan = plan
        self._parsers: dict[int, AnswerParser] = {}
        self._messages: dict[int, Message] = {}  # of a whole response

    def finish_reason(self, choice: Choice) -> str | None:
        num_calls = self._parser(choice).sink.num_whole
        return self._plan.finish_reason(choice.finish_reason, num_calls)

    def hear(self, piece: Piece) -> None:
        said = self._messages.setdefault(piece.choice.index, Message())
        said.add(self._said(piece))

    def message(self, choice: Choice, text: str) -> dict[str, Any]:
        said = self._messages.get(choice.index) or Message()
        content = self.echoed() + said.content
        reasoning = said.reasoning if self._plan.shows_reasoning else ""
        empty = said.calls or reasoning
        message: dict[str, Any] = {"content": content if content or not empty else None}
        if self._plan.reads_reasoning and self._plan.shows_reasoning:
            message.update(_both_names(reasoning or None))
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls.values()
            ]
        return message

    def events(self, batch: list[Piece]) -> bytes:
        out = []
        for piece in batch:
            if piece.is_first:
                out.append(self.frames.frame(*self.opening(piece.choice)))
            deltas = [encode_json(delta) for delta in self._shown(self._said(piece))]
            if not deltas and (piece.is_last or not self.plain):
                deltas.append(b"{}")
            for place, delta in enumerate(deltas, 1):
                last = place == len(deltas)
                event = self.event(piece, delta, first=place == 1, last=last)
                tail = self.chunk_tail(piece) if last else self.continuous_usage()
                out.append(self.frames.frame(event, tail))
        return b"".join(out)

    def _parser(self, choice: Choice) -> AnswerParser:
        if choice.index not in self._parsers:
            self._parsers[choice.index] = self._plan.parser()
        return self._parsers[choice.index]

    def _said(self, piece: Piece) -> list[Delta]:
        parser = self._parser(piece.choice)
        said = parser.feed(piece.text)
        return [*said, *parser.finish()] if piece.is_last else said

    def _shown(self, said: list[Delta]) -> Iterator[dict[str, Any]]:
        """The deltas of events; each tells one thing, a call's start with its first arguments."""
        start: CallStart | None = None
        for delta in said:
            if isinstance(delta, Content):
                yield {"content": delta.text}
            elif isinstance(delta, Reasoning):
                if self._plan.shows_reasoning:
                    yield _both_names(delta.text)
            elif isinstance(delta, CallStart):
                start = delta
            elif isinstance(delta, Arguments):
                call: dict[str, Any] = {"index": delta.index}
                function = {"arguments": delta.text}
                if start is not None:
                    call |= {"id": start.id, "type": "function"}
                    function = {"name": start.name, **function}
                    start = None
                yield {"tool_calls": [{**call, "function": function}]}


def _both_names(text: str | None) -> dict[str, Any]:
    """vLLM calls it reasoning; DeepSeek, and vLLM until 0.15, reasoning_content."""
    return {"reasoning": text, "reasoning_content": text}
