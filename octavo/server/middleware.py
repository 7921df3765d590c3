"""--middleware: the operator's own middleware, around everything but request ids."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware

from octavo.server.auth import App, Receive, Scope, Send
from octavo.types import ConfigError


def wrapped(app: App, names: Sequence[str]) -> App:
    """``app`` inside the middlewares that ``names`` say, the first of them outermost: each is the
    dotted path of an ASGI class, made with the app, or of a coroutine function of (request,
    call_next) as Starlette has it.

    Raises ConfigError for a path that cannot be imported or is neither.
    """
    if not names:
        return app
    app = _Innermost(app)
    for name in reversed(names):
        app = _one(_imported(name), app, name)
    return app


class _Innermost:
    """Parts of bodies are sent from here, so that the middlewares see those as well."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["octavo.send"] = send
        await self.app(scope, receive, send)


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(
            f"--middleware {name}: must be a dotted path, such as package.module.Name"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the operator's can fail in any way
        raise ConfigError(f"--middleware {name}: {type(error).__name__}: {error}") from error


def _one(found: Any, app: App, name: str) -> Any:
    if inspect.isclass(found):
        make: Any = found
        try:
            return make(app)
        except Exception as error:
            raise ConfigError(f"--middleware {name}: {type(error).__name__}: {error}") from error
    if inspect.iscoroutinefunction(found):
        return BaseHTTPMiddleware(app, dispatch=found)
    raise ConfigError(
        f"--middleware {name}: must be an ASGI class, or a coroutine function of (request, "
        "call_next)"
    )
