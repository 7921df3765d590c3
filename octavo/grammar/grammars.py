"""Grammars: those of the requests an engine has, compiled on a thread before they are scheduled.

A request's grammar is asked for when it arrives (``prepare``) and given back when it ends
(``release``). Meanwhile it stays compiled, so that matchers are copies of it: after preemption too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.grammar.gate import Gate, Marker
from octavo.grammar.matcher import Broken, Matcher, bit_mask
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import InvalidRequest

if TYPE_CHECKING:
    from octavo.grammar.compiled import Compiler

logger = logging.getLogger(__name__)

# Compiled grammars that no request has now: the next request with the same one waits for nothing.
MOST_KEPT = 64
# The checker compiles on a smaller stack: what did not overflow that does not overflow this.
STACK_BYTES = 64 << 20


class _Entry:
    """One grammar. ``compiled`` is its matcher at the start, which is only copied."""

    __slots__ = ("compiled", "users")

    def __init__(self) -> None:
        self.compiled: Any = None
        self.users = 0


class Grammars:
    """Of one engine. ``prepare`` .. ``release`` are the engine thread's, ``matcher`` the worker's;
    a lock guards what they share."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.prepared = threading.Event()  # set whenever a grammar has become ready
        self._markers = lru_cache(8)(self._marker)

    # ---- the vocabulary ----

    @property
    def has_vocabulary(self) -> bool:
        return self._vocabulary is not None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The first one stays: it is the model's."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary

    def build(self) -> bool:
        """Makes the tables, which stops this process for a moment: to be done while it is idle.
        False where there is nothing left to make, or no vocabulary yet."""
        if self._vocabulary is None or self._compiler is not None:
            return False
        self._built()
        return True

    def _built(self) -> Compiler:
        with self._lock:
            if self._compiler is None:
                from octavo.grammar.compiled import Compiler

                assert self._vocabulary is not None
                self._compiler = Compiler(self._vocabulary)
            return self._compiler

    def check(self, text: str) -> None:
        """For engines that trust whoever asks: no limit of time or memory (``checker`` has those).
        Raises InvalidRequest saying why a grammar cannot be used."""
        found: list[str] = []
        thread = _started(lambda: found.append(self._built().problem(text)))
        thread.join()
        if found != [""]:
            why = found[0] if found else "it could not be compiled"
            raise InvalidRequest(f"structured_outputs: {why}", "structured_outputs")

    # ---- the engine's side ----

    def prepare(self, text: str) -> None:
        """Has a grammar compiled, for one more request. Raises InvalidRequest without a vocabulary:
        then there is no tokenizer."""
        if self._vocabulary is None:
            raise InvalidRequest(
                "structured output needs a tokenizer; this engine was given none",
                "structured_outputs",
            )
        with self._lock:
            entry = self._entries.setdefault(text, _Entry())
            entry.users += 1
            self._entries.move_to_end(text)
            if entry.compiled is not None or entry.users > 1:
                return
        if self._thread is None:
            self._thread = _started(self._run)
        self._work.put(text)

    @property
    def num_used(self) -> int:
        """Grammars that some request has."""
        return sum(entry.users > 0 for entry in self._entries.values())

    def ready(self, text: str) -> bool:
        return self._entries[text].compiled is not None

    def problem(self, text: str) -> str:
        """Of one that is ready: why it could not be compiled, or ""."""
        compiled = self._entries[text].compiled
        return str(compiled.get_error()) if compiled.is_error() else ""

    def release(self, text: str) -> None:
        """One request less has it."""
        with self._lock:
            self._entries[text].users -= 1
            unused = [key for key, entry in self._entries.items() if not entry.users]
            for key in unused[: max(0, len(unused) - MOST_KEPT)]:
                del self._entries[key]

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (text := self._work.get()) is not None:
            compiled: Any
            try:
                compiled = self._built().compile(text)
                compiled.deep_copy().compute_bitmask()  # the first mask of all takes the longest
            except Exception as error:
                logger.exception("a grammar of %d bytes could not be compiled", len(text))
                compiled = Broken(error)
            with self._lock:
                entry = self._entries.get(text)
                if entry is not None:
                    entry.compiled = compiled
            self.prepared.set()

    # ---- the worker's side ----

    def matcher(
        self,
        text: str,
        output_ids: Sequence[int] = (),
        *,
        after: str = "",
        allowed_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> Matcher:
        """A matcher that has consumed ``output_ids``. ``after``: the marker that the grammar waits
        for. ``allowed_ids``: the only ids that may be drawn."""
        compiler = self._built()
        allowed = None
        if allowed_ids is not None:
            allowed = bit_mask(allowed_ids, compiler.vocabulary.words)
        matcher = Matcher(
            compiler,
            lambda: self._copy(compiler, text),
            lambda: self._replace(compiler, text),
            gate=Gate(self._markers(after)) if after else None,
            allowed=allowed,
            ignore_eos=ignore_eos,
        )
        for token in output_ids:
            matcher.consume(token)
        return matcher

    def _copy(self, compiler: Compiler, text: str) -> Any:
        with self._lock:
            entry = self._entries.get(text)
            compiled = entry.compiled if entry is not None else None
        if compiled is None or compiled.is_error():
            return compiler.compile(text)  # a plan that is replayed without an engine
        return compiled.deep_copy()

    def _replace(self, compiler: Compiler, text: str) -> Any:
        """For a matcher whose lexer gave up. Copies share that lexer: later ones get another."""
        with self._lock:
            if text in self._entries and self._thread is not None:
                self._work.put(text)
        return compiler.compile(text)

    def _marker(self, text: str) -> Marker:
        assert self._vocabulary is not None
        return Marker(text, self._vocabulary)


def _started(run: Any) -> threading.Thread:
    """A daemon thread with a large stack: compiling recurses."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="octavo-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
