"""StepPlan and StepResult: everything that passes between an engine and its workers.

Both are columns, one entry per scheduled row. They are encoded in one way (``encode``, ``decode``:
a msgpack header, then raw little-endian buffers) for replay files, shared memory and TCP.

There are no phases: a row computes ``num_tokens[i]`` tokens of its request from position
``starts[i]`` on. The ids come from the slot's token history in the worker, where ``NewRequest``
put those known at admission and where every drawn token is appended: a row therefore never has to
wait until the ids of an earlier plan have reached the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.types import Pooling, SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

SAMPLE = np.uint8(1)  # the row ends at its request's last token: draw the next one
PROMPT_LOGPROBS = np.uint8(2)  # log-probabilities of the row's own tokens are wanted
POOL = np.uint8(4)  # the row's hidden states go into its request's vector (NewRequest.pooling)


@dataclass(slots=True)
class NewRequest:
    """A request that takes a slot in this plan (first admission, or return after preemption)."""

    slot: int
    prompt_len: int  # tokens that came from the client; the rest of its ids are earlier output
    params: SamplingParams
    seed: int  # 64 bit, unsigned; already resolved when the client gave none
    min_stop_ids: list[int] = field(default_factory=list)  # banned until min_tokens are out
    bad_words: list[list[int]] = field(default_factory=list)  # token id sequences never completed
    pooling: Pooling | None = None  # no token is drawn: the prompt's vector is wanted
    grammar: str = ""  # what the output must match; "": anything
    grammar_after: str = ""  # the grammar begins behind this text


@dataclass(slots=True)
class StepPlan:
    """One step. n rows, r new requests, f freed slots, c block copies.

    The worker applies it in this order: free slots, place new requests, set block table entries,
    copy blocks, compute, draw, append drawn tokens to the histories.
    """

    step: int
    slots: Int32  # [n] one row per slot, no slot twice
    num_tokens: Int32  # [n] tokens to compute, >= 1, with the guesses that the row may bring
    starts: Int32  # [n] position of the first of them; under speculation, of rows with SAMPLE the
    # most it can be: the row's known tokens end where its history does
    flags: NDArray[np.uint8]  # [n] SAMPLE | PROMPT_LOGPROBS | POOL
    block_starts: Int32  # [n] index in the slot's block table where the row's new ids go
    block_indptr: Int32  # [n + 1] CSR into block_ids
    block_ids: Int32  # [m]
    freed_slots: Int32  # [f] released before anything else
    copies: Int32  # [c, 2] source block, destination block
    new_requests: list[NewRequest]  # [r]
    new_indptr: Int32  # [r + 1] CSR into new_token_ids
    new_token_ids: Int32  # all ids known so far of each new request
    num_drafts: Int32 | None = None  # [n] most guesses of each row; None without speculation

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_known(self) -> Int32:
        """[n] tokens to compute without guesses."""
        return self.num_tokens if self.num_drafts is None else self.num_tokens - self.num_drafts

    @property
    def most_drafts(self) -> int:
        """Of any row."""
        return 0 if self.num_drafts is None else int(self.num_drafts.max(initial=0))

    @property
    def total_tokens(self) -> int:
        return int(np.add.reduce(self.num_tokens))


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of q tokens. Column 0 is the token itself, then the k most likely."""

    ids: Int32  # [q, k + 1]; -1 pads where a row asked for fewer
    values: Float32  # [q, k + 1], raw model log-probabilities (before any processing)
    ranks: Int32  # [q] rank of column 0, 1 = most likely


@dataclass(slots=True)
class StepResult:
    """What a step drew, in the row order of its plan."""

    step: int
    tokens: Int32  # [n, k + 1]; row i holds num_accepted[i] tokens, k = 0 without speculation
    num_accepted: Int32  # [n] 0 for rows without SAMPLE
    logprob_rows: Int32  # [q] the rows that ``logprobs`` describes, once for each of their tokens
    logprobs: Logprobs | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # row -> for each of its
    # tokens the log-probability of the token that follows it (none after the prompt's last)
    pooled: dict[int, Float32] = field(default_factory=dict)  # row -> vector [hidden], of the rows
    # with POOL that hold their prompt's last token
    grammar_ends: dict[int, str] = field(default_factory=dict)  # row -> "" where the output is
    # complete: nothing may follow; else why it cannot go on (then the row accepted no token)
    busy_seconds: Float32 | None = None  # [stages] that each stage of a pipeline computed the step,
    # without what it waited for others; None where nobody measured
    num_drafted: Int32 | None = None  # [n] guesses that were computed; None without speculation


def laid_out(counts: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Row and place in it of each of sum(counts) items, where row i has ``counts[i]`` [n] of
    them."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)


T = TypeVar("T", StepPlan, StepResult)


def encode(item: StepPlan | StepResult) -> bytes:
    """Header and buffers in one byte string; ``decode`` gives an equal object back."""
    buffers: list[bytes] = []

    def strip(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            buffers.append(np.ascontiguousarray(value).tobytes())
            return {"_dtype": value.dtype.str, "_shape": value.shape, "_index": len(buffers) - 1}
        if isinstance(value, Logprobs):
            return [strip(value.ids), strip(value.values), strip(value.ranks)]
        if isinstance(value, dict):
            return {str(key): strip(entry) for key, entry in value.items()}
        return value

    header = {f.name: strip(getattr(item, f.name)) for f in fields(item)}
    lengths = [len(b) for b in buffers]
    head = msgspec.msgpack.encode([type(item).__name__, lengths, header])
    return b"".join([len(head).to_bytes(4, "little"), head, *buffers])


def decode(data: bytes, kind: type[T]) -> T:
    """Inverse of ``encode``. Raises ValueError for another kind of message."""
    size = int.from_bytes(data[:4], "little")
    name: str
    lengths: list[int]
    header: dict[str, Any]
    name, lengths, header = msgspec.msgpack.decode(data[4 : 4 + size])
    if name != kind.__name__:
        raise ValueError(f"expected an encoded {kind.__name__}, got {name}")
    ends = 4 + size + np.cumsum([0, *lengths])

    def array(entry: dict[str, Any]) -> NDArray[Any]:
        raw = data[ends[entry["_index"]] : ends[entry["_index"] + 1]]
        return np.frombuffer(raw, dtype=entry["_dtype"]).reshape(entry["_shape"])

    def fill(value: Any) -> Any:
        return array(value) if isinstance(value, dict) and "_dtype" in value else value

    values = {key: fill(value) for key, value in header.items()}
    if kind is StepPlan:
        values["new_requests"] = msgspec.convert(values["new_requests"], list[NewRequest])
    else:
        raw = values["logprobs"]
        values["logprobs"] = Logprobs(*map(array, raw)) if raw else None
        values["prompt_logprobs"] = {
            int(row): Logprobs(*map(array, entry))
            for row, entry in values["prompt_logprobs"].items()
        }
        told = values["grammar_ends"].items()
        values["grammar_ends"] = {int(row): message for row, message in told}
        values["pooled"] = {int(row): array(entry) for row, entry in values["pooled"].items()}
    return kind(**values)
