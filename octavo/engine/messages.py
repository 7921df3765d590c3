"""The messages between an engine and its clients (ZMQ + msgpack, or plain calls in one process).

A request is known by integer handles: choice i of a request with n choices has ``handle + i``. The
bits from ``CLIENT_SHIFT`` on say which client's it is, where there are several.
Times are ``time.monotonic()`` of the engine's host; ``shift`` makes them another's. Never imports
torch.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import Int32
from octavo.grammar.vocabulary import Vocabulary
from octavo.types import FinishReason, Pooling, RequestTimings, SamplingParams

CLIENT_SHIFT = 48
# How a sequence left its engine, beside the finish reasons: refused by it, or begun again on
# another one (it had given nothing yet when this one died or stalled).
REJECTED = "rejected"
RETRIED = "retried"
# What becomes of a prompt's tokens in the queue.
ADMITTED, STARTED, DROPPED = "admitted", "started", "dropped"


def pack_ids(ids: Any) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(raw: bytes) -> Int32:
    return np.frombuffer(raw, dtype="<i4")


def num_ids(raw: bytes) -> int:
    return len(raw) // 4


class Message(msgspec.Struct, tag=True):
    """Root of the wire messages; the class name is the tag."""


# ---- client -> engine ----


class AddRequest(Message, tag=True):
    """A validated request (engine.admission): lengths fit, ids are in the vocabulary."""

    handle: int  # of choice 0
    request_id: str
    prompt_ids: bytes  # pack_ids
    params: SamplingParams
    max_tokens: int  # resolved: never None
    arrival: float
    priority: int = 0
    salt: bytes = b""  # tenant's salt of the prefix cache
    bad_words: list[list[int]] = []
    tenant: bytes = b""  # name of the API key: whose share it is served from
    weight: float = 1.0  # of the tenant's share
    pooling: Pooling | None = None  # the prompt's vector is wanted; max_tokens is 0
    grammar: str = ""  # what the output must match (grammar.compile), checked; "": anything
    grammar_after: str = ""  # the grammar begins behind this text


class SetVocabulary(Message, tag=True):
    """Before the first request with a grammar. Later ones are passed over."""

    vocabulary: Vocabulary


class Abort(Message, tag=True):
    handles: list[int]


class ResetPrefixCache(Message, tag=True):
    call: int


class Hello(Message, tag=True):
    """A client takes its seat; Ready follows, once the model is loaded."""

    client: int


class Bye(Message, tag=True):
    """A client has gone: its requests are dropped, and nothing more is sent to it."""

    client: int


class Drain(Message, tag=True):
    """Finish what runs; nothing new will come. The engine process ends after its last output."""


# ---- engine -> client ----


class Progress(Message, tag=True):
    """A phase of start-up began, or moved on (as ``types.Progress`` has it)."""

    phase: str
    fraction: float = -1.0
    num_bytes: int = 0


class EngineInfo(msgspec.Struct):
    """What was found while starting: the facts a configuration cannot hold."""

    model: str
    architecture: str
    dtype: str
    device: str  # for people: "cpu", "cuda:0 NVIDIA H200"
    threads: int
    vocab_size: int  # ids below this may be sent
    max_model_len: int
    eos_ids: list[int]
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    implementations: dict[str, str]  # operation -> chosen version
    startup_seconds: dict[str, float]  # phase -> seconds
    reasons: dict[str, str]  # setting -> why it has the value it has, for those not asked for
    default_sampling: dict[str, Any] = {}  # from generation_config.json
    device_kind: str = "cpu"  # for code: "cpu" or "cuda"
    hidden_size: int = 0  # values of a prompt's vector


class Ready(Message, tag=True):
    """``engine``: a number that an engine which is later started in its place does not have."""

    info: EngineInfo
    engine: int = 0


class Started(msgspec.Struct, array_like=True):
    """A request was scheduled for the first time."""

    handle: int
    time: float
    num_cached_tokens: int


class Finished(msgspec.Struct, array_like=True):
    handle: int
    reason: FinishReason
    stop_reason: int | None  # the stop id; None for EOS
    timings: RequestTimings
    num_preemptions: int = 0
    message: str = ""  # for FinishReason.ERROR
    own_fault: bool = False  # the request's: what it asks for cannot go on; else a step failed
    num_drafts: int = 0  # guesses that were computed for it
    num_accepted_drafts: int = 0  # … and that were right


class Rejected(msgspec.Struct, array_like=True):
    """Refused at admission: nothing was computed."""

    handle: int
    message: str
    param: str | None


class TokenLogprobRow(msgspec.Struct, array_like=True):
    """Of one token of one handle: the token first, then the most likely ones."""

    handle: int
    ids: list[int]
    values: list[float]
    rank: int


class PromptLogprobRows(msgspec.Struct, array_like=True):
    """Of prompt positions ``start`` .. of one handle; same columns as TokenLogprobRow."""

    handle: int
    start: int
    ids: list[list[int]]
    values: list[list[float]]
    ranks: list[int]


class PooledPrompt(msgspec.Struct, array_like=True):
    """The vector of one handle's prompt: float32 [hidden]."""

    handle: int
    values: bytes

    def vector(self, normalize: bool) -> NDArray[np.float64]:
        """[hidden]; ``normalize``: of length 1."""
        vector = np.frombuffer(self.values, dtype="<f4").astype(np.float64)
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector


class EngineStats(msgspec.Struct, array_like=True):
    """Live state and running totals after a step."""

    time: float
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefix_queries: int = 0  # tokens looked up, ever
    prefix_hits: int = 0  # tokens found, ever
    num_preemptions: int = 0
    num_copies: int = 0  # copy-on-write block copies, ever
    prompt_tokens: int = 0  # prompt tokens of started requests, ever
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed by this step
    step_seconds: float = 0.0  # of this step: what a token takes; through all stages of a pipeline
    schedule_seconds: float = 0.0  # of this step: schedule + update
    fragmentation: float = 0.0  # share of the used blocks' token places that hold no token
    graphs_pending: int = 0  # CUDA graphs that idle moments have yet to capture
    stage_busy_seconds: list[float] = []  # that each stage of a pipeline computed, ever
    work_seconds: float = 0.0  # in which a plan was in flight and its stages were measured, ever
    bubble: float = 0.0  # share of their time in which stages of late had nothing to compute
    num_drafts: int = 0  # what one sequence brought to one step, of at least one guess; ever
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    drafted_at: list[int] = []  # guesses by their place in a draft, ever
    accepted_at: list[int] = []
    draft_length: float = 0.0  # guesses that a sequence may bring to a step now
    saved_seconds: float = 0.0  # against steps without guesses that draw as many tokens, ever


class Outputs(Message, tag=True):
    """All that one step gave to this client. tokens[i] belongs to handles[i], in order."""

    stats: EngineStats
    handles: bytes = b""  # int64
    tokens: bytes = b""  # int32
    started: list[Started] = []
    finished: list[Finished] = []
    rejected: list[Rejected] = []
    logprobs: list[TokenLogprobRow] = []  # in the order of ``tokens``
    prompt_logprobs: list[PromptLogprobRows] = []
    pooled: list[PooledPrompt] = []

    def of_client(self, client: int) -> Outputs:
        """The part of one client; the statistics are everybody's."""
        handles = np.frombuffer(self.handles, dtype="<i8")
        own = handles >> CLIENT_SHIFT == client

        def part(rows: list[Any]) -> list[Any]:
            return [row for row in rows if row.handle >> CLIENT_SHIFT == client]

        return Outputs(
            self.stats,
            handles[own].tobytes(),
            np.frombuffer(self.tokens, dtype="<i4")[own].tobytes(),
            started=part(self.started),
            finished=part(self.finished),
            rejected=part(self.rejected),
            logprobs=part(self.logprobs),
            prompt_logprobs=part(self.prompt_logprobs),
            pooled=part(self.pooled),
        )

    def pairs(self) -> list[tuple[int, int]]:
        """(handle, token id) in drawing order."""
        handles = np.frombuffer(self.handles, dtype="<i8").tolist()
        return list(zip(handles, np.frombuffer(self.tokens, dtype="<i4").tolist()))


class PrefixCacheReset(Message, tag=True):
    call: int
    success: bool


class Failed(Message, tag=True):
    """The engine cannot go on (or could not start). ``user_error``: fit to print as one line."""

    message: str
    user_error: bool = False


class Heartbeat(Message, tag=True):
    """Every 0.5 s from a thread of its own. ``step_age``: seconds the running step has taken.
    ``problem``: what keeps it from going on, if that is known."""

    time: float
    step: int
    step_age: float
    problem: str = ""


def shift(outputs: Outputs, offset: float) -> None:
    """Moves all times by ``offset`` seconds: from the clock of the engine's host to another's."""
    outputs.stats.time += offset
    for started in outputs.started:
        started.time += offset
    for finished in outputs.finished:
        old = finished.timings
        finished.timings = RequestTimings(
            *(
                time if time == -1.0 else time + offset  # -1.0: it has not happened
                for time in (old.arrival, old.first_scheduled, old.first_token, old.last_token)
            )
        )


ToEngine = AddRequest | SetVocabulary | Abort | ResetPrefixCache | Hello | Bye | Drain
FromEngine = Progress | Ready | Outputs | PrefixCacheReset | Failed | Heartbeat

encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
