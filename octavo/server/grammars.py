"""Constraints of requests, checked before anything is queued: in a process of their own, which a
grammar that takes too much time or memory, or breaks the compiler, cannot survive alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from octavo.config import child_environment
from octavo.grammar.checker import CPU_SECONDS, MEMORY_BYTES
from octavo.grammar.compile import grammar_text
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import InvalidRequest, QueueFull, StructuredOutputsParams

CHECKER_MODULE = "octavo.grammar.checker"
WALL_SECONDS = 5.0  # the checker limits the processor's time; this is for a crowded machine
TOO_LONG = f"it took longer than {WALL_SECONDS:g} s to compile"
MOST_WAITING = 64  # grammars that may wait for the checker
MOST_KNOWN = 512  # verdicts that are remembered


class GrammarChecker:
    """One server's; its process starts with the first grammar. ``vocabulary`` and ``special`` (the
    id of each special token) are asked for only then."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        special: Callable[[], dict[str, int]],
        disable_any_whitespace: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._disable_any_whitespace = disable_any_whitespace
        self._process: asyncio.subprocess.Process | None = None
        self._next: asyncio.Task[None] | None = None  # starts another one
        self._exchange: asyncio.Task[str] | None = None  # the latest question and its answer
        self._closing = False
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()  # its digest -> its problem, or ""

    async def text(self, params: StructuredOutputsParams) -> str:
        """The grammar of these parameters, known to compile. Raises InvalidRequest naming
        ``structured_outputs.FIELD``, or QueueFull."""
        special, tight = self._special(), self._disable_any_whitespace
        text = await asyncio.to_thread(grammar_text, params, special, tight)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        problem = self._known.get(digest)
        if problem is None:
            problem = await self._ask(text)
            if problem != TOO_LONG:  # which says more about the machine than about the grammar
                self._known[digest] = problem
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        if problem:
            field = f"structured_outputs.{params.kind}"
            raise InvalidRequest(f"{field}: {problem}", field)
        return text

    async def close(self) -> None:
        """Ends the checker."""
        self._closing = True
        await self._end()
        tasks = [task for task in (self._exchange, self._next) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()  # one that was being started

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, text: str) -> str:
        if self._num_waiting >= MOST_WAITING:
            raise QueueFull(
                f"{self._num_waiting} grammars are waiting to be checked; try again later"
            )
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._answer(text)
        finally:
            self._num_waiting -= 1

    async def _answer(self, text: str) -> str:
        """Of the checker. Where this is cancelled (a request's timeout) the exchange goes on by
        itself: to end the checker would make all others wait for another one."""
        if self._exchange is not None:
            await asyncio.wait((self._exchange,))
        self._exchange = asyncio.create_task(self._ask_checker(text))
        # Where nobody waits for it any more, nobody asks for its error.
        self._exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._exchange)

    async def _ask_checker(self, text: str) -> str:
        """The checker is started again after a grammar that it did not survive."""
        if self._next is not None:
            await asyncio.gather(self._next, return_exceptions=True)
            self._next = None
        if self._process is None or self._process.returncode is not None:
            await self._start()
        assert self._process is not None
        assert self._process.stdout is not None
        done = False
        try:
            self._write(text.encode())
            async with asyncio.timeout(WALL_SECONDS):
                size = int.from_bytes(await self._process.stdout.readexactly(4), "little")
                answer = (await self._process.stdout.readexactly(size)).decode()
            done = True
            return answer
        except TimeoutError:
            return TOO_LONG
        except (asyncio.IncompleteReadError, ConnectionError):
            return (
                f"compiling it takes more than {CPU_SECONDS:g} s or "
                f"{MEMORY_BYTES >> 20} MiB, or nests too deeply: simplify it"
            )
        finally:
            if not done and not self._closing:
                self._next = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        await self._end()
        await self._start()

    async def _start(self) -> None:
        vocabulary = await asyncio.to_thread(lambda: msgspec.msgpack.encode(self._vocabulary()))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            CHECKER_MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(1),
            start_new_session=True,
        )
        self._write(vocabulary)

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)
