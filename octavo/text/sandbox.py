"""The Jinja environment that chat templates run in. They come with checkpoints, so what one of them
may compute is bounded: it cannot hold up a server or take its memory.

Jinja's immutable sandbox keeps a template from Python's attributes and from changing what it is
given. Beyond that every turn of a loop and every call of a macro counts, and so does every string
that is made; what would be too long is refused before it is made.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.text.bounds import (
    BRIEF_CHARACTERS,
    OBJECT,
    REFERENCE,
    Budget,
    check_call,
    check_filter,
    check_operands,
    check_size,
    current,
    text_size,
)
from octavo.text.bounds import (
    NotBrief as NotBrief,
)
from octavo.types import ConfigError

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
    budget = Budget(_is_brief.get())
    token = current.set(budget)
    try:
        text = template.render(variables)
    finally:
        current.reset(token)
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

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _filter(node, "octavo_part", node.lineno)
        return node

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
            finalize=_shown,
        )
        self.filters["tojson"] = _to_json
        self.filters["sum"] = _sum
        self.filters = {name: _bounded(name, call) for name, call in self.filters.items()}
        self.filters["octavo_turn"] = _turn
        self.filters["octavo_joined"] = _joined
        self.filters["octavo_part"] = _part
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals.pop("lipsum", None)  # random prose, of any length

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return _charged(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox's own ``format``
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            if method.__name__ == "join" and arguments:
                arguments = (_listed(arguments[0]), *arguments[1:])
            check_call(method.__name__, owner, arguments, named)
        return _charged(super().call(context, called, *arguments, **named), OBJECT)


def _charged(value: Any, each: int = REFERENCE) -> Any:
    """``value``, which has been made, counted. ``each``: of an entry of a list."""
    budget = current.get()
    if budget is not None:
        if isinstance(value, (str, bytes)):
            budget.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            budget.charge(each * len(value))
    return value


def _shown(value: Any) -> Any:
    """``value``, which becomes text."""
    if not isinstance(value, str):
        size = text_size(value)
        check_size(size)
        if (budget := current.get()) is not None:
            budget.charge(size)
    return _charged(value)


def _listed(values: Any) -> Any:
    """``values``; those that an iterator would make one by one as a list, while it is no longer
    than a text may be."""
    if hasattr(values, "__len__") or not hasattr(values, "__next__"):
        return values
    found, size = [], 0
    for value in values:
        size += 1 + text_size(value)
        check_size(size)
        found.append(value)
    return found


@jinja2.pass_context
def _part(context: jinja2.runtime.Context, value: Any) -> Any:
    return _charged(value)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, values: Any, attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's, which adds lists, too."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in values:
        check_operands("+", start, value)
        start = _charged(start + value)
    return start


@jinja2.pass_context  # of a constant, too, it is not to be computed beforehand
def _turn(context: jinja2.runtime.Context, characters: int) -> None:
    budget = current.get()
    if budget is not None:
        budget.turn(characters)


@jinja2.pass_context
def _joined(context: jinja2.runtime.Context, parts: list[Any]) -> str:
    check_size(sum(map(text_size, parts)))
    return str(_charged("".join(map(str, parts))))


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would make too much."""

    @wraps(call)
    def checked(*arguments: Any, **named: Any) -> Any:
        given = [one for one in arguments if isinstance(one, _GIVEN)]
        own = [one for one in arguments if not isinstance(one, _GIVEN)]
        if name == "join" and own:
            own[0] = _listed(own[0])
        check_filter(name, own, named)
        return _charged(call(*given, *own, **named), OBJECT)

    return checked


# What Jinja itself puts before a filter's arguments.
_GIVEN = (jinja2.Environment, jinja2.nodes.EvalContext, jinja2.runtime.Context)


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
