"""Finds out whether a grammar compiles, in a process of its own: one that takes too much time or
memory, or crashes the compiler, harms nothing else.

    python -m octavo.grammar.checker   < frames   > frames

A frame is a length (4 bytes, little endian) and that many bytes. The first that comes is a msgpack
Vocabulary, each further one a grammar; the answer to each is "" or why it cannot be used. Where
time or memory run out the kernel ends the process, and the reader sees the end of the stream.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from pathlib import Path

import msgspec

from octavo.grammar.vocabulary import Vocabulary

# Processor time for one grammar. The caller watches the wall clock.
CPU_SECONDS = 0.5
MEMORY_BYTES = 512 << 20  # beyond what the vocabulary took
STACK_BYTES = 4 << 20  # less than wherever an engine compiles (8 MiB; grammars.STACK_BYTES)


def main() -> int:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer

    def read() -> bytes | None:
        head = stdin.read(4)
        return stdin.read(int.from_bytes(head, "little")) if len(head) == 4 else None

    from octavo.grammar.compiled import Compiler

    raw = read()
    if raw is None:
        return 0
    compiler = Compiler(msgspec.msgpack.decode(raw, type=Vocabulary))
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (text := read()) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        answer = compiler.problem(text.decode()).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(len(answer).to_bytes(4, "little") + answer)
        stdout.flush()
    return 0


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def run() -> int:
    """``main`` on a thread: the size of its stack is known."""
    codes: list[int] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: codes.append(main()))
    thread.start()
    thread.join()
    return codes[0] if codes else 1


if __name__ == "__main__":
    sys.exit(run())
