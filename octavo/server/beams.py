"""Beam search for the generating routes (engine.beams), in the place of a ``Generation``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial

from octavo.engine.beams import Beam, BeamSearch, no_stop
from octavo.engine.messages import AddRequest, Started, TokenLogprobRow
from octavo.engine.streams import StepEvents
from octavo.server.auth import Receive
from octavo.server.generation import Ask, Choice, Generation, Piece, Prompt
from octavo.server.measures import EngineMeasures
from octavo.server.state import ServerState
from octavo.text.output import stop_string_in
from octavo.types import BeamSearchParams


class BeamGeneration(Generation):
    """Answers with the ``n`` best beams of each prompt, all at once at the end: ``params`` of the
    ask are their limits and ends."""

    def __init__(
        self, state: ServerState, ask: Ask, receive: Receive, beams: BeamSearchParams
    ) -> None:
        super().__init__(state, ask, receive)
        self._beams = beams
        self._searches: list[tuple[Prompt, BeamSearch]] = []
        self._row_of: dict[int, TokenLogprobRow] = {}  # of the step under way, by handle
        self._starting: dict[int, Prompt] = {}  # by handle of the prompts' own step
        self._admitted: dict[int, AddRequest] = {}  # by the prompts' handles
        self._measured: dict[int, EngineMeasures] = {}  # of the engine that began a prompt

    async def begin(self) -> None:
        self._state.check_serving()
        requests = await self.prepared()
        info, params = self._state.client.info, self._ask.params
        stop_in = no_stop
        if params.stop:
            stop_in = partial(stop_string_in, self._state.require_tokenizer("stop"), params)
        for request, prompt in zip(requests, self.prompts):
            search = BeamSearch(request, self._beams, info, stop_in, params.logprobs)
            self._searches.append((prompt, search))
            self._admitted[prompt.handle] = request
        try:
            await self._step(self._live())
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """One batch: every choice from its first token to its end."""
        while live := self._live():
            await self._step(live)
        found = [(prompt, beam) for prompt, search in self._searches for beam in search.best()]
        self.choices = self.choices[: len(found)]  # fewer where the vocabulary is that small
        yield [self._piece(*of) for of in zip(self.choices, *zip(*found))]

    def _doing(self) -> str:
        steps = max((search.num_steps for _, search in self._searches), default=0)
        return f"{steps} steps of the search were done" if steps else super()._doing()

    def _live(self) -> list[tuple[Prompt, BeamSearch]]:
        """The searches under way, in order: of as many prompts as the engine can run at once."""
        most = max(1, self._state.client.info.max_num_seqs // self._beams.beam_width)
        return [entry for entry in self._searches if not entry[1].done][:most]

    async def _step(self, searches: list[tuple[Prompt, BeamSearch]]) -> None:
        """The next tokens of these searches' beams."""
        steps: list[list[AddRequest]] = []
        self._row_of.clear()
        self._starting.clear()
        for prompt, search in searches:
            first = self._state.client.allocate(len(search.live))
            steps.append(list(search.requests(first)))
            if search.num_steps == 0:
                self._starting[first] = prompt
        async for events in self._submission.run([r for step in steps for r in step]):
            self._take(events)
        now = time.monotonic()
        for (prompt, search), step in zip(searches, steps):
            search.advance([self._row_of[request.handle] for request in step])
            for choice in self.choices:
                if choice.prompt is prompt:
                    self._stamp(choice, now)

    def _take(self, events: StepEvents) -> None:
        if events.more is None:
            return
        for row in events.more.logprobs:
            self._row_of[row.handle] = row
        for started in events.more.started:
            if (prompt := self._starting.get(started.handle)) is not None:
                self._start(prompt, started)

    def _start(self, prompt: Prompt, started: Started) -> None:
        prompt.num_cached = started.num_cached_tokens
        measures = self._measured[prompt.handle] = self._submission.measures(started.handle)
        measures.on_started(len(prompt.ids), started.num_cached_tokens)
        if not self._ask.again:
            request = self._admitted[prompt.handle]
            measures.on_admitted(request.params, request.max_tokens)
        for choice in self.choices:
            if choice.prompt is prompt:
                choice.timings.first_scheduled = started.time

    def _stamp(self, choice: Choice, now: float) -> None:
        times = choice.timings
        if times.first_token < 0:
            times.first_token = now
            self._measures(choice).first_token.observe(now - times.arrival)
        times.last_token = now

    def _measures(self, choice: Choice) -> EngineMeasures:
        return self._measured[choice.prompt.handle]

    def _piece(self, choice: Choice, prompt: Prompt, beam: Beam) -> Piece:
        choice.prompt = prompt
        text = choice.text.push(beam.tokens)
        text += choice.text.finish()
        choice.finish_reason, choice.stop_reason = beam.finish_reason, beam.stop_reason
        self._measures(choice).num_generated_tokens += len(beam.tokens)
        self._record(choice)
        return Piece(choice, text, beam.tokens, beam.rows, True, True)
