"""The load: requests sent at their times, and what came back when. asyncio and aiohttp."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from octavo import collector
from octavo.cli.bench.datasets import Sample


@dataclass
class Trace:
    """One request. Times are seconds on one clock; ``chunks`` holds each chunk's arrival."""

    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    finished: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def seconds(self) -> float:
        return self.finished - self.sent

    @property
    def seconds_per_token(self) -> float:
        """Mean after the first token; 0 for a single token."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.seconds - self.first_token_seconds) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Target:
    """``fields`` go into every request's body; ``is_chat`` sends prompts as a user's message."""

    url: str
    model: str
    is_chat: bool
    headers: dict[str, str]
    fields: dict[str, Any]
    verify_tls: bool = True


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    Intervals follow a gamma law of shape ``burstiness`` (1: a Poisson process; larger: more even)
    and are scaled so that the last request is sent at (count - 1) / rate.
    """
    if rate == float("inf") or count < 2:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=count - 1)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(t) for t in times]


async def send_all(
    target: Target,
    samples: list[Sample],
    times: list[float],
    max_concurrency: int | None,
    on_done: Callable[[Trace], None],
) -> tuple[list[Trace], float]:
    """Sends every sample at its time (or once fewer than ``max_concurrency`` are open).

    Returns the traces in the order of ``samples`` and the seconds from the first to the last event.
    """
    collector.settle()
    gate = asyncio.Semaphore(max_concurrency or len(samples))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    connector = aiohttp.TCPConnector(limit=0, ssl=target.verify_tls)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=target.headers, read_bufsize=1 << 20
    ) as session:
        begin = time.perf_counter()

        async def one(sample: Sample, at: float) -> Trace:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            async with gate:
                trace = await send(session, target, sample)
            on_done(trace)
            return trace

        traces = await asyncio.gather(*(one(s, t) for s, t in zip(samples, times)))
        return list(traces), time.perf_counter() - begin


async def send(session: aiohttp.ClientSession, target: Target, sample: Sample) -> Trace:
    """One streamed request; a failure of any kind is in ``Trace.error``."""
    trace = Trace(num_prompt_tokens=sample.num_prompt_tokens)
    body = _body(target, sample)
    texts: list[str] = []
    trace.sent = time.perf_counter()
    try:
        async with session.post(target.url, data=body) as response:
            if response.status != 200:
                reason = (await response.text())[:300]
                trace.error = f"HTTP {response.status}: {reason}"
                return trace
            finished = await _read(response, trace, texts)
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        trace.error = f"{type(error).__name__}: {error}"
        return trace
    trace.text = "".join(texts)
    trace.num_output_tokens = trace.num_output_tokens or len(trace.chunks)
    if not trace.error and not finished:
        trace.error = "the stream broke off before data: [DONE]"
    elif not trace.error and not trace.chunks:
        trace.error = "the stream held no token"
    return trace


def _body(target: Target, sample: Sample) -> bytes:
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sample.num_output_tokens,
        **target.fields,
    }
    if target.is_chat:
        body["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        body["prompt"] = sample.prompt
    return msgspec.json.encode(body)


async def _read(response: aiohttp.ClientResponse, trace: Trace, texts: list[str]) -> bool:
    """Reads events until [DONE]; returns whether it came."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        now = time.perf_counter()
        if data == b"[DONE]":
            return True
        event = _decode_event(data)
        if event.error is not None:
            trace.error = str(event.error.get("message", event.error))
            return True
        if event.usage is not None:
            trace.num_prompt_tokens = event.usage.prompt_tokens
            trace.num_output_tokens = event.usage.completion_tokens
        text = _text(event)
        if text is not None:
            trace.chunks.append(now)
            trace.finished = now
            texts.append(text)
    return False


def _text(event: _Event) -> str | None:
    """The text of a chunk that carries a token; None for the role chunk, usage and the like."""
    if not event.choices:
        return None
    choice = event.choices[0]
    if choice.delta is None:
        return choice.text
    return choice.delta.content or choice.delta.reasoning_content or None
