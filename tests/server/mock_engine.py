"""An engine process without a model: speaks the messages, says what the prompt tells it to.

Run as ``python mock_engine.py OPTIONS_JSON INBOX OUTBOX PARENT``. A prompt that contains
``say:TEXT`` (bytes are ids) is answered with TEXT and the end token, ``tenant?`` with the request's
tenant and weight; one with ``refuse?`` is rejected, one with ``fail?`` fails after two tokens; any
other is answered with the alphabet, endlessly. A prompt's vector is (number of ids,
first, last, 1). Options: see ``Options``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine import messages as m
from octavo.engine.process import engine_secret
from octavo.engine.seats import Seats
from octavo.types import FinishReason, RequestTimings

BOS, EOS, VOCAB = 256, 257, 260
REFUSED = b"refuse?"
FIRST_MARK = 258  # the first of the further control tokens that a server may have


@dataclass
class Options:
    step_seconds: float = 0.002
    load_seconds: float = 0.0
    max_num_seqs: int = 8
    max_model_len: int = 512
    num_blocks: int = 64
    vocab_size: int = VOCAB
    fail: str = ""  # end loading with this user error
    crash: bool = False  # exit 3 while loading
    reject: str = ""  # reject every request with this message
    hang_after: int = -1  # after so many steps, stay in the step (heartbeats go on)
    step_error: bool = False  # end every request with FinishReason.ERROR after two tokens
    graphs: int = 0  # to be captured, one in each idle moment
    gate: str = ""  # a file: answers that begin with "held" do not end before it exists
    default_sampling: dict[str, float] = field(default_factory=dict)
    hold: bool = False  # start requests, and never draw a token
    fail_again: str = ""  # a file: loading fails once it is there
    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)  # options of some replicas


@dataclass
class Row:
    request: m.AddRequest
    index: int
    script: list[int]
    endless: bool
    timings: RequestTimings
    drawn: int = 0
    fails: bool = False


class MockEngine:
    def __init__(self, options: Options, inbox: str, outbox: str, config: EngineConfig) -> None:
        self.options = options
        context = zmq.Context()
        self.context = context
        self.seats = Seats(context, inbox, outbox, engine_secret(config))
        self.inbox = self.seats.inbox
        self.waiting: list[m.AddRequest] = []
        self.running: dict[int, Row] = {}
        self.stats = m.EngineStats(time=0.0, graphs_pending=options.graphs)
        self.step_started = 0.0
        self.draining = False
        self.seen: deque[list[int]] = deque(maxlen=32)

    def send(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Outputs):
            self.seats.send_outputs(message)
        else:
            self.seats.send(message)

    def load(self, config: EngineConfig) -> None:
        own = self.options.replicas.get(str(config.parallel.replica), {})
        o = self.options = replace(self.options, **own)
        self.send(m.Progress("weights", 0.5))
        time.sleep(o.load_seconds)
        if o.crash or (o.fail_again and os.path.exists(o.fail_again)):
            os._exit(3)
        if o.fail:
            self.send(m.Failed(o.fail, user_error=True))
            time.sleep(0.2)
            sys.exit(2)
        self.info = m.EngineInfo(
            model="mock", architecture="mock", dtype="float32", device="cpu", threads=1,
            vocab_size=o.vocab_size, max_model_len=o.max_model_len, eos_ids=[EOS],
            block_size=16, num_blocks=o.num_blocks, kv_cache_bytes=1, weight_bytes=1,
            max_num_seqs=o.max_num_seqs, max_num_batched_tokens=256, implementations={},
            startup_seconds={"weights": o.load_seconds}, reasons={"dtype": "mock"},
            default_sampling=o.default_sampling, hidden_size=4,
        )  # fmt: skip
        self.send(m.Ready(self.info, os.getpid()))
        self.send(m.Outputs(stats=self.stats))
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        sockets = self.seats.beats()
        while True:
            now = time.monotonic()
            age = now - self.step_started if self.step_started else 0.0
            for socket in sockets:
                with contextlib.suppress(zmq.Again):
                    beat = m.Heartbeat(now, self.stats.num_steps, age)
                    socket.send(m.encoder.encode(beat), zmq.NOBLOCK)
            time.sleep(0.5)

    def receive(self) -> None:
        idle = not (self.waiting or self.running)
        while self.inbox.poll(50 if idle else 0):
            message = m.to_engine_decoder.decode(self.inbox.recv())
            if isinstance(message, m.AddRequest):
                self.waiting.append(message)
            elif isinstance(message, m.Abort):
                for handle in message.handles:
                    self.running.pop(handle, None)
                self.waiting = [r for r in self.waiting if r.handle not in message.handles]
            elif isinstance(message, m.ResetPrefixCache):
                reset = m.PrefixCacheReset(message.call, not self.running)
                self.seats.send_to(message.call >> m.CLIENT_SHIFT, reset)
            elif isinstance(message, m.Hello):
                self.seats.take(message.client)
                self.seats.send_to(message.client, m.Ready(self.info, os.getpid()))
            elif isinstance(message, m.Bye):
                self.seats.leave(message.client)
                gone = [h for h in self.running if h >> m.CLIENT_SHIFT == message.client]
                for handle in gone:
                    del self.running[handle]
                self.waiting = [
                    r for r in self.waiting if r.handle >> m.CLIENT_SHIFT != message.client
                ]
            elif isinstance(message, m.Drain):
                self.draining = True
            idle = False

    def admit(self, outputs: m.Outputs) -> None:
        now = time.monotonic()
        while self.waiting and len(self.running) < self.options.max_num_seqs:
            request = self.waiting.pop(0)
            if self.options.reject:
                outputs.rejected.append(m.Rejected(request.handle, self.options.reject, "prompt"))
                continue
            ids = m.unpack_ids(request.prompt_ids).tolist()
            if REFUSED in bytes(i for i in ids if i < 256):
                outputs.rejected.append(m.Rejected(request.handle, "refused", "prompt"))
                continue
            self.stats.prompt_tokens += len(ids)
            self.stats.prompt_tokens_cached += self.known(ids)
            if request.pooling is not None:
                self.embed(request, ids, now, outputs)
                continue
            text = bytes(i for i in ids if i < 256)
            endless = b"say:" not in text
            script = [*text.rpartition(b"say:")[2].partition(b"\n")[0], EOS]
            # Control characters stand for line breaks (0x01) and control tokens (from 0x0e).
            script = [
                10 if i == 1 else i - 0xE + FIRST_MARK if 0xE <= i < 32 else i for i in script
            ]
            if b"tenant?" in text:
                endless, script = False, [*b"%b %.1f" % (request.tenant, request.weight), EOS]
            if request.params.prompt_logprobs is not None:
                outputs.prompt_logprobs.append(
                    m.PromptLogprobRows(
                        request.handle, 1, [[i, 0] for i in ids[1:]],
                        [[-1.0, -0.5] for _ in ids[1:]], [2] * (len(ids) - 1),
                    )
                )  # fmt: skip
            for i in range(request.params.n):
                outputs.started.append(m.Started(request.handle + i, now, 4))
                timings = RequestTimings(request.arrival, now)
                row = Row(request, i, script, endless, timings, fails=b"fail?" in text)
                self.running[request.handle + i] = row

    def known(self, ids: list[int]) -> int:
        """How many ids of a prompt the statistics count as cached: those that begin an earlier
        one."""

        def shared(seen: list[int]) -> int:
            return sum(itertools.takewhile(bool, (a == b for a, b in zip(ids, seen))))

        most = max(map(shared, self.seen), default=0)
        self.seen.append(ids)
        return min(most, len(ids) - 1)

    def embed(self, request: m.AddRequest, ids: list[int], now: float, outputs: m.Outputs) -> None:
        outputs.started.append(m.Started(request.handle, now, 4))
        vector = array("f", [len(ids), ids[0], ids[-1], 1])
        outputs.pooled.append(m.PooledPrompt(request.handle, vector.tobytes()))
        timings = RequestTimings(request.arrival, now)
        reason, message = FinishReason.LENGTH, ""
        if self.options.step_error:
            reason, message = FinishReason.ERROR, "the step failed"
        outputs.finished.append(m.Finished(request.handle, reason, None, timings, 0, message))

    def held(self, row: Row) -> bool:
        told = bytes(i for i in row.script if i < 256).startswith(b"held")
        at_end = told and row.drawn == len(row.script) - 1
        shut = bool(self.options.gate) and not os.path.exists(self.options.gate)
        return self.options.hold or (at_end and shut)

    def draw(self, handle: int, row: Row, outputs: m.Outputs) -> int:
        now = time.monotonic()
        token = 97 + row.drawn % 26 if row.endless else row.script[row.drawn]
        row.drawn += 1
        row.timings.last_token = now
        if row.drawn == 1:
            row.timings.first_token = now
        if (k := row.request.params.logprobs) is not None:
            ids = [token, *itertools.islice((t for t in range(65, 96) if t != token), k)]
            values = [-0.25, *([-1.5] * (len(ids) - 1))]
            if k:
                values[-1] = float("-inf")
            outputs.logprobs.append(m.TokenLogprobRow(handle, ids, values, 1))
        if token == EOS:
            end: tuple[FinishReason, int | None] | None = (FinishReason.STOP, None)
        elif token in row.request.params.stop_token_ids:
            end = (FinishReason.STOP, token)
        elif row.drawn >= row.request.max_tokens:
            end = (FinishReason.LENGTH, None)
        elif (self.options.step_error or row.fails) and row.drawn == 2:
            end = (FinishReason.ERROR, None)
        else:
            end = None
        if end:
            message = "the step failed" if end[0] == FinishReason.ERROR else ""
            outputs.finished.append(m.Finished(handle, *end, row.timings, 0, message))
            del self.running[handle]
        return token

    def step(self) -> None:
        self.step_started = time.monotonic()
        if self.stats.num_steps == self.options.hang_after:
            time.sleep(1000)
        time.sleep(self.options.step_seconds)
        outputs = m.Outputs(stats=self.stats)
        self.admit(outputs)
        rows = [(h, row) for h, row in self.running.items() if not self.held(row)]
        drawn = [(h, self.draw(h, row, outputs)) for h, row in rows]
        self.stats.generation_tokens += len(drawn)
        outputs.handles = b"".join(h.to_bytes(8, "little") for h, _ in drawn)
        outputs.tokens = m.pack_ids([t for _, t in drawn])
        self.stats.time = time.monotonic()
        self.stats.num_steps += 1
        self.stats.step_seconds = self.stats.time - self.step_started
        self.stats.step_tokens = len(drawn)
        self.stats.blocks_used = len(self.running)
        self.stats.blocks_free = self.options.num_blocks - len(self.running)
        self.step_started = 0.0
        self.send(outputs)

    def run(self) -> None:
        while True:
            self.receive()
            if self.waiting or self.running:
                self.step()
            elif self.draining:
                return
            elif self.stats.graphs_pending:
                self.stats.graphs_pending -= 1
                self.send(m.Outputs(stats=self.stats))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    options = Options(**json.loads(sys.argv[1]))
    options.max_num_seqs = config.scheduler.max_num_seqs or options.max_num_seqs
    engine = MockEngine(options, sys.argv[2], sys.argv[3], config)
    engine.load(config)
    engine.run()
    engine.context.destroy(linger=500)
