"""The messages between an engine's executor and the processes of its workers (ZMQ + msgpack).
Never imports torch.

Every rank gets the same commands in the same order. ``StepPlan`` and ``StepResult`` have an
encoding of their own (``core.plan``), which travels inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from octavo.grammar.vocabulary import Vocabulary
from octavo.types import StepProfile
from octavo.worker.info import WorkerInfo


class Message(msgspec.Struct, tag=True):
    """Root of the messages; the class name is the tag."""


# ---- executor -> worker ----


class Meet(Message, tag=True):
    """Everybody is there: join at the store that rank 0 holds."""

    host: str
    port: int


class Step(Message, tag=True):
    """``drawn``: what the last stage drew in earlier steps, for stages that did not see it: an
    encoded StepResult each, in order."""

    plan: bytes
    drawn: list[bytes] = []


class UseVocabulary(Message, tag=True):
    vocabulary: Vocabulary


class Prepare(Message, tag=True):
    """A grammar that a request will need."""

    grammar: str


class Release(Message, tag=True):
    grammar: str


class UseIdleMoment(Message, tag=True):
    """As ``Executor.idle``; Idled follows."""


class StartProfile(Message, tag=True):
    directory: str


class StopProfile(Message, tag=True):
    pass


class Beat(Message, tag=True):
    """The executor lives: from other hosts nobody else would tell."""


class Stop(Message, tag=True):
    """End, once what came before is done."""


# ---- worker -> executor ----


class Hello(Message, tag=True):
    """A rank has started. ``facts``: what has to be the same everywhere."""

    rank: int
    host: str
    pid: int
    facts: dict[str, str]


class StoreOpen(Message, tag=True):
    """Rank 0 holds the store at which the others join it."""

    port: int


class Loading(Message, tag=True):
    """Progress, as ``types.Progress`` has it."""

    phase: str
    fraction: float
    num_bytes: int


class Linked(Message, tag=True):
    """The self-test of the group has passed."""

    device: str
    transport: str  # "nccl", "gloo", "shared memory", perhaps with a reason
    small_seconds: float
    bytes_per_second: float


class Loaded(Message, tag=True):
    info: WorkerInfo


class Broken(Message, tag=True):
    """A rank cannot start, or cannot go on. ``user_error``: fit to print as one line."""

    message: str
    user_error: bool = False


class Done(Message, tag=True):
    """A step of the rank that reports."""

    step: int
    result: bytes


class Computed(Message, tag=True):
    """A stage has done its part of a step, and was busy for so long: of its first rank."""

    seconds: float


class StepError(Message, tag=True):
    """A step raised on a rank."""

    step: int
    message: str


class Idled(Message, tag=True):
    """``more``: there was something to do; ``pending``: how often there still is."""

    more: bool
    pending: int


class Profiled(Message, tag=True):
    """An answer to StartProfile or StopProfile. ``error``: why there is no profile."""

    error: str = ""
    profile: StepProfile | None = None


class Alive(Message, tag=True):
    """Every half second, from a thread of its own. ``exchanges``: how many collective operations
    the rank has begun: of ranks that wait for each other, the one with the fewest is behind."""

    exchanges: int


ToWorker = (
    Meet
    | Step
    | UseVocabulary
    | Prepare
    | Release
    | UseIdleMoment
    | StartProfile
    | StopProfile
    | Beat
    | Stop
)
FromWorker = (
    Hello
    | StoreOpen
    | Loading
    | Linked
    | Loaded
    | Broken
    | Done
    | Computed
    | StepError
    | Idled
    | Profiled
    | Alive
)


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


def _path(kind: type, value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} is no part of a message")


encoder = msgspec.msgpack.Encoder(enc_hook=_text)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(
    FromWorker, dec_hook=_path
)
