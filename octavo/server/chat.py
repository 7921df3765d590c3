"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from starlette.requests import Request

from octavo.server.answers import Answer
from octavo.server.generation import Choice, Piece
from octavo.server.logprobs import chat_entries, prompt_logprobs
from octavo.server.protocol import ChatFields, ChatRequest, Message
from octavo.server.state import ServerState
from octavo.server.streaming import encode_json, members
from octavo.server.tools.prompt import as_text, described
from octavo.text.chat import ChatTemplate, check_template_variables
from octavo.types import ConfigError, InvalidRequest


async def chat_ids(
    state: ServerState,
    body: ChatFields,
    messages: list[Message],
    add_special_tokens: bool | None,
    request: Request | None = None,
) -> list[int]:
    """The conversation's token ids, through the model's template. Tools that the template does
    not know are described in the system message."""
    template = await _template_of(state, body, request)
    variables = _template_variables(template, body)
    continue_final = bool(body.continue_final_message)
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continue_final

    shows_tools = "tools" in template.variables
    wants_tools = not isinstance(body, ChatRequest) or body.tool_choice != "none"

    def encode() -> list[int]:
        plain = [message.model_dump(exclude_none=True) for message in messages]
        if not template.shows_calls:
            plain = as_text(plain)
        if body.tools and not shows_tools and wants_tools:
            assert state.parsing is not None
            plain = described(plain, body.tools, state.parsing.example)
        return template.encode(
            plain,
            tools=body.tools if shows_tools else None,
            documents=body.documents,
            add_generation_prompt=generation_prompt,
            continue_final_message=continue_final,
            add_special_tokens=bool(add_special_tokens),
            allow_special_in_content=state.server.allow_special_tokens_in_content,
            **variables,
        )

    num_chars = sum(map(_num_chars, messages))
    if isinstance(body, ChatRequest) and body.truncate_prompt_tokens is None:
        state.check_text_length(num_chars, "messages")
    return await state.encode(encode, num_chars, request)


async def _template_of(
    state: ServerState, body: ChatFields, request: Request | None
) -> ChatTemplate:
    """The model's template, or the request's own where the operator allows that."""
    source = body.chat_template
    if source is None:
        return state.require_template()
    if not state.server.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template in a request is not allowed here; the operator allows it with "
            "--trust-request-chat-template, or sets one with --chat-template",
            "chat_template",
        )
    tokenizer = state.require_tokenizer("messages")

    def compile() -> ChatTemplate:
        try:
            return ChatTemplate(source, tokenizer, state.server.chat_template_content_format)
        except ConfigError as error:
            raise InvalidRequest(str(error), "chat_template") from None

    return await state.workers.run(compile, len(source), request.receive if request else None)


def _num_chars(message: Message) -> int:
    content = message.content
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.text) for part in content)


def check_without_messages(body: ChatFields) -> None:
    """Raises InvalidRequest for a field that says how messages become a prompt, where a prompt was
    sent itself."""
    for name in ChatFields.model_fields:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is for messages, and none were sent", name)


def _template_variables(template: ChatTemplate, body: ChatFields) -> dict[str, Any]:
    """Variables for the template; one that it never reads would be ignored, so it is refused."""
    variables = dict(body.chat_template_kwargs or {})
    check_template_variables(variables)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    sent = dict.fromkeys(variables, "chat_template_kwargs")
    sent.update({n: n for n in ("documents", "reasoning_effort") if getattr(body, n)})
    for name, field in sent.items():
        if name not in template.variables:
            raise InvalidRequest(f"this model's chat template does not use {name!r}", field)
    return variables


class ChatAnswer(Answer):
    """The response to a chat request, whole or as events."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    body: ChatRequest

    def finish_reason(self, choice: Choice) -> str | None:
        """As the client is told it."""
        return choice.finish_reason

    # ---- whole ----

    def message(self, choice: Choice, text: str) -> dict[str, Any]:
        """What the choice says, all in all."""
        return {"content": self.echoed() + text}

    def choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        rows = [row for piece in pieces for row in piece.logprobs]
        message = self.message(choice, "".join(piece.text for piece in pieces))
        result = {
            "index": choice.index,
            "message": {"role": "assistant", **message},
            "logprobs": self._logprobs(rows, self.stopped(choice)),
            "finish_reason": self.finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            result["token_ids"] = choice.token_ids
        return result

    def members(self) -> dict[str, Any]:
        prompt = self.generation.prompts[0]
        extra = super().members()
        if self.body.return_token_ids:
            extra["prompt_token_ids"] = prompt.ids
        if self.body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(self.names, len(prompt.ids), prompt.logprobs)
        return extra

    # ---- events ----

    def events(self, batch: list[Piece]) -> bytes:
        frame, plain = self.frames.frame, self.plain
        out = []
        for piece in batch:
            if piece.is_first:
                out.append(frame(*self.opening(piece.choice)))
            if piece.text or piece.is_last or not plain:
                delta = b'{"content":%b}' % encode_json(piece.text) if piece.text else b"{}"
                out.append(frame(self.event(piece, delta), self.chunk_tail(piece)))
        return b"".join(out)

    def opening(self, choice: Choice) -> tuple[bytes, bytes]:
        """The first event of a choice: its role, and whatever belongs to the prompt."""
        delta = {"role": "assistant", "content": self.echoed()}
        event = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = {}
        prompt = choice.prompt
        if choice.index == 0 and self.body.return_token_ids:
            extra["prompt_token_ids"] = prompt.ids
        if choice.index == 0 and self.body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(self.names, len(prompt.ids), prompt.logprobs)
        return encode_json(event), members(**extra) + self.continuous_usage()

    def event(self, piece: Piece, delta: bytes, first: bool = True, last: bool = True) -> bytes:
        """One of a piece's events: the first has what belongs to its tokens, the last its end."""
        choice = piece.choice
        logprobs, more = b"null", b""
        if first and not self.plain:
            stopped = piece.is_last and self.stopped(choice)
            logprobs = encode_json(self._logprobs(piece.logprobs, stopped))
            if self.body.return_token_ids:
                more = members(token_ids=piece.token_ids)
        end = b"null"
        if last and piece.is_last:
            end = encode_json(self.finish_reason(choice))
            more += members(stop_reason=choice.stop_reason)
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            choice.index, delta, logprobs, end, more,
        )  # fmt: skip

    # ---- parts ----

    @cached_property
    def plain(self) -> bool:
        """Whether tokens that add no text need no event."""
        return not (self.body.logprobs or self.body.return_token_ids)

    def _logprobs(self, rows: list[Any], stopped: bool) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": chat_entries(self.names, rows, stopped)}

    def echoed(self) -> str:
        """With echo: the last message's text, where the answer continues it."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != "assistant" or last.content is None:
            return ""
        if isinstance(last.content, str):
            return last.content
        return "".join(part.text for part in last.content)
