"""The health routes: whether to send requests here, and whether a restart is needed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.engine.admission import prepare
from octavo.engine.replica import Replica
from octavo.server.errors import describe, failure_of
from octavo.types import EngineDead, FinishReason, OctavoError, SamplingParams

if TYPE_CHECKING:
    from octavo.server.state import ServerState

DEEP_SECONDS = 10.0  # for the token of ?deep=1


class DeepProbe:
    """Draws one token on each engine that serves. Who asks while that is done shares the answer:
    the route needs no key, and must not be a way to load the server."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._task: asyncio.Task[dict[int, float]] | None = None

    async def run(self) -> dict[int, float]:
        """Seconds that each took. Raises EngineDead naming the one that gave none in time."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._probe())
        return await asyncio.shield(self._task)

    async def _probe(self) -> dict[int, float]:
        serving = [replica for replica in self._state.client.replicas if replica.serves]
        seconds = await asyncio.gather(*map(self._draw, serving))
        return dict(zip((replica.index for replica in serving), seconds))

    async def _draw(self, replica: Replica) -> float:
        client, began = self._state.client, time.monotonic()
        handle = client.allocate(1)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        prompt = client.info.eos_ids[:1] or [0]
        request = prepare(
            client.info, params, prompt, handle=handle, request_id=f"health-{handle}", arrival=began
        )
        try:
            async with asyncio.timeout(DEEP_SECONDS):
                # Past the queue's bounds: a full queue is busy, not broken.
                async for events in replica.client.submit([request], continuing=True):
                    for end in events.more.finished if events.more is not None else ():
                        if end.reason == FinishReason.ERROR:
                            raise failure_of(end)
        except TimeoutError:
            raise EngineDead(
                f"engine {replica.index} has not drawn a token within {DEEP_SECONDS:g} s"
            ) from None
        except OctavoError as error:
            raise EngineDead(f"engine {replica.index} cannot draw a token: {error}") from None
        finally:
            replica.client.abort([handle])
        return round(time.monotonic() - began, 6)


def add_health_routes(api: FastAPI, state: ServerState) -> None:
    probe = DeepProbe(state)

    async def serving(request: Request) -> Response:
        try:
            state.check_serving()
            if request.query_params.get("deep", "0") not in ("", "0", "false"):
                return _json({"seconds": {str(k): v for k, v in (await probe.run()).items()}})
        except EngineDead as error:
            status, told = describe(error)
            body: dict[str, object] = {"error": told}
            if state.loads:
                body["loading"] = state.loading.facts()
            return _json(body, status)
        return Response(status_code=200)

    @api.get("/health")
    async def health(request: Request) -> Response:
        """200 only while the engine makes progress and requests are taken. ``?deep=1``: and while
        each engine draws a token when it is asked to."""
        return await serving(request)

    @api.get("/health/ready")
    async def ready(request: Request) -> Response:
        """As /health: whether to send requests here."""
        return await serving(request)

    @api.get("/health/live")
    async def live() -> Response:
        """200 unless a restart is needed: also while loading, draining or stalled."""
        if not state.client.alive:
            raise EngineDead(state.client.problem() or "the engine is gone")
        return Response(status_code=200)

    @api.get("/ping")
    async def ping(request: Request) -> Response:
        """As /health."""
        return await serving(request)

    @api.post("/ping")
    async def post_ping(request: Request) -> Response:
        """As /health."""
        return await serving(request)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, None, "application/json")
