"""What both generating routes do alike: from a validated body to a whole or streamed response."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.routing import hint_of
from octavo.server.beams import BeamGeneration
from octavo.server.errors import TimedOut
from octavo.server.generation import Ask, Choice, Generation, Piece
from octavo.server.logprobs import TokenNames
from octavo.server.protocol import GenerationRequest
from octavo.server.render import rendered
from octavo.server.sampling import beam_params, renamed_constraint
from octavo.server.state import ServerState
from octavo.server.streaming import DONE, EventStream, Frames, encode_json, members
from octavo.types import (
    EngineLost,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    StructuredOutputsParams,
)

logger = logging.getLogger("octavo")
T = TypeVar("T")

MANY_LOGPROBS = 4096  # entries; about 10 ms of Python


class Answer(ABC):
    """A response in the making. Subclasses give the shape of a choice and of events."""

    kind: ClassVar[str]
    several: ClassVar[bool] = False  # a body may hold several prompts
    event_kind: ClassVar[str]
    body: GenerationRequest

    def __init__(
        self,
        state: ServerState,
        body: GenerationRequest,
        generation: Generation,
        request_id: str,
        warnings: list[str],
    ) -> None:
        self.state = state
        self.body = body
        self.generation = generation
        self.request_id = request_id
        self.model = state.check_model(body.model)
        self.warnings = warnings
        self.names = TokenNames(
            state.tokenizer,
            bool(body.return_tokens_as_token_ids),
            body.skip_special_tokens is not False,
        )
        options = body.stream_options
        self.wants_usage = state.server.enable_force_include_usage or bool(
            options and options.include_usage
        )
        self._counts_on = self.wants_usage and bool(options and options.continuous_usage_stats)
        self._closed = False  # the timings have been sent

    @abstractmethod
    def choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        """A finished choice of a whole response."""

    @abstractmethod
    def events(self, batch: list[Piece]) -> bytes:
        """The events that these pieces make; b"" for none."""

    @cached_property
    def frames(self) -> Frames:
        """Of a streamed response."""
        return Frames({**self.head(), "object": self.event_kind})

    def ending(self) -> bytes:
        """What follows the last piece's events."""
        usage = self.final_usage()
        return self.frames.frame(b"", usage) + DONE if usage else DONE

    def head(self) -> dict[str, object]:
        return {
            "id": self.request_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.state.fingerprint,
        }

    def members(self) -> dict[str, Any]:
        """What ends a whole response."""
        extra: dict[str, Any] = {"usage": self.usage(), "timings": self.generation.timings()}
        if self.warnings:
            extra["warnings"] = self.warnings
        return extra

    def hear(self, piece: Piece) -> None:  # noqa: B027
        """Takes in a piece of a whole response as it comes, where that is more than its text."""

    async def whole(self) -> bytes:
        """Reads all pieces; JSON of the response."""
        pieces: dict[int, list[Piece]] = {c.index: [] for c in self.generation.choices}
        async for batch in self.generation.pieces():
            for piece in batch:
                pieces[piece.choice.index].append(piece)
                self.hear(piece)

        def build() -> bytes:
            choices = [self.choice(c, pieces[c.index]) for c in self.generation.choices]
            return encode_json({**self.head(), "choices": choices, **self.members()})

        entries = sum(len(r.ids) for batch in pieces.values() for p in batch for r in p.logprobs)
        return await self._shaped(build, entries)

    async def first_events(self, batch: list[Piece]) -> bytes:
        """As ``events``, for pieces that bring the prompt's log-probabilities."""
        return await self._shaped(lambda: self.events(batch), 0)

    async def _shaped(self, build: Callable[[], bytes], num_logprobs: int) -> bytes:
        """What ``build`` makes; in a thread where it has many log-probabilities to write."""
        num_logprobs += self.generation.num_prompt_logprobs
        if num_logprobs <= MANY_LOGPROBS:
            return build()
        return await self.state.workers.run(build, num_logprobs)

    # ---- usage ----

    def usage(self) -> dict[str, Any]:
        num_prompt = self.generation.num_prompt_tokens
        num_output = self.generation.num_output_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if self.state.server.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.generation.num_cached_tokens}
        return usage

    def continuous_usage(self) -> bytes:
        """A member for each event, if the client asked for it."""
        return members(usage=self.usage()) if self._counts_on else b""

    def chunk_tail(self, piece: Piece) -> bytes:
        """Members that follow an event's choices: usage so far; at the very end the timings,
        unless a usage event comes after it."""
        tail = self.continuous_usage()
        if not piece.is_last or self.wants_usage or self._closed:
            return tail
        if all(choice.finish_reason for choice in self.generation.choices):
            self._closed = True
            tail += self._closing()
        return tail

    def final_usage(self) -> bytes:
        """Members of the event without choices, or b"" if the client did not ask for it."""
        return members(usage=self.usage()) + self._closing() if self.wants_usage else b""

    def _closing(self) -> bytes:
        closing = members(timings=self.generation.timings())
        return closing + members(warnings=self.warnings) if self.warnings else closing

    def stopped(self, choice: Choice) -> bool:
        """Whether the last token ended the choice (EOS, stop id) and is not in the text."""
        return choice.finish_reason == FinishReason.STOP and choice.text.hides_last


def request_id(request: Request, given: str | None, prefix: str) -> str:
    """``prefix-ID`` with the client's id (field, or X-Request-Id header), or a random one."""
    sent = given or request.scope["octavo.request_id"]
    if len(sent) > 256 or not sent.isprintable() or not sent.isascii():
        raise InvalidRequest(
            "request_id must be at most 256 printable ASCII characters", "request_id"
        )
    return f"{prefix}-{sent}"


def check_priority(state: ServerState, priority: int | None) -> None:
    if priority and state.config.scheduler.scheduling_policy != "priority":
        raise InvalidRequest(
            "priority needs a server that runs with --scheduling-policy priority", "priority"
        )


async def in_time(
    state: ServerState, timeout: float | None, arrival: float, work: Awaitable[T]
) -> T:
    """What ``work`` (reading the prompt) gives. Raises TimedOut where the request's timeout passes
    meanwhile."""
    if timeout is None:
        return await work
    try:
        async with asyncio.timeout(arrival + timeout - time.monotonic()):
            return await work
    except TimeoutError:
        state.metrics.num_timed_out += 1
        raise TimedOut(
            f"the request's timeout of {timeout:g} s has passed: its prompt was being read"
        ) from None


async def _grammar(
    state: ServerState, body: GenerationRequest, constraint: StructuredOutputsParams
) -> str:
    """The checked grammar of a constraint. Raises InvalidRequest naming the client's field."""
    state.client.check_queue(1)  # before work is spent on it
    try:
        return await state.grammars.text(constraint)
    except InvalidRequest as error:
        raise renamed_constraint(error, body) from None


async def respond(
    state: ServerState,
    request: Request,
    answer_type: Callable[..., Answer],
    body: GenerationRequest,
    params: SamplingParams,
    prompts: tuple[list[list[int]], list[str | None]],
    *,
    arrival: float,
    prefix: str,
    warnings: list[str],
    drop_output: bool = False,
    marks: Mapping[int, str] | None = None,
    render: bool = False,
) -> Response:
    """Runs the generation. Errors before the first event are raised; the app answers them.
    ``drop_output``, ``marks``: see ``Ask``. ``render``: all but the generation, told as JSON."""
    name = request_id(request, body.request_id, prefix)
    check_priority(state, body.priority)
    salt = state.salt(request.scope["octavo.key"], body.cache_salt)
    ask = Ask(
        request_id=name,
        prompts=prompts[0],
        texts=prompts[1],
        params=params,
        arrival=arrival,
        priority=body.priority or 0,
        salt=salt,
        hint=hint_of(salt, body.prompt_cache_key),
        tenant=request.scope["octavo.key"],
        weight=request.scope["octavo.weight"],
        drop_output=drop_output,
        timeout=body.timeout,
        marks=marks,
    )
    beams = beam_params(body, params)
    if (constraint := params.structured_outputs) is not None:
        ask.grammar = await in_time(state, body.timeout, arrival, _grammar(state, body, constraint))

    def made() -> Answer:
        if beams is None:
            generation = Generation(state, ask, request.receive)
        else:
            generation = BeamGeneration(state, ask, request.receive, beams)
        return answer_type(state, body, generation, name, warnings)

    answer = made()
    if state.server.enable_log_requests:
        logger.info("%s: %d prompts, %s", name, len(ask.prompts), params)
    if render:
        prepared = await answer.generation.prepared()
        return await rendered(state, answer.model, prepared, warnings, answer.several)
    try:
        return await _answered(answer)
    except EngineLost:
        # Nothing has been sent. The engine's client has moved what had not begun; this had.
        # Once: a request that kills engines must not take one after the other.
        if state.client.problem() is not None or state.client.draining:
            raise
    ask.again = True
    return await _answered(made())


async def _answered(answer: Answer) -> Response:
    """The whole response, or the stream whose first event is there."""
    await answer.generation.begin()
    if answer.body.stream:
        return EventStream(answer)
    try:
        content = await answer.whole()
    finally:
        answer.generation.close()
    return Response(content, 200, None, "application/json")
