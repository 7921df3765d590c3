"""The Jinja environment that chat templates run in. They come with checkpoints, so what one of them
may compute is bounded: it cannot hold up a server or take its memory.

Jinja's immutable sandbox keeps a template from Python's attributes and from changing what it is
given. Beyond that every turn of a loop and every call of a macro counts, and so does every string
that is made; what would be too long is refused before it is made.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.types import ConfigError

MOST_TURNS = 2_000_000  # of loops, and calls of macros
MOST_SECONDS = 10.0
MOST_CHARACTERS = 1 << 26  # of one string, or entries of one list
MOST_CHARACTERS_IN_ALL = 1 << 30
MOST_DIGITS = 10_000  # bits of an integer
MOST_WIDTH = 1 << 20  # of padding, indents, rows

# What a rendering may take of a thread that has other things to do (``brief``).
BRIEF_TURNS = 2_000
BRIEF_SECONDS = 0.01
BRIEF_CHARACTERS = 1 << 15

# In a format: a width of a million or more, one that is an argument.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{7}|\*)|:[^{}]*\d{7}[^{}]*\}")
_WIDTH_GIVEN = re.compile(r"\{[^{}]*:[^{}]*\{")


class NotBrief(Exception):
    """A rendering inside ``brief`` takes more than a busy thread can give. Nothing is wrong with
    it: the same outside of ``brief`` may succeed."""


class _Budget:
    """What is left to one rendering."""

    def __init__(self, brief: bool) -> None:
        self.brief = brief
        self.turns = BRIEF_TURNS if brief else MOST_TURNS
        self.characters = BRIEF_CHARACTERS if brief else MOST_CHARACTERS_IN_ALL
        self.deadline = time.monotonic() + (BRIEF_SECONDS if brief else MOST_SECONDS)

    def turn(self, characters: int) -> None:
        self.turns -= 1
        if self.turns < 0:
            self.refuse(f"it takes more than {MOST_TURNS:,} turns of loops")
        if time.monotonic() > self.deadline:
            self.refuse(f"it takes more than {MOST_SECONDS:g} s")
        self.charge(characters)

    def charge(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            self.refuse(f"it makes more than {MOST_CHARACTERS_IN_ALL:,} characters of text")

    def refuse(self, why: str) -> NoReturn:
        if self.brief:
            raise NotBrief
        raise jinja2.TemplateError(why)


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
_is_brief: ContextVar[bool] = ContextVar("brief", default=False)


@contextlib.contextmanager
def brief() -> Iterator[None]:
    """Renderings inside raise NotBrief where they would take more than some milliseconds."""
    token = _is_brief.set(True)
    try:
        yield
    finally:
        _is_brief.reset(token)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text. Raises what the template raises, and TemplateError where it takes too much
    (inside ``brief``: NotBrief)."""
    budget = _Budget(_is_brief.get())
    token = _budget.set(budget)
    try:
        text = template.render(variables)
    finally:
        _budget.reset(token)
    if budget.brief and len(text) > BRIEF_CHARACTERS:
        raise NotBrief
    return text


def parse(
    environment: jinja2.Environment, source: str, name: str
) -> tuple[jinja2.nodes.Template, set[str]]:
    """The tree, and the variables that are to be given. Raises ConfigError for what is no
    template."""
    tree = _refusing(name, lambda: environment.parse(source))
    return tree, _refusing(name, lambda: find_undeclared_variables(tree))


def compiled(
    environment: jinja2.Environment, tree: jinja2.nodes.Template, name: str
) -> jinja2.Template:
    """``tree``, which is changed, as a template whose loops and strings count."""
    template: jinja2.Template = _refusing(
        name, lambda: environment.from_string(_Counting().visit(tree))
    )
    return template


def _refusing(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise ConfigError(f"the chat template {name!r}{at}: {error.message}") from None
    except RecursionError:
        raise ConfigError(f"the chat template {name!r} nests too deeply") from None
    except (SyntaxError, ValueError, OverflowError) as error:
        reason = getattr(error, "msg", None) or error
        raise ConfigError(f"the chat template {name!r}: {reason}") from None


class _Counting(NodeTransformer):
    """Has each loop and macro begin with a count, and joins strings where they count."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return _filter(parts, "octavo_joined", node.lineno)

    def _counted(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        texts = node.find_all(jinja2.nodes.TemplateData)
        size = jinja2.nodes.Const(sum(len(text.data) for text in texts), lineno=node.lineno)
        count = _filter(size, "octavo_turn", node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(count, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _filter(value: jinja2.nodes.Expr, name: str, line: int) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """With what transformers gives templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_charged,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, call) for name, call in self.filters.items()}
        self.filters["octavo_turn"] = _turn
        self.filters["octavo_joined"] = _joined
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals.pop("lipsum", None)  # random prose, of any length

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        found = super().call_binop(context, operator, left, right)
        return _charged(found) if isinstance(found, str) else found

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox's own ``format``
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_call(method.__name__, owner, arguments, named)
        return super().call(context, called, *arguments, **named)


def _charged(value: Any) -> Any:
    """``value``, which becomes text, counted."""
    budget = _budget.get()
    if budget is not None and isinstance(value, str):
        budget.charge(len(value))
    return value


@jinja2.pass_context  # of a constant, too, it is not to be computed beforehand
def _turn(context: jinja2.runtime.Context, characters: int) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.turn(characters)


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return str(_charged("".join(texts)))


def _check_size(size: int) -> None:
    budget = _budget.get()
    if budget is not None and budget.brief and size > BRIEF_CHARACTERS:
        raise NotBrief
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateError(
            f"it makes a text or list of {size:,} characters or entries, more than "
            f"{MOST_CHARACTERS:,}"
        )


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        size = {"*": bits + right.bit_length(), "**": bits * max(right, 0)}.get(operator, 0)
        if size > MOST_DIGITS:
            raise jinja2.TemplateError(f"it computes an integer of {size:,} bits")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right)
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(times, int):
                _check_size(len(sequence) * times)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right))


def _check_format(form: str, *values: Any) -> None:
    if _WIDE_FORMAT.search(form):
        raise jinja2.TemplateError("it pads to more than a million characters")
    if _WIDTH_GIVEN.search(form):
        _check_widths(values)
    _check_size(len(form) + sum(len(value) for value in values if isinstance(value, str)))


def _check_widths(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and value > MOST_WIDTH:
            raise jinja2.TemplateError(f"it pads, indents or repeats to {value:,}")


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _check_join(separator: Any, values: Any) -> None:
    if hasattr(values, "__len__"):
        _check_size(len(separator) * len(values))


def _check_call(
    name: str, owner: str | bytes, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Of a method of a text: before what it makes is made."""
    values = (*arguments, *named.values())
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths(values)
    elif name == "replace" and len(arguments) > 1 and isinstance(owner, str):
        _check_replace(owner, str(arguments[0]), str(arguments[1]))
    elif name == "join" and arguments:
        _check_join(owner, arguments[0])
    elif name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner, *values)


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would make too much."""

    @wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        own = [one for one in arguments if not isinstance(one, _GIVEN)]
        values = (*own[1:], *named.values())
        if name in _WIDE:
            _check_widths(values)
        if name == "replace" and len(own) > 2:
            _check_replace(str(own[0]), str(own[1]), str(own[2]))
        elif name == "join" and values:
            _check_join(str(values[0]), own[0])
        elif name == "format" and own:
            _check_format(str(own[0]), *values)
        return call(*arguments, **named)

    return checked


# What Jinja itself puts before a filter's arguments.
_GIVEN = (jinja2.Environment, jinja2.nodes.EvalContext, jinja2.runtime.Context)
_WIDE = ("center", "indent", "batch", "slice", "tojson", "round", "wordwrap")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks answers for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
