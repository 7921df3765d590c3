"""How far an offline run has come, for the user, and how the user ends it."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from octavo.engine.messages import Outputs, num_ids


class InterruptBetweenSteps:
    """Ctrl-C raises KeyboardInterrupt at ``check``, so that no step is left half done; a second one
    raises it wherever it comes. A handler that the program has set stays in place."""

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> InterruptBetweenSteps:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        if self._pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: object) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True


class AnswerProgress:
    """A progress bar over finished answers, with tokens per second; silent when not wanted."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = None
        if show:
            from rich.progress import Progress, TextColumn

            columns = (*Progress.get_default_columns(), TextColumn("{task.fields[speed]}"))
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("answers", total=total, speed="")
        self._tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> AnswerProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, num_finished: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=num_finished)

    def update(self, outputs: Outputs) -> None:
        self._tokens += num_ids(outputs.tokens)
        if self._bar is not None:
            speed = ""
            if self._tokens:
                speed = f"{self._tokens / max(1e-3, time.monotonic() - self._began):.0f} tok/s"
            self._bar.update(self._task, advance=len(outputs.finished), speed=speed)
