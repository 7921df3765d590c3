"""Grammars: those of the requests an engine has, compiled on a thread before they are scheduled.

A request's grammar is asked for when it arrives (``prepare``) and given back when it ends
(``release``). Meanwhile it stays compiled, so that matchers are copies of it: after preemption too.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from octavo.grammar.gate import Gate, Marker
from octavo.grammar.matcher import Broken, Matcher, bit_mask
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import InvalidRequest

if TYPE_CHECKING:
    from octavo.grammar.compiled import Compiler

logger = logging.getLogger(__name__)

# Bytes of the texts of grammars that are compiled at a time; compiled they take some 100 times as
# much memory. Further ones wait until others have ended.
MOST_USED_BYTES = 4 << 20
# Compiled grammars that no request has now: the next request with the same one waits for nothing.
MOST_KEPT = 64
MOST_KEPT_BYTES = 1 << 19
# A matcher that gives up in the middle of a step is replaced at once only where that is quick: all
# others wait for it.
SWIFT_SECONDS = 0.03
# The checker compiles on a smaller stack: what did not overflow that does not overflow this.
STACK_BYTES = 64 << 20


class _Entry:
    """One grammar. ``compiled`` is its matcher at the start, which is only copied."""

    __slots__ = ("compiled", "is_used", "seconds", "users")

    def __init__(self) -> None:
        self.compiled: Any = None
        self.seconds = 0.0  # of the processor, to compile it
        self.users = 0
        self.is_used = False  # compiled, or being compiled, for them


class Mirror(Protocol):
    """Who draws by the grammars elsewhere, and so has them compiled there too."""

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def prepare(self, text: str) -> None: ...

    def release(self, text: str) -> None: ...


class Grammars:
    """Of one engine. ``prepare`` .. ``release`` are the engine thread's, ``matcher`` the worker's;
    a lock guards what they share."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._compiler: Compiler | None = None
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._used_bytes = 0  # of the entries with users that are compiled, or being compiled
        self._delayed: deque[str] = deque()  # those that wait until there is room
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.prepared = threading.Event()  # set whenever a grammar has become ready
        self._markers = lru_cache(8)(self._marker)
        self.mirror: Mirror | None = None  # who is told what these are told

    # ---- the vocabulary ----

    @property
    def has_vocabulary(self) -> bool:
        return self._vocabulary is not None

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The first one stays: it is the model's."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            if self.mirror is not None:
                self.mirror.set_vocabulary(vocabulary)

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
        """For engines that trust their callers: no limits of time or memory, as ``checker`` has.
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
        if self.mirror is not None:
            self.mirror.prepare(text)
        with self._lock:
            entry = self._entries.setdefault(text, _Entry())
            entry.users += 1
            self._entries.move_to_end(text)
            if entry.users > 1:
                return
            if self._delayed or not self._has_room(text):
                self._delayed.append(text)
            else:
                self._use(text, entry)
        if self._thread is None:
            self._thread = _started(self._run)

    def _has_room(self, text: str) -> bool:
        """One may always be used."""
        return not self._used_bytes or self._used_bytes + len(text) <= MOST_USED_BYTES

    def _use(self, text: str, entry: _Entry) -> None:
        self._used_bytes += len(text)
        entry.is_used = True
        if entry.compiled is None:
            self._work.put(text)

    @property
    def num_used(self) -> int:
        """Grammars that some request has."""
        return sum(entry.users > 0 for entry in self._entries.values())

    def ready(self, text: str) -> bool:
        entry = self._entries[text]
        return entry.is_used and entry.compiled is not None

    def problem(self, text: str) -> str:
        """Of one that is ready: why it could not be compiled, or ""."""
        compiled = self._entries[text].compiled
        return str(compiled.get_error()) if compiled.is_error() else ""

    def release(self, text: str) -> None:
        """A request that had it has ended."""
        if self.mirror is not None:
            self.mirror.release(text)
        with self._lock:
            entry = self._entries[text]
            entry.users -= 1
            if entry.users:
                return
            if entry.is_used:
                self._used_bytes -= len(text)
                entry.is_used = False
            else:
                self._delayed.remove(text)
            while self._delayed and self._has_room(self._delayed[0]):
                following = self._delayed.popleft()
                self._use(following, self._entries[following])
            self._forget()

    def _forget(self) -> None:
        """Drops grammars without users, the oldest first, until few enough are kept."""
        unused = [text for text, entry in self._entries.items() if not entry.users]
        num_bytes = sum(map(len, unused))
        for index, text in enumerate(unused):
            if len(unused) - index <= MOST_KEPT and num_bytes <= MOST_KEPT_BYTES:
                return
            num_bytes -= len(text)
            del self._entries[text]

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (text := self._work.get()) is not None:
            compiled: Any
            compiler = self._built()
            began = time.thread_time()
            try:
                compiled = compiler.compile(text)
                compiled.deep_copy().compute_bitmask()  # the first mask of all takes the longest
            except Exception as error:
                logger.exception("a grammar of %d bytes could not be compiled", len(text))
                compiled = Broken(error)
            with self._lock:
                entry = self._entries.get(text)
                if entry is not None:
                    entry.compiled, entry.seconds = compiled, time.thread_time() - began
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
        matcher.extend(output_ids)
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
            entry = self._entries.get(text)
            if entry is not None and self._thread is not None:
                self._work.put(text)
                if entry.seconds > SWIFT_SECONDS:
                    return Broken(RuntimeError("it gave up; send the request again"))
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
