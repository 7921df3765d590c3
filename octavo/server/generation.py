"""One HTTP request's generation: its prompts go in, pieces of its choices come out.

Both routes, streamed or not, read the same pieces, so that they cannot differ in what they say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.admission import prepare
from octavo.engine.messages import (
    AddRequest,
    Finished,
    PromptLogprobRows,
    TokenLogprobRow,
    unpack_ids,
)
from octavo.engine.streams import MoreEvents, RequestStream, StepEvents
from octavo.server.auth import Receive
from octavo.server.errors import failure_of
from octavo.server.measures import EngineMeasures
from octavo.server.state import ServerState
from octavo.server.submission import Submission
from octavo.text.output import ChoiceText
from octavo.types import FinishReason, InvalidRequest, RequestTimings, SamplingParams

MANY_PROMPTS = 100  # of one request: to check them takes about 2 ms


@dataclass(slots=True)
class Prompt:
    """A prompt, and what became known of it."""

    ids: list[int]
    text: str | None  # as the client sent it; None for ids, or when it was truncated
    handle: int
    num_cached: int = 0
    logprobs: dict[int, TokenLogprobRow] = field(default_factory=dict)  # by position, not 0


class Choice:
    """One of the n answers to a prompt. ``index`` is its place in the response."""

    __slots__ = (
        "finish_reason", "handle", "index", "num_accepted_drafts", "num_drafts", "prompt",
        "stop_reason", "text", "timings",
    )  # fmt: skip

    def __init__(self, index: int, handle: int, prompt: Prompt, text: ChoiceText, arrival: float):
        self.index = index
        self.handle = handle
        self.prompt = prompt
        self.text = text
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.timings = RequestTimings(arrival=arrival)
        self.num_drafts = self.num_accepted_drafts = 0

    @property
    def token_ids(self) -> list[int]:
        """Those that count: up to and including the one that completed a stop string."""
        return self.text.token_ids


@dataclass(slots=True)
class Piece:
    """What one choice gained: text that may be sent now, tokens, and perhaps its end."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobRow]
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class Ask:
    """What a route wants generated. ``drop_output``: only the prompt's logprobs matter.
    ``marks``: tokens that the answers' text shows as other characters (``ChoiceText``).
    ``grammar``: the checked text of the parameters' ``structured_outputs``."""

    request_id: str
    prompts: list[list[int]]
    texts: list[str | None]
    params: SamplingParams
    arrival: float
    priority: int = 0
    salt: bytes = b""
    tenant: bytes = b""
    weight: float = 1.0
    drop_output: bool = False
    grammar: str = ""
    timeout: float | None = None  # seconds after arrival
    marks: Mapping[int, str] | None = None
    hint: bytes = b""  # equal for requests that the client says share a prefix
    again: bool = False  # it was admitted before, and lost with its engine


class Generation:
    """Owns the handles of one HTTP request, from ``begin`` until ``close``."""

    def __init__(self, state: ServerState, ask: Ask, receive: Receive) -> None:
        self._state = state
        self._ask = ask
        self._submission = Submission(
            state, receive, ask.arrival, ask.timeout, self._doing, ask.again, ask.hint
        )
        self._first: StepEvents | None = None
        self.num_prompt_logprobs = 0  # entries, all positions and ranks
        self.prompts: list[Prompt] = []
        self.choices: list[Choice] = []

    async def begin(self) -> None:
        """Submits all prompts and waits until the engine took or refused them, so that errors up
        to here can still be plain HTTP answers."""
        self._state.check_serving()
        requests = await self.prepared()
        self._stream: RequestStream = self._submission.submit(requests)
        if not self._ask.again:
            for request in requests:
                measures = self._submission.measures(request.handle)
                measures.on_admitted(request.params, request.max_tokens)
        try:
            self._first = await anext(self._stream)
            self._refuse_rejected(self._first)
        except BaseException:
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Batches of pieces, in order for each choice, until all choices have ended.

        Raises EngineDead, StepError, InvalidRequest (refused late) or ClientGone.
        """
        events, self._first = self._first, None
        if events is not None and (batch := self._apply(events)):
            yield batch
        async for events in self._stream:
            if batch := self._apply(events):
                yield batch

    def close(self) -> None:
        """Aborts what has not ended."""
        self._submission.close()

    # ---- totals ----

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.text.token_ids) for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        return sum(prompt.num_cached for prompt in self.prompts)

    def timings(self) -> dict[str, Any]:
        """Seconds of the whole request; with several choices the slowest counts."""
        arrival = self._ask.arrival
        times = [choice.timings for choice in self.choices]
        last = max(t.last_token for t in times)
        first = min((t.first_token for t in times if t.first_token >= 0), default=-1.0)
        span = last - first
        several = self.num_output_tokens > len(times) and span > 0
        guessed = {}
        if num_drafts := sum(choice.num_drafts for choice in self.choices):
            accepted = sum(choice.num_accepted_drafts for choice in self.choices)
            guessed = {"draft_tokens": num_drafts, "accepted_draft_tokens": accepted}
        return {
            "queue_seconds": _span(arrival, max(t.first_scheduled for t in times)),
            "first_token_seconds": _span(arrival, max(t.first_token for t in times)),
            "total_seconds": _span(arrival, last),
            "tokens_per_second": (
                round((self.num_output_tokens - len(times)) / span, 3) if several else None
            ),
            **guessed,
        }

    # ---- submitting ----

    async def prepared(self) -> list[AddRequest]:
        """All or none: the first prompt that cannot run refuses the whole request. Handles are
        taken only after that: a refused n may be any number."""
        ask, client, tokenizer = self._ask, self._state.client, self._state.tokenizer
        n = ask.params.n
        if ask.params.stop:
            self._state.require_tokenizer("stop")
        bad_words = await self._bad_word_ids()
        if len(ask.prompts) <= MANY_PROMPTS:
            requests = self._checked(bad_words)
        else:
            size = sum(map(len, ask.prompts))
            requests = await self._state.workers.run(lambda: self._checked(bad_words), size)
        self._first_handle = client.allocate(n * len(requests))
        for i, (ids, request) in enumerate(zip(ask.prompts, requests)):
            request.handle += self._first_handle
            kept = ids
            if ask.params.truncate_prompt_tokens is not None:
                kept = unpack_ids(request.prompt_ids).tolist()
            whole = len(kept) == len(ids)
            prompt = Prompt(kept, ask.texts[i] if whole else None, request.handle)
            self.prompts.append(prompt)
            for k in range(n):
                text = ChoiceText(
                    tokenizer, ask.params, eos_ids=client.info.eos_ids, marks=ask.marks
                )
                choice = Choice(i * n + k, request.handle + k, prompt, text, ask.arrival)
                self.choices.append(choice)
        return requests

    def _checked(self, bad_words: list[list[int]]) -> list[AddRequest]:
        """A request for each prompt, the first with handle 0. Raises InvalidRequest."""
        ask, state = self._ask, self._state
        return [
            prepare(
                state.client.info, ask.params, ids, handle=i * ask.params.n,
                request_id=f"{ask.request_id}-{i}" if len(ask.prompts) > 1 else ask.request_id,
                arrival=ask.arrival, max_logprobs=state.config.model.max_logprobs,
                priority=ask.priority, salt=ask.salt, tenant=ask.tenant, weight=ask.weight,
                bad_words=bad_words, grammar=ask.grammar,
            )
            for i, ids in enumerate(ask.prompts)
        ]  # fmt: skip

    async def _bad_word_ids(self) -> list[list[int]]:
        words = self._ask.params.bad_words
        if not words:
            return []
        tokenizer = self._state.require_tokenizer("bad_words")
        return await self._state.encode(
            lambda: tokenizer.bad_word_ids(words), 2 * sum(map(len, words))
        )

    def _doing(self) -> str:
        """What a timeout interrupts."""
        if all(choice.timings.first_scheduled < 0 for choice in self.choices):
            return "it was still in the queue"
        return f"{self.num_output_tokens} tokens were generated"

    def _refuse_rejected(self, events: StepEvents) -> None:
        for rejected in events.more.rejected if events.more else ():
            raise InvalidRequest(rejected.message, rejected.param)

    # ---- receiving ----

    def _apply(self, events: StepEvents) -> list[Piece]:
        if len(events.tokens) == 1 and events.more is None:
            handle, token = events.tokens[0]  # by far the most frequent case
            choice = self.choices[handle - self._first_handle]
            if choice.finish_reason is not None:  # it came while a stop string ended the choice
                return []
            return [self._extended(choice, [token], [], events.time, None)]
        return list(self._apply_any(events))

    def _apply_any(self, events: StepEvents) -> Iterator[Piece]:
        more = events.more or MoreEvents()
        self._refuse_rejected(events)
        for started in more.started:
            choice = self.choices[started.handle - self._first_handle]
            choice.timings.first_scheduled = started.time
            if choice.handle == choice.prompt.handle:
                choice.prompt.num_cached = started.num_cached_tokens
                measures = self._measures(choice)
                measures.on_started(len(choice.prompt.ids), started.num_cached_tokens)
        for rows in more.prompt_logprobs:
            self._keep_prompt_logprobs(rows)
        finished = {end.handle: end for end in more.finished}
        tokens, logprobs = self._sorted(events.tokens, more.logprobs)
        for handle, ids in tokens.items():
            choice = self.choices[handle - self._first_handle]
            if choice.finish_reason is None:
                rows_of = logprobs.get(handle, [])
                end = finished.pop(handle, None)
                yield self._extended(choice, ids, rows_of, events.time, end)
        for handle, end in finished.items():
            choice = self.choices[handle - self._first_handle]
            if choice.finish_reason is None:
                yield self._extended(choice, [], [], events.time, end)

    def _sorted(
        self, pairs: list[tuple[int, int]], rows: list[TokenLogprobRow]
    ) -> tuple[dict[int, list[int]], dict[int, list[TokenLogprobRow]]]:
        """Tokens and logprob rows by handle."""
        tokens: dict[int, list[int]] = {}
        for handle, token in pairs:
            if handle in tokens:
                tokens[handle].append(token)
            else:
                tokens[handle] = [token]
        logprobs: dict[int, list[TokenLogprobRow]] = {}
        for row in rows:
            logprobs.setdefault(row.handle, []).append(row)
        return tokens, logprobs

    def _extended(
        self,
        choice: Choice,
        ids: list[int],
        rows: list[TokenLogprobRow],
        now: float,
        end: Finished | None,
    ) -> Piece:
        """Adds tokens to a choice, and ends it: by the engine, or by a stop string in its text."""
        is_first = choice.timings.first_token < 0
        measures = self._measures(choice)
        if ids:
            _time(choice.timings, measures, len(ids), now)
        if self._ask.drop_output:
            ids, rows = [], []
        num_before = len(choice.text.token_ids)
        text = choice.text.push(ids) if ids else ""
        met = choice.text.stop_string
        if met is not None:  # what came after the stop is neither returned nor counted
            num_new = len(choice.text.token_ids) - num_before
            ids, rows = ids[:num_new], rows[:num_new]
            self._state.client.abort([choice.handle], FinishReason.STOP)
            self._finish(choice, FinishReason.STOP.value, met)
        elif end is not None:
            if end.reason == FinishReason.ERROR:
                raise failure_of(end)
            text += choice.text.finish()
            if end.timings.last_token >= 0:
                choice.timings = end.timings
            choice.num_drafts, choice.num_accepted_drafts = end.num_drafts, end.num_accepted_drafts
            self._finish(choice, end.reason.value, end.stop_reason)
        measures.num_generated_tokens += len(ids)
        if choice.finish_reason in ("stop", "length"):
            self._record(choice)
        return Piece(choice, text, ids, rows, is_first, choice.finish_reason is not None)

    def _finish(self, choice: Choice, reason: str, stop_reason: int | str | None) -> None:
        choice.finish_reason, choice.stop_reason = reason, stop_reason
        if self._ask.drop_output:
            choice.finish_reason, choice.stop_reason = "length", None

    def _record(self, choice: Choice) -> None:
        siblings = [len(c.token_ids) for c in self.choices if c.prompt is choice.prompt]
        self._measures(choice).on_finished(
            choice.timings, len(choice.prompt.ids), len(choice.token_ids), max(siblings)
        )

    def _measures(self, choice: Choice) -> EngineMeasures:
        """Of the engine that has the choice."""
        return self._submission.measures(choice.handle)

    def _keep_prompt_logprobs(self, rows: PromptLogprobRows) -> None:
        choice = self.choices[rows.handle - self._first_handle]
        if choice.handle != choice.prompt.handle:
            return  # each choice reports the same
        for i, (ids, values, rank) in enumerate(zip(rows.ids, rows.values, rows.ranks)):
            row = TokenLogprobRow(rows.handle, ids, values, rank)
            choice.prompt.logprobs[rows.start + i] = row
            self.num_prompt_logprobs += len(ids)


def _span(begin: float, end: float) -> float | None:
    return round(end - begin, 6) if end >= 0 else None


def _time(times: RequestTimings, measures: EngineMeasures, num_tokens: int, now: float) -> None:
    """A choice has got so many tokens more."""
    if times.first_token < 0:
        times.first_token = now
        measures.first_token.observe(now - times.arrival)
    else:
        measures.inter_token.observe((now - times.last_token) / num_tokens, num_tokens)
    times.last_token = now
