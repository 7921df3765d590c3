"""POST /v1/embeddings: vectors of prompts, from any decoder."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.admission import prepare_embedding
from octavo.engine.messages import AddRequest, PooledPrompt, num_ids
from octavo.engine.streams import MoreEvents
from octavo.server.answers import check_priority, in_time, request_id
from octavo.server.auth import Scope
from octavo.server.chat import chat_ids, check_without_messages
from octavo.server.inputs import listed, token_ids
from octavo.server.protocol import EmbeddingRequest
from octavo.server.state import ServerState
from octavo.server.streaming import encode_json, members
from octavo.server.submission import Submission
from octavo.types import InvalidRequest, Pooling

logger = logging.getLogger("octavo")

MANY_VALUES = 20_000  # of vectors in one response: more are written by a thread
MOST_INPUTS = 2048  # of one request, as OpenAI has it


async def embed(
    state: ServerState,
    request: Request,
    body: EmbeddingRequest,
    arrival: float,
    warnings: list[str],
) -> Response:
    """Errors are raised; the app answers them. ``arrival``: ``time.monotonic()``."""
    check_priority(state, body.priority)
    state.client.check_queue(1)  # before thousands of texts are tokenized
    name = request_id(request, body.request_id, "embd")
    answer = EmbeddingAnswer(state, body, name, arrival, warnings)
    try:
        prompts = await in_time(state, body.timeout, arrival, inputs_of(state, body, request))
        # 20 µs for each of perhaps 2,048 inputs
        requests = await state.encode(lambda: answer.prepared(prompts, request.scope), 0, request)
    except InvalidRequest as error:
        sent = "input" if body.messages is None else "messages"
        field = sent if error.param == "prompt" else error.param
        raise InvalidRequest(str(error), field, error.code) from None
    if state.server.enable_log_requests:
        logger.info("%s: vectors of %d inputs", name, len(requests))
    state.check_serving()
    answer.number(requests)
    submission = Submission(state, request.receive, arrival, body.timeout, answer.doing)
    try:
        for part in parts(requests, state):
            async for events in submission.run(part):
                if events.more is not None:
                    answer.take(events.more, submission)
    finally:
        submission.close()
    content = await answer.whole(request)
    return Response(content, 200, None, "application/json")


async def inputs_of(
    state: ServerState, body: EmbeddingRequest, request: Request
) -> list[list[int]]:
    """Token ids of each input. Raises InvalidRequest."""
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("send exactly one of input and messages", "input")
    if body.messages is not None:
        # No answer follows, so none is begun unless asked for.
        prompted = body.model_copy(
            update={"add_generation_prompt": bool(body.add_generation_prompt)}
        )
        return [await chat_ids(state, prompted, body.messages, body.add_special_tokens, request)]
    check_without_messages(body)
    inputs = listed(body.input, "input")
    if len(inputs) > MOST_INPUTS:
        raise InvalidRequest(
            f"input holds {len(inputs)} inputs; at most {MOST_INPUTS} are taken at once", "input"
        )
    return await token_ids(
        state,
        inputs,
        "input",
        add_special_tokens=body.add_special_tokens,
        truncated=body.truncate_prompt_tokens is not None,
        request=request,
    )


def parts(requests: list[AddRequest], state: ServerState) -> Iterator[list[AddRequest]]:
    """As many at a time as the engine runs at once and the queue takes: a long list neither
    overflows the queue nor keeps everybody else waiting."""
    size = max(1, min(state.client.info.max_num_seqs, state.client.most_queued))
    for begin in range(0, len(requests), size):
        yield requests[begin : begin + size]


class EmbeddingAnswer:
    """The response in the making."""

    def __init__(
        self,
        state: ServerState,
        body: EmbeddingRequest,
        name: str,
        arrival: float,
        warnings: list[str],
    ) -> None:
        self._state, self._body, self._name, self._arrival = state, body, name, arrival
        self._warnings = warnings
        self._normalize = _normalize(body)
        _check_dimensions(body.dimensions, state.client.info.hidden_size)
        self._vectors: dict[int, PooledPrompt] = {}  # by handle
        self._requests: list[AddRequest] = []
        self._last_scheduled = arrival
        self._num_cached = 0

    def prepared(self, prompts: list[list[int]], scope: Scope) -> list[AddRequest]:
        """A request for each prompt, all or none, the first with handle 0. ``scope``: of whose
        key. Raises InvalidRequest."""
        client, body = self._state.client, self._body
        tenant = scope["octavo.key"]
        salt = self._state.salt(tenant, body.cache_salt)
        return [
            prepare_embedding(
                client.info, ids, body.pooling or Pooling.LAST.value, handle=i,
                request_id=f"{self._name}-{i}" if len(prompts) > 1 else self._name,
                arrival=self._arrival, truncate_prompt_tokens=body.truncate_prompt_tokens,
                priority=body.priority or 0, salt=salt, tenant=tenant,
                weight=scope["octavo.weight"],
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip

    def number(self, requests: list[AddRequest]) -> None:
        """Gives the prepared requests handles of their own."""
        first = self._state.client.allocate(len(requests))
        for request in requests:
            request.handle += first
        self._requests = requests

    def take(self, events: MoreEvents, submission: Submission) -> None:
        now = time.monotonic()
        for started in events.started:
            self._num_cached += started.num_cached_tokens
            length = self._length(started.handle)
            submission.measures(started.handle).on_started(length, started.num_cached_tokens)
        for pooled in events.pooled:
            self._vectors[pooled.handle] = pooled
        for end in events.finished:
            self._last_scheduled = max(self._last_scheduled, end.timings.first_scheduled)
            length = self._length(end.handle)
            submission.measures(end.handle).on_embedded(end.timings, now, length)

    def doing(self) -> str:
        """What a timeout interrupts."""
        return f"{len(self._vectors)} of {len(self._requests)} vectors were computed"

    async def whole(self, request: Request) -> bytes:
        """JSON of the response. Many values are written by a thread."""
        size = len(self._requests) * self._state.client.info.hidden_size
        if size <= MANY_VALUES:
            return self._built()
        return await self._state.workers.run(self._built, size, request.receive)

    def _built(self) -> bytes:
        entries = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (i, self._encoded(r.handle))
            for i, r in enumerate(self._requests)
        ]
        num_tokens = sum(num_ids(request.prompt_ids) for request in self._requests)
        usage: dict[str, Any] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        if self._state.server.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
        timings = {
            "queue_seconds": round(self._last_scheduled - self._arrival, 6),
            "total_seconds": round(time.monotonic() - self._arrival, 6),
        }
        head = {
            "id": self._name,
            "object": "list",
            "created": int(time.time()),
            "model": self._state.check_model(self._body.model),
        }
        rest = members(usage=usage, timings=timings)
        if self._warnings:
            rest += members(warnings=self._warnings)
        data = b",".join(entries)
        return b'%b,"data":[%b]%b}' % (encode_json(head)[:-1], data, rest)

    def _length(self, handle: int) -> int:
        return num_ids(self._requests[handle - self._requests[0].handle].prompt_ids)

    def _encoded(self, handle: int) -> bytes:
        """One vector as JSON. The encoder keeps Python to itself, so it is given no more at a time:
        the event loop gets its turn between two vectors."""
        vector = self._vectors[handle].vector(self._normalize)
        if self._body.encoding_format == "base64":
            return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
        return encode_json(vector.tolist())


def _check_dimensions(asked: int | None, hidden_size: int) -> None:
    if asked is not None and asked != hidden_size:
        raise InvalidRequest(
            f"dimensions is {asked}; this model's vectors have {hidden_size} values and are not "
            "made to be shortened",
            "dimensions",
        )


def _normalize(body: EmbeddingRequest) -> bool:
    sent = {value for value in (body.normalize, body.use_activation) if value is not None}
    if len(sent) > 1:
        raise InvalidRequest("normalize and use_activation contradict each other", "normalize")
    return sent != {False}
