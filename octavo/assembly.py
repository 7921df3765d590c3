"""From an engine's outputs to RequestOutputs (text, stop strings, log-probabilities per choice) and
to vectors of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import (
    AddRequest,
    Finished,
    Outputs,
    PooledPrompt,
    PromptLogprobRows,
    Started,
    TokenLogprobRow,
    num_ids,
)
from octavo.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from octavo.text.output import ChoiceText
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, InvalidRequest, OctavoError, RequestTimings


class Choice:
    """One answer in the making."""

    def __init__(
        self, tokenizer: Tokenizer | None, request: AddRequest, eos_ids: list[int]
    ) -> None:
        self.text = ChoiceText(tokenizer, request.params, eos_ids=eos_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class Answer:
    """A request and its n choices, as far as they are known."""

    def __init__(
        self,
        request: AddRequest,
        prompt: str | None,
        prompt_ids: list[int],
        tokenizer: Tokenizer | None,
        eos_ids: list[int],
    ) -> None:
        """``prompt_ids``: as they came; the request may have only their end."""
        self.request = request
        self.failure: OctavoError | None = None
        self._prompt = prompt
        self._prompt_ids = prompt_ids[-num_ids(request.prompt_ids) :]
        self._tokenizer = tokenizer
        self._choices = [Choice(tokenizer, request, eos_ids) for _ in range(request.params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._timings = RequestTimings(arrival=request.arrival)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    @property
    def open_handles(self) -> list[int]:
        first = self.request.handle
        return [first + i for i, c in enumerate(self._choices) if c.finish_reason is None]

    @property
    def is_read_at_its_end(self) -> bool:
        """Nothing has to be done with a token when it comes: no stop string, no log-probability."""
        params = self.request.params
        return not params.stop and params.logprobs is None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def push(self, handle: int, token: int) -> bool:
        """A drawn token. True when it completes a stop string: the engine may stop."""
        choice = self._choices[handle - self.request.handle]
        if choice.finish_reason is not None:
            return False
        choice.text.push([token])
        if choice.text.stop_string is None:
            return False
        choice.finish_reason = FinishReason.STOP.value
        choice.stop_reason = choice.text.stop_string
        return True

    def extend(self, handle: int, tokens: list[int]) -> None:
        """Drawn tokens of an answer that ``is_read_at_its_end``."""
        self._choices[handle - self.request.handle].text.push(tokens)

    def push_logprobs(self, row: TokenLogprobRow) -> None:
        choice = self._choices[row.handle - self.request.handle]
        if len(choice.logprobs) < len(choice.text.token_ids):
            choice.logprobs.append(candidates(self._tokenizer, row.ids, row.values, row.rank))
            choice.cumulative_logprob += row.values[0]

    def push_prompt_logprobs(self, rows: PromptLogprobRows) -> None:
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None] * len(self._prompt_ids)
        for offset, columns in enumerate(zip(rows.ids, rows.values, rows.ranks)):
            if columns[0]:
                self._prompt_logprobs[rows.start + offset] = candidates(self._tokenizer, *columns)

    def start(self, event: Started) -> None:
        """What choice 0 finds in the cache counts: the others find its blocks."""
        if event.handle == self.request.handle:
            self._num_cached_tokens = event.num_cached_tokens

    def finish(self, event: Finished) -> None:
        choice = self._choices[event.handle - self.request.handle]
        self._timings = event.timings
        if event.reason is FinishReason.ERROR:
            kind = InvalidRequest if event.own_fault else OctavoError
            self.failure = kind(event.message)
        if choice.finish_reason is None:
            choice.text.finish()
            choice.finish_reason, choice.stop_reason = event.reason.value, event.stop_reason

    def reject(self, error: InvalidRequest) -> None:
        self.failure = error
        for choice in self._choices:
            choice.finish_reason = FinishReason.ERROR.value

    def output(self) -> RequestOutput:
        """Everything so far."""
        return RequestOutput(
            self.request.request_id,
            self._prompt,
            self._prompt_ids,
            [self._completion(index, choice) for index, choice in enumerate(self._choices)],
            self.finished,
            self._prompt_logprobs,
            self._num_cached_tokens,
            self._timings,
        )

    def _completion(self, index: int, choice: Choice) -> CompletionOutput:
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index,
            choice.text.text,
            list(choice.text.token_ids),
            choice.cumulative_logprob if asked else None,
            list(choice.logprobs) if asked else None,
            choice.finish_reason,
            choice.stop_reason,
        )


def candidates(
    tokenizer: Tokenizer | None, ids: list[int], values: list[float], rank: int
) -> TokenLogprobs:
    """Column 0 is the token itself, with its rank; the rest are ranks 1, 2, …"""
    ranks = [rank, *range(1, len(ids))]
    found: TokenLogprobs = {}
    for token, value, place in zip(ids, values, ranks):
        text = tokenizer.token_text(token) if tokenizer else None
        found.setdefault(token, Logprob(value, place, text))
    return found


class PromptRequest:
    """A request that draws nothing to be read: what counts is what its prompt gives."""

    is_read_at_its_end = False

    def __init__(self, request: AddRequest) -> None:
        self.request = request
        self.failure: OctavoError | None = None
        self.finished = False

    @property
    def open_handles(self) -> list[int]:
        return [] if self.finished else [self.request.handle]

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def start(self, event: Started) -> None: ...

    def push(self, handle: int, token: int) -> bool:
        return False

    def finish(self, event: Finished) -> None:
        self.finished = True
        if event.reason is FinishReason.ERROR:
            self.failure = OctavoError(event.message)

    def reject(self, error: InvalidRequest) -> None:
        self.finished, self.failure = True, error


class Ranking(PromptRequest):
    """For the most likely tokens after a prompt: a step of a beam search."""

    def __init__(self, request: AddRequest) -> None:
        super().__init__(request)
        self.row: TokenLogprobRow | None = None

    def push_logprobs(self, row: TokenLogprobRow) -> None:
        self.row = row


class Vector(PromptRequest):
    """For a prompt's vector."""

    is_read_at_its_end = True

    def __init__(self, request: AddRequest, prompt_ids: list[int], normalize: bool) -> None:
        """``prompt_ids``: as they came; the request may have only their end."""
        super().__init__(request)
        self._prompt_ids = prompt_ids[-num_ids(request.prompt_ids) :]
        self._normalize = normalize
        self._values: NDArray[np.float64] | None = None
        self._num_cached_tokens = 0

    def start(self, event: Started) -> None:
        self._num_cached_tokens = event.num_cached_tokens

    def set_values(self, pooled: PooledPrompt) -> None:
        self._values = pooled.vector(self._normalize)

    def finish(self, event: Finished) -> None:
        super().finish(event)
        ended = event.reason not in (FinishReason.ERROR, FinishReason.ABORT)
        if self._values is None and ended:
            self.failure = OctavoError("the prompt ended without a vector")

    def output(self) -> EmbeddingRequestOutput:
        """Once it is finished and has not failed."""
        assert self._values is not None
        return EmbeddingRequestOutput(
            self.request.request_id,
            EmbeddingOutput(self._values.tolist()),
            self._prompt_ids,
            self.finished,
            self._num_cached_tokens,
        )


Pending = Answer | Ranking | Vector


class Assembler:
    """Routes each step's outputs to the answers they belong to."""

    def __init__(self) -> None:
        self._answers: dict[int, Pending] = {}  # by handle of each open choice
        self.touched: list[Answer] = []  # by the last ``apply``

    def add(self, answer: Pending) -> None:
        for handle in answer.open_handles:
            self._answers[handle] = answer

    def apply(self, outputs: Outputs) -> list[int]:
        """Returns the handles whose text met a stop string: to be aborted."""
        answers = cast(dict[int, Answer], self._answers)  # vectors draw nothing
        touched: dict[int, Pending] = {}  # by handle of choice 0, in order
        stopped = []
        for handle, token in outputs.pairs():
            answer = answers[handle]
            touched[answer.request.handle] = answer
            if answer.push(handle, token):
                stopped.append(handle)
        for row in outputs.logprobs:
            answers[row.handle].push_logprobs(row)
        self._apply_events(outputs, touched)
        self.touched = [answer for answer in touched.values() if isinstance(answer, Answer)]
        return stopped

    def apply_together(self, steps: Sequence[Outputs]) -> None:
        """The outputs of several steps, in order, at a fraction of the cost: all answers must be
        ``is_read_at_its_end``."""
        answers = cast(dict[int, Answer], self._answers)
        for handle, tokens in _by_handle(steps):
            answers[handle].extend(handle, tokens)
        touched: dict[int, Pending] = {}
        for outputs in steps:
            self._apply_events(outputs, touched)

    def _apply_events(self, outputs: Outputs, touched: dict[int, Pending]) -> None:
        """All but drawn tokens."""
        answers = self._answers
        for started in outputs.started:
            answers[started.handle].start(started)
        for rows in outputs.prompt_logprobs:
            cast(Answer, answers[rows.handle]).push_prompt_logprobs(rows)
        for pooled in outputs.pooled:
            cast(Vector, answers[pooled.handle]).set_values(pooled)
        for event in outputs.finished:
            answer = answers.pop(event.handle)
            touched[answer.request.handle] = answer
            answer.finish(event)
        for rejected in outputs.rejected:
            answer = answers.pop(rejected.handle)
            touched[answer.request.handle] = answer
            answer.reject(InvalidRequest(rejected.message, rejected.param))


def _by_handle(steps: Sequence[Outputs]) -> Iterator[tuple[int, list[int]]]:
    """(handle, its tokens in drawing order) over several steps."""
    handles = np.frombuffer(b"".join([outputs.handles for outputs in steps]), dtype="<i8")
    tokens = np.frombuffer(b"".join([outputs.tokens for outputs in steps]), dtype="<i4")
    if not len(handles):
        return
    order = np.argsort(handles, kind="stable")
    handles = handles[order]
    drawn: list[int] = tokens[order].tolist()
    begins = np.flatnonzero(np.diff(handles, prepend=handles[0] - 1)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(drawn)]):
        yield int(handles[begin]), drawn[begin:end]
