"""Sends requests where the router says, and again to another replica when one is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from octavo.engine.accounts import Entry, Origin
from octavo.engine.admission import too_many_prompts
from octavo.engine.messages import num_ids
from octavo.engine.replica import Replica
from octavo.engine.routing import Router, chain_keys
from octavo.engine.streams import RequestStream
from octavo.types import EngineDead, QueueFull

# How often a request may begin again after an engine was lost that had begun to compute it: such a
# request may be what killed it, and must not take one replica after the other.
MOST_SUSPECT = 1


class Dispatcher:
    """``replicas`` belong to the caller, whose list may grow; ``caching``: their engines reuse
    prefixes."""

    def __init__(self, replicas: list[Replica], router: Router, caching: bool) -> None:
        self._replicas = replicas
        self._router = router
        self._caching = caching

    def problem(self) -> str | None:
        """Why no replica serves, or None while one does."""
        problems = [(replica.index, replica.problem()) for replica in self._replicas]
        if any(why is None for _, why in problems):
            return None
        if len(problems) == 1:
            return problems[0][1]
        return "no replica serves: " + "; ".join(f"replica {i}: {why}" for i, why in problems)

    def serving(self) -> list[Replica]:
        """Raises EngineDead where there is none."""
        if serving := [replica for replica in self._replicas if replica.serves]:
            return serving
        raise EngineDead(self.problem() or "the server is shutting down")

    def with_room(self, num_requests: int, num_tokens: int, num_sequences: int) -> list[Replica]:
        """The replicas whose queues take an equal part of so much more. Where there is none, raises
        what the one raises that will have room first."""
        serving = self.serving()
        most = sum(replica.client.most_taken for replica in serving)
        if num_requests > max(1, most):
            raise too_many_prompts(num_requests, most)
        part = [-(-count // len(serving)) for count in (num_requests, num_tokens, num_sequences)]
        found, refusals = [], []
        for replica in serving:
            try:
                replica.client.check_queue(*part)
                found.append(replica)
            except QueueFull as error:
                refusals.append(error)
        if not found:
            raise min(refusals, key=lambda error: error.retry_after)
        return found

    def place(self, origin: Origin, stream: RequestStream, candidates: Sequence[Replica]) -> None:
        """Sends a request to one of the replicas. Raises EngineDead when none takes it."""
        request, now = origin.request, time.monotonic()
        num_tokens = num_ids(request.prompt_ids)
        keys = chain_keys(request.salt, request.prompt_ids) if self._caching else []
        loads = {replica.index: replica.load(now) for replica in candidates}
        while loads:
            chosen, cached = self._router.choose(keys, num_tokens, loads, origin.hint)
            try:
                self._replicas[chosen].client.enter(replace(origin, num_cached=cached), stream)
            except EngineDead:  # it has gone since we looked
                del loads[chosen]
                continue
            self._router.use(chosen, keys)
            return
        raise EngineDead(self.problem() or "no replica takes requests")

    def rescue(self, lost: Replica, entry: Entry) -> bool:
        """Begins a request again that its engine has given nothing for. False where no other
        replica that serves has not had it before, or where it may be what ended the engine."""
        origin, handles = entry.origin, range(entry.handle, entry.handle + entry.n)
        suspect = origin.suspect + any(handle in entry.stream.started for handle in handles)
        tried = (*origin.tried, lost.client.serial)
        others = [r for r in self._replicas if r.serves and r.client.serial not in tried]
        if suspect > MOST_SUSPECT or not others:
            return False
        try:
            self.place(replace(origin, tried=tried, suspect=suspect), entry.stream, others)
        except EngineDead:
            return False
        return True
