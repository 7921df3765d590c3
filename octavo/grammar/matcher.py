"""Matcher: where one output stands in its grammar, and which tokens may come next.

It fails closed. Whatever goes wrong (llguidance gives up, no token may come, one comes that may
not) is kept in ``failure``, and the sequence must end with that text as its error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.grammar.gate import Gate

if TYPE_CHECKING:
    from octavo.grammar.compiled import Compiler

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]


class Matcher:
    """One sequence's. ``start()`` gives an llguidance matcher at the grammar's beginning: copies of
    one share what they learn of the grammar's lexer, and its limits, so a copy that gives up is
    replaced once by ``fresh()``, which shares with nobody.

    ``ended``: the output is complete, nothing may follow. ``failure``: why it cannot go on.
    """

    def __init__(
        self,
        compiler: Compiler,
        start: Callable[[], Any],
        fresh: Callable[[], Any],
        *,
        gate: Gate | None = None,
        allowed: Int32 | None = None,
        ignore_eos: bool = False,
    ) -> None:
        """``allowed``: a mask of the ids that may be drawn at all. ``ignore_eos``: EOS may come
        only where nothing else may."""
        vocabulary = compiler.vocabulary
        self._compiler = compiler
        self._size = len(vocabulary.tokens)
        self._words = vocabulary.words
        self._tokens = vocabulary.tokens
        self._eos = frozenset(vocabulary.eos_ids)
        self._eos_mask = bit_mask(vocabulary.eos_ids, self._words)
        self._real = None if self._eos else bit_mask(range(self._size), self._words)
        self._fresh = fresh
        self._inner = _made(start)
        self._shares = True
        self._gate = gate
        self._allowed = allowed
        self._ignore_eos = ignore_eos
        self._buffer = np.zeros(compiler.mask_words, dtype=np.int32)
        self._ids: list[int] = []  # consumed, those before the gate opened included
        self._first = 0 if gate is None else -1  # of them, the first that the grammar saw
        self._computed: Int32 | None = None  # the next mask, where it was made with others'
        self.ended = False
        self.failure = ""
        self.told = False  # its end has been reported
        self._check()

    # ---- what may come ----

    @property
    def done(self) -> bool:
        """Nothing more is asked of it."""
        return self.ended or bool(self.failure)

    def fill(self, mask: Int32) -> bool:
        """Writes a bit per id that may come next (int32 [words], the lowest bit first). False where
        every id may: nothing is written then."""
        if self.done:
            return False
        if self._first < 0:
            assert self._gate is not None
            return self._keep(mask, self._gate.mask())
        found = self._compute()
        if found is None:
            return False
        found = found[: self._words]
        if self._real is not None:
            found = found & self._real
            if not found.any():  # complete, and no token could say so
                self.ended = True
                return False
        elif self._ignore_eos:
            rest = found & ~self._eos_mask
            found = rest if rest.any() else found
        return self._keep(mask, found)

    def _keep(self, mask: Int32, found: Int32) -> bool:
        if self._allowed is not None:
            found = found & self._allowed
        if not found.any():
            self.failure = "nothing may follow: " + (
                "no token in allowed_token_ids fits the grammar"
                if self._allowed is not None
                else "no token of the vocabulary fits the grammar"
            )
            return False
        mask[:] = found
        return True

    def _compute(self) -> Int32 | None:
        found, self._computed = self._computed, None
        if found is not None and not self._inner.is_error():
            return found
        buffer = self._buffer
        for _ in range(2):
            sound = self._try(
                lambda: self._inner.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
            )
            if sound and not self._inner.is_error():
                return buffer
            self._recover()
            if self.failure:
                return None
        self._fail()
        return None

    # ---- what came ----

    def consume(self, token: int) -> None:
        """A token that was drawn."""
        if self.done:
            return
        self._computed = None
        self._ids.append(token)
        if self._first < 0:
            self._pass_gate(token)
        elif token in self._eos:
            self._end(token)
        elif not self._try(lambda: self._inner.consume_token(token)):
            self._recover()
        else:
            self._check()

    def extend(self, tokens: Sequence[int]) -> None:
        """``consume`` of each; in one call where nothing but the grammar sees them."""
        plain = self._first >= 0 and not self.done and self._eos.isdisjoint(tokens)
        if not (plain and tokens):
            for token in tokens:
                self.consume(token)
            return
        self._ids += tokens
        if self._try(lambda: self._inner.consume_tokens(list(tokens))):
            self._check()
        else:
            self._recover()

    def _pass_gate(self, token: int) -> None:
        assert self._gate is not None
        if token in self._eos:
            self.failure = "the output ended before its constrained part began"
            return
        try:
            if self._gate.push(token):
                self._first = len(self._ids)
        except ValueError as error:
            self.failure = str(error)

    def _end(self, token: int) -> None:
        """EOS: behind what is complete, or as the last token of a grammar that names it."""
        inner = self._inner
        if inner.is_accepting() or (
            self._try(lambda: inner.consume_token(token))
            and (inner.is_accepting() or inner.is_stopped())
        ):
            self.ended = True
        else:
            self.failure = f"token {token} ended the output before the grammar was complete"

    def _try(self, call: Callable[[], bool | None]) -> bool:
        """False where it says so, or breaks: a panic of llguidance is no Exception."""
        try:
            return call() is not False
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            logger.exception("llguidance broke")
            return False

    def _check(self) -> None:
        """After a step of the inner matcher."""
        if self._inner.is_error():
            self._recover()
        elif self._first >= 0 and self._inner.is_stopped():
            self.ended = True

    def _recover(self) -> None:
        """The inner matcher gave up. Once, one that shares nothing takes its place."""
        if not self._shares:
            self._fail()
            return
        self._shares = False
        self._replay(self._ids)

    def _replay(self, ids: Sequence[int]) -> None:
        self._inner = _made(self._fresh)
        if self._gate is not None:
            self._gate.reset()
            self._first = -1
        self._ids = []
        if self._inner.is_error():
            self._fail()
        for token in ids:
            self.consume(token)

    def _fail(self) -> None:
        why = str(self._inner.get_error()).partition("<non-verbose/>")[0].strip()
        self.failure = f"the grammar cannot be followed: {why or self._inner.stop_reason()}"


def compute_together(matchers: Sequence[Matcher]) -> None:
    """The next masks of several matchers, on several threads."""
    active = [matcher for matcher in matchers if not matcher.done and matcher._first >= 0]
    if len(active) < 2:
        return
    compiler = active[0]._compiler
    table = np.zeros((len(active), compiler.mask_words), dtype=np.int32)
    try:
        compiler.compute_masks([matcher._inner for matcher in active], table)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of one: each computes its own then
        logger.exception("llguidance broke")
        return
    for matcher, mask in zip(active, table):
        matcher._computed = mask


class Broken:
    """In place of an llguidance matcher that could not be made."""

    def __init__(self, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {error}"

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return self._error


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        logger.exception("llguidance broke")
        return Broken(error)


def bit_mask(ids: Sequence[int], words: int) -> Int32:
    """int32 [words] with a bit for each id, the lowest first."""
    bits = np.zeros(words * 32, dtype=np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4")
