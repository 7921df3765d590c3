"""What is checked before a request reaches an engine, and how long the queue may get.

``prepare`` turns a prompt and its parameters into an ``AddRequest`` that every engine can run: a
bad request fails here, alone, with a message that names the field. ``QueueGate`` bounds what waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.config import SchedulerConfig
from octavo.core.request import worst_case_blocks
from octavo.engine.messages import AddRequest, EngineInfo, pack_ids
from octavo.types import TOO_LONG, InvalidRequest, Pooling, QueueFull, SamplingParams

# float32 logits divided or multiplied by more than this could overflow on the device.
REPETITION_PENALTY_RANGE = (1e-3, 1e3)
INT32 = 2**31
EMPTY = np.zeros(0, dtype=np.int64)


def prepare(
    info: EngineInfo,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    *,
    handle: int,
    request_id: str,
    arrival: float,
    max_logprobs: int = 20,
    priority: int = 0,
    salt: bytes = b"",
    tenant: bytes = b"",
    weight: float = 1.0,
    bad_words: list[list[int]] | None = None,
    grammar: str = "",
) -> AddRequest:
    """A request that fits ``info``'s engine, with ``max_tokens`` resolved and the prompt truncated
    if the client asked for it. ``bad_words``: token id sequences made from ``params.bad_words``;
    ``grammar``: the text made from ``params.structured_outputs``.

    Raises InvalidRequest, naming the field, when it can never run.
    """
    params.validate()
    _check_parameters(info, params, max_logprobs, priority)
    ids = _checked_ids(info, prompt_ids)
    ids = _truncated(info, params, ids)
    if not len(ids):
        raise InvalidRequest(
            "the prompt is empty, and no beginning-of-sequence token is put before it: send at "
            "least one token",
            "prompt",
        )
    max_tokens = _resolved_max_tokens(info, params, len(ids))
    structured = params.structured_outputs
    if structured is not None and not grammar:
        raise ValueError("structured_outputs were not compiled to a grammar")
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can be generated",
            "min_tokens",
        )
    return AddRequest(
        handle=handle,
        request_id=request_id,
        prompt_ids=pack_ids(ids),
        params=params.settled(
            max_tokens=max_tokens,
            top_k=min(params.top_k, info.vocab_size),
            truncate_prompt_tokens=None,
            structured_outputs=None,
        ),
        max_tokens=max_tokens,
        arrival=arrival,
        priority=priority,
        salt=salt,
        tenant=tenant,
        weight=weight,
        bad_words=[_bad_word(info, word) for word in bad_words or []],
        grammar=grammar,
        grammar_after=(structured.after or "") if grammar and structured else "",
    )


def prepare_embedding(
    info: EngineInfo,
    prompt_ids: Sequence[int],
    pooling: str,
    *,
    handle: int,
    request_id: str,
    arrival: float,
    truncate_prompt_tokens: int | None = None,
    priority: int = 0,
    salt: bytes = b"",
    tenant: bytes = b"",
    weight: float = 1.0,
) -> AddRequest:
    """A request for a prompt's vector. ``truncate_prompt_tokens`` keeps the last so many tokens; -1
    as many as the model takes. Raises InvalidRequest, naming the field, when it can never run."""
    if pooling not in (kinds := [kind.value for kind in Pooling]):
        raise InvalidRequest(f"pooling is {pooling!r}; it must be {' or '.join(kinds)}", "pooling")
    keep = info.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    params = SamplingParams(max_tokens=0, truncate_prompt_tokens=keep)
    params.validate()
    _check_priority(priority)
    ids = _truncated(info, params, _checked_ids(info, prompt_ids))
    if not len(ids):
        raise InvalidRequest("the prompt is empty: send at least one token", "prompt")
    places = info.num_blocks * info.block_size
    limit = min(info.max_model_len, places)
    if len(ids) > limit:
        what = "the whole KV cache"
        if limit == info.max_model_len:
            what = "this model's maximum context length"
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, {what} is {limit} tokens: shorten the prompt, or "
            "set truncate_prompt_tokens",
            "prompt",
            TOO_LONG,
        )
    return AddRequest(
        handle=handle,
        request_id=request_id,
        prompt_ids=pack_ids(ids),
        params=params.settled(truncate_prompt_tokens=None),
        max_tokens=0,
        arrival=arrival,
        priority=priority,
        salt=salt,
        tenant=tenant,
        weight=weight,
        pooling=Pooling(pooling),
    )


def _check_parameters(
    info: EngineInfo, params: SamplingParams, max_logprobs: int, priority: int
) -> None:
    low, high = REPETITION_PENALTY_RANGE
    if not low <= params.repetition_penalty <= high:
        raise InvalidRequest(
            f"repetition_penalty is {params.repetition_penalty:g}; it must be in "
            f"[{low:g}, {high:g}]",
            "repetition_penalty",
        )
    if params.n > info.max_num_seqs:
        raise InvalidRequest(
            f"n is {params.n}, but this server runs at most {info.max_num_seqs} sequences at once "
            "(--max-num-seqs)",
            "n",
        )
    _check_priority(priority)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        tokens = getattr(params, name) or ()
        if len(tokens) > info.vocab_size:
            raise InvalidRequest(
                f"{name} names {len(tokens)} tokens; the vocabulary has {info.vocab_size}", name
            )
        for token in tokens:
            if not 0 <= token < info.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {token}; the vocabulary has ids 0 to "
                    f"{info.vocab_size - 1}",
                    name,
                )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is None or max_logprobs == -1:
            continue
        if wanted == -1 or wanted > max_logprobs:
            asked = "the whole vocabulary" if wanted == -1 else str(wanted)
            raise InvalidRequest(
                f"{name} asks for {asked}, this server returns at most {max_logprobs} "
                "(--max-logprobs)",
                name,
            )


def _check_priority(priority: int) -> None:
    if not -INT32 <= priority < INT32:
        raise InvalidRequest(f"priority is {priority}; it must be a 32-bit integer", "priority")


def _checked_ids(info: EngineInfo, prompt_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    ids = _as_array(prompt_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(
            f"the prompt is not a list of token ids (integers from 0 to {info.vocab_size - 1})",
            "prompt",
        )
    outside = (ids < 0) | (ids >= info.vocab_size)
    if outside.any():
        where = int(outside.argmax())
        raise InvalidRequest(
            f"token id {int(ids[where])} at position {where} of the prompt is outside the "
            f"vocabulary (ids 0 to {info.vocab_size - 1})",
            "prompt",
        )
    return ids


def _as_array(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Whatever was sent; of no dimension where it cannot be an array of numbers."""
    if not len(ids):
        return EMPTY
    if isinstance(ids, list) and type(ids[0]) is int:
        try:
            return np.frombuffer(array("q", ids), dtype=np.int64)  # one pass; NumPy takes two
        except (TypeError, OverflowError):
            pass
    try:
        return np.asarray(ids)
    except ValueError:  # lists of several lengths
        return np.zeros(())


def _truncated(
    info: EngineInfo, params: SamplingParams, ids: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The last ``truncate_prompt_tokens`` ids; -1 keeps as many as leave room for max_tokens."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        keep = max(1, info.max_model_len - (params.max_tokens or 1))
    if not 1 <= keep <= info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {keep}; it must be -1 or 1 to {info.max_model_len}, this "
            "model's length",
            "truncate_prompt_tokens",
        )
    return ids[-keep:]


def _resolved_max_tokens(info: EngineInfo, params: SamplingParams, prompt_len: int) -> int:
    """max_tokens as asked for, or all that fits. Raises InvalidRequest if it does not fit."""
    limit = info.max_model_len
    if prompt_len >= limit:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, this model's maximum context length is {limit} "
            "tokens for prompt and output together: shorten the prompt, or set "
            "truncate_prompt_tokens",
            "prompt",
            TOO_LONG,
        )
    shared = prompt_len // info.block_size
    places = (info.num_blocks - shared) // params.n * info.block_size
    in_pool = places - (prompt_len - shared * info.block_size)
    if params.max_tokens is None:
        max_tokens = min(limit - prompt_len, in_pool)
    else:
        max_tokens = params.max_tokens
        if max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1", "max_tokens")
    if prompt_len + max_tokens > limit:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}: together "
            f"{prompt_len + max_tokens}; this model's maximum context length is {limit} tokens: "
            f"lower max_tokens to {limit - prompt_len} or shorten the prompt",
            "max_tokens",
            TOO_LONG if max_tokens < limit else "invalid_request",  # no prompt is short enough
        )
    if max_tokens < 1 or max_tokens > in_pool:
        needed = worst_case_blocks(prompt_len, max(1, max_tokens), params.n, info.block_size)
        raise InvalidRequest(
            f"the request may need {needed} KV cache blocks ({prompt_len} prompt tokens, n = "
            f"{params.n}, {max(1, max_tokens)} output tokens each), the whole cache has "
            f"{info.num_blocks}: lower max_tokens or n, or give the server more "
            "--kv-cache-memory-bytes",
            "max_tokens",
        )
    return max_tokens


def _bad_word(info: EngineInfo, word: list[int]) -> list[int]:
    if not word or any(not 0 <= token < info.vocab_size for token in word):
        raise InvalidRequest(
            f"bad_words holds a word whose tokens {word} are not all in the vocabulary "
            f"(ids 0 to {info.vocab_size - 1})",
            "bad_words",
        )
    return word


def too_many_prompts(num_requests: int, limit: int) -> InvalidRequest:
    """What a request holds that could not wait even if it were the only one."""
    return InvalidRequest(
        f"prompt holds {num_requests} prompts, this server queues at most {limit} "
        "(--max-num-queued-reqs): send fewer at once",
        "prompt",
    )


class QueueGate:
    """Bounds of the waiting queue, in requests, prompt tokens and predicted seconds.

    The prediction divides the tokens that wait by the measured rate at which waiting tokens were
    started while anything waited; both sides of the rate fade with a half-life. All times are
    ``time.monotonic()`` seconds and passed in. ``share``: how many such gates an engine has; each
    lets in its part.
    """

    HALF_LIFE = 30.0
    EVIDENCE = 1.0  # seconds of waiting that must have been seen before a prediction is made

    def __init__(self, config: SchedulerConfig, max_num_seqs: int, share: int = 1) -> None:
        limit = config.max_num_queued_reqs
        self.max_requests = -(-(4 * max_num_seqs if limit is None else limit) // share)
        self.max_tokens = -(-config.max_num_queued_tokens // share)
        self.max_wait = config.max_queue_wait
        self.num_requests = 0
        self.num_tokens = 0
        self._started_tokens = 0.0
        self._waited_seconds = 0.0
        self._updated = 0.0

    def enter(self, num_tokens: int, now: float) -> None:
        self._advance(now)
        self.num_requests += 1
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int, now: float, started: bool) -> None:
        """A request started, or was aborted or rejected while it waited."""
        self._advance(now)
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if started:
            self._started_tokens += num_tokens

    def predicted_wait(self, now: float) -> float:
        """Seconds until what waits now has started; 0.0 while there is nothing to predict from."""
        self._advance(now)
        if self._waited_seconds < self.EVIDENCE or self._started_tokens < 1:
            return 0.0
        return self.num_tokens * self._waited_seconds / self._started_tokens

    def check(
        self,
        num_requests: int,
        num_tokens: int,
        now: float,
        num_free_slots: int = 0,
        place_wait: float = 0.0,
    ) -> None:
        """Raises QueueFull if so much more may not wait. Requests that the engine's free places
        can take at once do not count as queued. ``place_wait``: predicted seconds until there is a
        place (``forecast``)."""
        limit = self.max_requests + max(0, num_free_slots)
        if num_requests > max(1, limit):
            raise too_many_prompts(num_requests, limit)
        wait = max(place_wait, self.predicted_wait(now))
        if self.num_requests:
            self._check_room(num_requests, num_tokens, limit, min(60.0, max(1.0, wait / 2)))
        if wait > self.max_wait:
            raise QueueFull(
                f"the predicted wait is {wait:.1f} s, above {self.max_wait:g} s "
                "(--max-queue-wait); try again later",
                max(1.0, min(60.0, wait - self.max_wait)),
            )

    def _check_room(self, num_requests: int, num_tokens: int, limit: int, retry: float) -> None:
        """Beside what waits already: one request may always wait."""
        if self.num_requests + num_requests > limit:
            raise QueueFull(
                f"{self.num_requests} requests are waiting, at most {self.max_requests} may "
                "(--max-num-queued-reqs); try again later",
                retry,
            )
        if self.num_tokens + num_tokens > self.max_tokens:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting, with this request "
                f"{self.num_tokens + num_tokens}; at most {self.max_tokens} may "
                "(--max-num-queued-tokens); try again later",
                retry,
            )

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._updated)
        self._updated = now
        if self.num_requests:
            fade = 0.5 ** (elapsed / self.HALF_LIFE)
            self._started_tokens *= fade
            self._waited_seconds = self._waited_seconds * fade + elapsed
