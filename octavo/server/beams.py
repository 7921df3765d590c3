"""Beam search for the generating routes (engine.beams), in the place of a ``Generation``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial

from octavo.engine.beams import Beam, BeamSearch
from octavo.engine.messages import AddRequest, Started, TokenLogprobRow
from octavo.engine.streams import StepEvents
from octavo.server.auth import Receive
from octavo.server.generation import Ask, Choice, Generation, Piece, Prompt
from octavo.server.state import ServerState
from octavo.server.submission import Submission
from octavo.text.output import ChoiceText, stop_string_in
from octavo.types import BeamSearchParams


class BeamGeneration(Generation):
    """Answers with the ``n`` best beams of each prompt, all at once at the end: ``params`` of the
    ask are their limits and ends."""

    def __init__(
        self, state: ServerState, ask: Ask, receive: Receive, beams: BeamSearchParams
    ) -> None:
        super().__init__(state, ask, receive)
        self._beams = beams
        self._submission = Submission(state, receive)
        self._searches: list[BeamSearch] = []
        self._row_of: dict[int, TokenLogprobRow] = {}  # of the step under way, by handle
        self._starting: dict[int, Prompt] = {}  # by handle of the prompts' own step

    async def begin(self) -> None:
        self._state.check_serving()
        requests = await self.prepared()
        info, params = self._state.client.info, self._ask.params
        scan = partial(stop_string_in, self._state.tokenizer, params)
        for request in requests:
            self._searches.append(
                BeamSearch(
                    request, self._beams, info, scan if params.stop else lambda tokens: None,
                    params.logprobs or 0,
                )
            )  # fmt: skip
            self._state.metrics.on_admitted(request.params, request.max_tokens)
        self._submission.begin(self._ask.arrival, self._ask.timeout)
        try:
            await self._step(self._searches)
            self._starting.clear()
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """One batch: every choice from its first token to its end."""
        while live := [search for search in self._searches if not search.done]:
            await self._step(live)
        found = [(p, beam) for p, s in zip(self.prompts, self._searches) for beam in s.best()]
        self.choices = self.choices[: len(found)]  # fewer where the vocabulary is that small
        yield [self._piece(*of) for of in zip(self.choices, *zip(*found))]

    def close(self) -> None:
        self._submission.close()

    async def _step(self, searches: list[BeamSearch]) -> None:
        """The next tokens of these searches' beams."""
        steps: list[list[AddRequest]] = []
        for search in searches:
            first = self._state.client.allocate(len(search.live))
            steps.append(list(search.requests(first)))
        self._row_of.clear()
        if searches is self._searches:
            self._starting = {step[0].handle: p for step, p in zip(steps, self.prompts)}
        async for events in self._submission.run([r for step in steps for r in step]):
            self._take(events)
        now = time.monotonic()
        for search, step in zip(searches, steps):
            search.advance([self._row_of[request.handle] for request in step])
        for choice in self.choices:
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
        self._state.metrics.num_prompt_tokens += len(prompt.ids)
        self._state.metrics.num_cached_tokens += started.num_cached_tokens
        for choice in self.choices:
            if choice.prompt is prompt:
                choice.timings.first_scheduled = started.time

    def _stamp(self, choice: Choice, now: float) -> None:
        times = choice.timings
        if times.first_token < 0:
            times.first_token = now
            self._state.metrics.first_token.observe(now - times.arrival)
        times.last_token = now

    def _piece(self, choice: Choice, prompt: Prompt, beam: Beam) -> Piece:
        params = self._ask.params
        choice.prompt = prompt
        choice.text = ChoiceText(
            self._state.tokenizer, params, eos_ids=self._state.client.info.eos_ids,
            marks=self._ask.marks,
        )  # fmt: skip
        text = choice.text.push(beam.tokens)
        text += choice.text.finish()
        choice.finish_reason, choice.stop_reason = beam.finish_reason, beam.stop_reason
        self._state.metrics.num_generated_tokens += len(beam.tokens)
        self._record(choice)
        rows = [self._cut(row) for row in beam.rows] if params.logprobs is not None else []
        return Piece(choice, text, beam.tokens, rows, True, True)

    def _cut(self, row: TokenLogprobRow) -> TokenLogprobRow:
        """With as many of the most likely tokens as were asked for."""
        asked = self._ask.params.logprobs
        count = len(row.ids) if asked is None or asked == -1 else asked + 1
        return TokenLogprobRow(row.handle, row.ids[:count], row.values[:count], row.rank)
