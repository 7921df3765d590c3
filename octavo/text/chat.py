"""Chat messages to token ids, through the model's Jinja template (docs/text.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from octavo.text import sandbox
from octavo.text.content import (
    ContentFormat,
    MessageForm,
    asks_for_null,
    detect_content_format,
    normalise_messages,
)
from octavo.text.tokenizer import Tokenizer
from octavo.types import ConfigError, InvalidRequest

DEFAULT, WITH_TOOLS = "default", "tool_use"
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
# Arguments of ``ChatTemplate.encode``: not for a request's own template variables.
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "allow_special_in_content",
}

# What is rendered to see how a template writes the arguments of tool calls.
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
    },
}
_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "f", "arguments": '{"pq": "xj"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "b"},
]


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequest when a request's ``chat_template_kwargs`` sets what has a field of its
    own. To be called before they are passed to ``ChatTemplate.encode``."""
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs"
        )


def load_chat_template(
    tokenizer: Tokenizer, override: str | None = None, content_format: str = "auto"
) -> ChatTemplate | None:
    """The operator's template (a file, or the text itself), else the checkpoint's; None when
    there is neither: completions work, chat needs a template.

    Raises ConfigError when the template does not parse or the file does not exist.
    """
    if override is None:
        sources = tokenizer.templates
        if not sources:
            return None
    elif "{" in override or "\n" in override:
        sources = {DEFAULT: override}
    else:
        try:
            sources = {DEFAULT: Path(override).expanduser().read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--chat-template {override}: cannot be read ({reason}); it is no template text "
                "either, which would hold a brace"
            ) from None
    return ChatTemplate(sources, tokenizer, content_format)


class ChatTemplate:
    """A compiled template and the tokenizer it belongs to.

    ``sources``: Jinja source, or several by name ("default", and "tool_use" for requests with
    tools). ``content_format``: "auto", "string" or "openai" (``content``).
    """

    def __init__(
        self, sources: str | dict[str, str], tokenizer: Tokenizer, content_format: str = "auto"
    ) -> None:
        if isinstance(sources, str):
            sources = {DEFAULT: sources}
        environment = sandbox.Sandbox()
        self._sources = sources
        self._templates: dict[str, jinja2.Template] = {}
        self._forms: dict[str, MessageForm] = {}
        self.variables: set[str] = set()  # that any of the templates reads
        for name, source in sources.items():
            tree, variables = sandbox.parse(environment, source, name)
            self.variables |= variables
            auto = content_format == "auto"
            contents = detect_content_format(tree) if auto else ContentFormat(content_format)
            self._forms[name] = MessageForm(contents, asks_for_null(tree))
            self._templates[name] = sandbox.compiled(environment, tree, name)
        self._tokenizer = tokenizer
        for name, form in self._forms.items():
            if self._wants_text_of_calls(name):
                self._forms[name] = replace(form, calls_as_text=True)

    @property
    def source(self) -> str:
        """Jinja text of the default template."""
        return self._sources[self._choose(None)]

    @property
    def shows_calls(self) -> bool:
        """Whether any of the templates writes the calls of tools in past messages."""
        return any("tool_calls" in source for source in self._sources.values())

    @property
    def content_format(self) -> str:
        """Of the default template: "string" or "openai" (or "both": contents go in as sent)."""
        return self._forms[self._choose(None)].content.value

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        allow_special_in_content: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of the rendered conversation. BOS is there when the template writes it.

        The template's own control tokens are control tokens; those written in messages, tools or
        documents are plain characters unless ``allow_special_in_content``. ``add_special_tokens``
        puts the vocabulary's BOS and EOS where the template has not. ``kwargs`` reach the template.

        Raises InvalidRequest with the template's message, or naming the message at fault;
        ``sandbox.NotBrief`` inside ``sandbox.brief``.
        """
        request = self._request(
            messages, tools, documents, add_generation_prompt, continue_final_message, kwargs
        )
        tokenizer = self._tokenizer
        guard = "" if allow_special_in_content else _unused_character(request)
        guarded = _guard(request, tokenizer, guard) if guard else request
        text = self._render(guarded, continue_final_message)
        if guarded is request or guard not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode_guarded(text, guard)
        return tokenizer.surround(ids) if add_special_tokens else ids

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as text. Ids come from ``encode``: text does not tell which control
        tokens are the template's."""
        request = self._request(
            messages, tools, documents, add_generation_prompt, continue_final_message, kwargs
        )
        return self._render(request, continue_final_message)

    def _request(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """The template's variables that come from the request."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of "
                "them to false",
                "continue_final_message",
            )
        if not messages:
            raise InvalidRequest("messages is empty", "messages")
        return {
            **kwargs,
            "messages": normalise_messages(messages, self._forms[self._choose(tools)]),
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _wants_text_of_calls(self, name: str) -> bool:
        """Whether the template puts the arguments of tool calls into the text as they are (most
        write objects as JSON). Found by trying both."""
        if "tool_calls" not in self._sources[name]:
            return False
        found = {as_text: self._shows_call(name, as_text) for as_text in (False, True)}
        return found[True] and not found[False]

    def _shows_call(self, name: str, as_text: bool) -> bool:
        """Whether a call's arguments are JSON in the rendered text. Templates differ in what they
        take for a conversation, so the call's id is as long as Mistral's, and an answer follows."""
        form = replace(self._forms[name], calls_as_text=as_text)
        variables = {
            **self._tokenizer.vocabulary.named_tokens,
            "messages": normalise_messages(_CALL, form),
            "tools": [_TOOL],
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = sandbox.render(self._templates[name], variables)
        except Exception:  # a template is a program: it can fail in any way
            return False
        return '"pq": "xj"' in text or '"pq":"xj"' in text

    def _choose(self, tools: object) -> str:
        if tools and WITH_TOOLS in self._templates:
            return WITH_TOOLS
        return DEFAULT if DEFAULT in self._templates else next(iter(self._templates))

    def _render(self, request: dict[str, Any], continue_final_message: bool) -> str:
        mark = ""
        if continue_final_message:
            mark = _unused_character(request, 1)
            request = {**request, "messages": _with_mark(request["messages"], mark)}
        variables = {**self._tokenizer.vocabulary.named_tokens, **request}
        try:
            text = sandbox.render(self._templates[self._choose(request["tools"])], variables)
        except sandbox.NotBrief:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error.message}", "messages") from None
        except Exception as error:  # a template is a program: it can fail in any way
            raise InvalidRequest(
                f"chat template: {type(error).__name__}: {error}", "messages"
            ) from None
        return _cut_at_mark(text, mark) if mark else text


# ---- continue_final_message ----


def _with_mark(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """``mark`` and a space at the end of the last content: what follows it is cut off, and
    whether the space survives tells whether the template strips contents."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = f"{content}{mark} "
    elif content and content[-1].get("type") == "text":
        last["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{mark} "}]
    else:
        raise InvalidRequest("the last message has no text to continue", "continue_final_message")
    return [*messages[:-1], last]


def _cut_at_mark(text: str, mark: str) -> str:
    at = text.rfind(mark)
    if at < 0:
        raise InvalidRequest(
            "the chat template does not show the last message, so it cannot be continued",
            "continue_final_message",
        )
    kept = text[:at].replace(mark, "")
    return kept if text[at + 1 : at + 2] == " " else kept.rstrip()


# ---- control tokens in what clients wrote ----


def _unused_character(value: Any, rank: int = 0) -> str:
    """The ``rank``-th of the Unicode noncharacters that ``value`` holds nowhere."""
    used = {char for text in _strings(value) for char in _NONCHARACTER.findall(text)}
    free = [chr(code) for code in range(0xFDD2, 0xFDF0) if chr(code) not in used]
    if len(free) <= rank:
        raise InvalidRequest("messages use every noncharacter U+FDD2..U+FDEF", "messages")
    return free[rank]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _strings(item)]
    return []


def _guard(request: dict[str, Any], tokenizer: Tokenizer, guard: str) -> dict[str, Any]:
    """``request`` with ``guard`` inside each control token its strings hold, and after an end that
    the next string could complete to one. The same object when there is nothing to guard.

    Assistant messages are answers that come back: templates read <think> and the like in them, so
    there only tokens flagged special are guarded.
    """
    pattern = tokenizer.control_pattern
    if pattern is None:
        return request
    longest = max(map(len, tokenizer.control_starts), default=0)
    changed = False

    def guarded(text: str, answer: bool) -> str:
        def broken(found: Any) -> str:
            token = str(found[0])
            return token if answer and tokenizer.structural(token) else token[0] + guard + token[1:]

        new = pattern.sub(broken, text)
        ends = (new[-length:] for length in range(1, min(longest, len(new)) + 1))
        if any(end in tokenizer.control_starts for end in ends):
            new += guard
        nonlocal changed
        changed = changed or new != text
        return new

    messages = [
        _map_strings(message, partial(guarded, answer=message["role"] == "assistant"))
        for message in request["messages"]
    ]
    others = {name: value for name, value in request.items() if name != "messages"}
    result = _map_strings(others, partial(guarded, answer=False))
    return {**result, "messages": messages} if changed else request


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string in it changed, keys too: those of a tool's schema are text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            _map_strings(key, change): _map_strings(item, change) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
