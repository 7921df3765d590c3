"""llama.cpp, through llama-cpp-python's low-level API: ``python -m benchmarks.peers.llama_cpp GGUF
THREADS`` in an environment that has the package and numpy.

The package's own ``Llama`` takes one request at a time, so this batches continuously as
llama.cpp's server does: each request gets a slot (a sequence of the KV cache); a step decodes one
token of every running slot and fills what is left of the batch with prompts. A slot keeps its last
request's cache, and a new request begins with the longest prefix that any slot has of its prompt.
The library splits a batch wherever an idle slot lies between running ones, so running requests move
together when others have ended. The greedy choice is NumPy's
argmax over the step's logits, which is cheaper than the library's sampler.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu_workload import Work
from benchmarks.protocol import Runner, Timing, serve

SLOTS = 32
SLOT_TOKENS = 1280  # most of a request; the workload's longest has 1,048
BATCH, MICRO_BATCH = 2048, 512  # the library's defaults


@dataclass(eq=False)
class Request:
    index: int
    pending: NDArray[np.int32]  # not in the cache yet: of the prompt, later the last token
    num_left: int
    first: float = 0.0
    output: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Slot:
    """A sequence of the KV cache; ``tokens[:length]`` are in it."""

    sequence: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(SLOT_TOKENS, np.int32))
    length: int = 0
    request: Request | None = None

    def shared(self, prompt: NDArray[np.int32]) -> int:
        """How many tokens of the prompt it holds; not the last, whose logits are wanted."""
        size = min(self.length, len(prompt) - 1)
        different = np.flatnonzero(self.tokens[:size] != prompt[:size])
        return int(different[0]) if len(different) else size


class Batch:
    """A ``llama_batch`` over NumPy arrays."""

    def __init__(self) -> None:
        self.token, self.position = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int32)
        self.wanted = np.zeros(BATCH, np.int8)  # logits of this token
        self._ones = np.ones(BATCH, np.int32)
        self._sequences = np.arange(SLOTS, dtype=np.int32)
        self._pointers = np.zeros(BATCH, np.uint64)  # of each token to its entry of _sequences
        self.size = 0

    def add(self, slot: Slot, request: Request) -> bool:
        """As much of the slot's pending tokens as there is room for; True if that is all."""
        taken = request.pending[: BATCH - self.size]
        request.pending = request.pending[len(taken) :]
        place, end = slice(self.size, self.size + len(taken)), slot.length + len(taken)
        self.token[place] = slot.tokens[slot.length : end] = taken
        self.position[place] = np.arange(slot.length, end)
        self._pointers[place] = self._sequences.ctypes.data + 4 * slot.sequence
        self.wanted[place] = 0
        slot.length, self.size = end, self.size + len(taken)
        whole = len(taken) > 0 and not len(request.pending)
        if whole:
            self.wanted[self.size - 1] = 1
        return whole

    def native(self) -> llama_cpp.llama_batch:
        def pointer(array: NDArray[Any], kind: Any) -> Any:
            return array.ctypes.data_as(ctypes.POINTER(kind))

        return llama_cpp.llama_batch(
            n_tokens=self.size,
            token=pointer(self.token, ctypes.c_int32),
            pos=pointer(self.position, ctypes.c_int32),
            n_seq_id=pointer(self._ones, ctypes.c_int32),
            seq_id=pointer(self._pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=pointer(self.wanted, ctypes.c_int8),
        )


class Engine:
    def __init__(self, file: str, threads: int) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), settings)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = SLOTS * SLOT_TOKENS, SLOTS
        options.n_batch, options.n_ubatch = BATCH, MICRO_BATCH
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._slots = [Slot(sequence) for sequence in range(SLOTS)]
        self._batch = Batch()

    def run(self, work: list[Work]) -> Timing:
        began = time.perf_counter()
        requests = [
            Request(index, np.array(item.prompt, np.int32), item.max_tokens)
            for index, item in enumerate(work)
        ]
        waiting, num_done = deque(requests), 0
        while num_done < len(requests):
            self._admit(waiting)
            self._close_gaps()
            num_done += self._step(began)
        seconds = time.perf_counter() - began
        outputs = [request.output for request in requests]
        assert [len(output) for output in outputs] == [item.max_tokens for item in work]
        firsts = [request.first for request in requests]
        return Timing(seconds, firsts, sum(map(len, outputs)), outputs)

    def _admit(self, waiting: deque[Request]) -> None:
        """Free slots, first come, first served. The prompt's longest known prefix is copied there
        if another slot has it."""
        while waiting and (free := [slot for slot in self._slots if slot.request is None]):
            request = waiting.popleft()
            by_prefix = sorted(self._slots, key=lambda slot: slot.shared(request.pending))
            size = by_prefix[-1].shared(request.pending)
            slot = next((slot for slot in free if slot.shared(request.pending) == size), free[0])
            if slot.shared(request.pending) < size:
                self._copy(by_prefix[-1], slot)
            slot.length = size
            llama_cpp.llama_memory_seq_rm(self._memory, slot.sequence, size, -1)
            request.pending, slot.request = request.pending[size:], request

    def _close_gaps(self) -> None:
        """Moves requests until those that run have the first slots."""
        running = [slot for slot in self._slots if slot.request is not None]
        for slot in self._slots[: len(running)]:
            if slot.request is None:
                last = running.pop()
                self._copy(last, slot)
                slot.request, last.request = last.request, None

    def _copy(self, source: Slot, slot: Slot) -> None:
        """All of a slot's cache into another one."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot.sequence, -1, -1)
        llama_cpp.llama_memory_seq_cp(self._memory, source.sequence, slot.sequence, -1, -1)
        slot.tokens[: source.length] = source.tokens[: source.length]
        slot.length = source.length

    def _step(self, began: float) -> int:
        """One batch; the number of requests that it ended."""
        running = [(slot, slot.request) for slot in self._slots if slot.request is not None]
        running.sort(key=lambda pair: (not pair[1].output, pair[1].index))  # decoding ones first
        self._batch.size = 0
        told = [(slot, request) for slot, request in running if self._batch.add(slot, request)]
        code = llama_cpp.llama_decode(self._context, self._batch.native())
        if code:
            raise RuntimeError(f"llama_decode of {self._batch.size} tokens returned {code}")
        if not told:
            return 0
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (len(told), self._vocab_size)
        )
        num_done = 0
        for (slot, request), token in zip(told, logits.argmax(axis=1)):
            request.first = request.first or time.perf_counter() - began
            request.output.append(int(token))
            request.num_left -= 1
            request.pending = np.array([token], np.int32)
            if not request.num_left:
                slot.request, num_done = None, num_done + 1
        return num_done


def main() -> None:
    file, threads = sys.argv[1:]

    def make() -> Runner:
        return Engine(file, int(threads)).run

    serve(make)


if __name__ == "__main__":
    main()
