"""Request: one sequence from arrival to its end, apart from what a slot holds while it runs."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np

from octavo.core.block_pool import PrefixKeys
from octavo.core.plan import Int32
from octavo.types import FinishReason, Pooling, RequestTimings, SamplingParams


class State(Enum):
    PREPARING = "preparing"  # its grammar is being compiled; the scheduler does not have it yet
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a slot
    FINISHED = "finished"


class Request:
    """One choice of a client's request.

    With ``pooling`` it draws nothing (``max_len`` is the prompt's): its vector is the answer.
    ``tokens`` holds prompt and output ids while the request has no slot; while it runs, the slot's
    row of ``Running.tokens`` does. ``max_len`` is prompt + max_tokens, never above the model's.
    """

    __slots__ = (
        "arrival",
        "awaited_key",
        "bad_words",
        "blocks",
        "chain",
        "finish_reason",
        "grammar",
        "grammar_after",
        "handle",
        "in_flight",
        "max_len",
        "message",
        "num_accepted_drafts",
        "num_cached_tokens",
        "num_charged",
        "num_drafts",
        "num_preemptions",
        "num_registered",
        "own_fault",
        "params",
        "pending_keys",
        "pooling",
        "priority",
        "prompt_len",
        "request_id",
        "seed",
        "sequence",
        "slot",
        "state",
        "stop_ids",
        "stop_reason",
        "tenant",
        "timings",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        handle: int,
        prompt_ids: Int32,
        params: SamplingParams,
        max_tokens: int,
        *,
        request_id: str = "",
        seed: int = 0,
        priority: int = 0,
        arrival: float = 0.0,
        chain: PrefixKeys,
        bad_words: list[list[int]] | None = None,
        pooling: Pooling | None = None,
        tenant: bytes = b"",
        weight: float = 1.0,
        grammar: str = "",
        grammar_after: str = "",
    ) -> None:
        self.handle = handle
        self.request_id = request_id or str(handle)
        self.params = params
        self.seed = seed
        self.priority = priority
        self.arrival = arrival
        self.sequence = -1  # order of arrival, given by the scheduler
        self.prompt_len = len(prompt_ids)
        self.tokens = np.array(prompt_ids, dtype=np.int32)
        self.max_len = self.prompt_len + max_tokens
        self.bad_words = bad_words or []
        self.pooling = pooling
        self.grammar = grammar
        self.grammar_after = grammar_after
        self.stop_ids = frozenset(params.stop_token_ids)
        self.chain = chain
        self.blocks: list[int] = []
        self.num_registered = 0  # blocks of the table whose content is in the pool's index
        self.pending_keys: list[bytes] = []  # what this request is computing for others to wait on
        self.awaited_key: bytes | None = None  # what a running request computes for this one
        self.slot = -1
        self.in_flight = 0  # results still to come for a preempted request
        self.state = State.WAITING
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_drafts = 0  # guesses that were computed for it
        self.num_accepted_drafts = 0  # … and that were right
        self.tenant, self.weight = tenant, weight
        self.num_charged = 0  # of its tokens, while it runs (core.fair)
        self.timings = RequestTimings(arrival=arrival)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.message = ""  # why it ended, for FinishReason.ERROR
        self.own_fault = False  # what it asks for cannot go on; else a step failed

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks serve it: not where something is wanted of every prompt token."""
        return self.params.prompt_logprobs is None and self.pooling is not Pooling.MEAN

    @property
    def num_output(self) -> int:
        """Output tokens known; exact only while the request has no slot."""
        return len(self.tokens) - self.prompt_len

    def append(self, token: int) -> None:
        """A token drawn by a plan that was in flight when the request lost its slot."""
        self.tokens = np.append(self.tokens, np.int32(token))

    def ending(
        self, token: int, length: int, eos_ids: list[int]
    ) -> tuple[FinishReason, int | None] | None:
        """(reason, stop id) if the request ends with this token as its ``length``-th; the order is
        min_tokens, EOS, stop ids, length. Stop strings are found in text, not here."""
        if length > self.prompt_len + self.params.min_tokens:
            if token in eos_ids and not self.params.ignore_eos:
                return FinishReason.STOP, None
            if token in self.stop_ids:
                return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if length >= self.max_len else None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.value}, {len(self.tokens)}/{self.max_len})"


def worst_case_blocks(prompt_len: int, max_tokens: int, n: int, block_size: int) -> int:
    """Most blocks a request can come to hold: full prompt blocks are shared by its n choices, each
    choice has its own copy of the partial one and its own output blocks."""
    shared = prompt_len // block_size
    return shared + n * (math.ceil((prompt_len + max_tokens) / block_size) - shared)
