"""``octavo chat``: a conversation in the terminal, answers streamed as they are made."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from octavo.cli.arguments import Arguments, Command
from octavo.cli.asking import AskOptions, asked_server, lines_from_user, sampling_fields
from octavo.cli.connection import Connection
from octavo.config import EngineConfig
from octavo.flags import flag
from octavo.types import OctavoError

COMMAND_LINE = re.compile(r"/[a-z?]+")  # a line that is no message but looks like /new
FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class ChatOptions(AskOptions):
    system_prompt: str | None = flag(None, "what the model is told first", group="ask", top=True)


COMMAND = Command(
    "chat",
    "Talks with a model: of a running server, or of one started here when MODEL is named. "
    "/new begins a new conversation, Ctrl-D ends it.",
    (ChatOptions, EngineConfig),
    examples=(
        "octavo chat                               the server at 127.0.0.1:8000",
        "octavo chat smollm2-135m                  the demo model, started for this chat",
        "octavo chat --url http://host:8000 -q Hi  one question",
    ),
    migrating=True,
)


def run(arguments: Arguments) -> int:
    options = arguments.build(ChatOptions)
    with asked_server(arguments, options) as (connection, model):
        conversation = _Conversation(connection, model, options)
        if options.quick is not None:
            conversation.ask(options.quick)
            return 0
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{model} at {connection.url} (/new: forget, Ctrl-D: end)")
        for line in lines_from_user("> " if interactive else ""):
            if line.strip() == "/new":
                conversation.forget()
                continue
            if interactive and COMMAND_LINE.fullmatch(line.strip()):
                print(f"no command {line.strip()}; /new: forget, Ctrl-D: end", file=sys.stderr)
                continue
            try:
                conversation.ask(line)
            except KeyboardInterrupt:  # ends the answer, not the chat
                conversation.take_back()
                print("\n(stopped)")
                if not interactive:
                    raise
            except OctavoError as error:  # such as a conversation that got too long
                conversation.take_back()
                if not interactive:
                    raise
                print(f"\noctavo: {error}", file=sys.stderr)
    return 0


class _Conversation:
    def __init__(self, connection: Connection, model: str, options: ChatOptions) -> None:
        self._connection = connection
        self._fields = {"model": model, **sampling_fields(options)}
        system = options.system_prompt
        self._opening = [{"role": "system", "content": system}] if system else []
        self.forget()

    def forget(self) -> None:
        self._messages: list[dict[str, Any]] = list(self._opening)

    def take_back(self) -> None:
        """Forgets a question that was not answered in full."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()

    def ask(self, question: str) -> None:
        """Prints the answer as it comes and remembers both."""
        self._messages.append({"role": "user", "content": question})
        answer = ""
        body = {**self._fields, "messages": self._messages}
        thinking = _Thinking()
        try:
            for event in self._connection.stream("/v1/chat/completions", body):
                for choice in event["choices"]:
                    delta = choice["delta"]
                    thinking.show(delta.get("reasoning") or delta.get("reasoning_content") or "")
                    if text := delta.get("content") or "":
                        thinking.end()
                        answer += text
                        print(text, end="", flush=True)
        finally:
            thinking.end()
        print()
        if thinking.any and not answer:
            hint = "the model reasoned and did not answer; --max-tokens may be too small"
            print(f"octavo: {hint}", file=sys.stderr)
        self._messages.append({"role": "assistant", "content": answer})


class _Thinking:
    """Shows reasoning faintly before the answer; not where the output is no terminal."""

    def __init__(self) -> None:
        self.any = False  # reasoning came
        self._open = False

    def show(self, text: str) -> None:
        if not text:
            return
        self.any = True
        if sys.stdout.isatty():
            print(text if self._open else FAINT + text, end="", flush=True)
            self._open = True

    def end(self) -> None:
        if self._open:
            print(PLAIN + "\n")
            self._open = False
