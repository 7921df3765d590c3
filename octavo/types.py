"""Public data types and errors. Standard library only: importable everywhere, at no cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

# Of ``stop`` and of ``bad_words``: each string costs a step of every token's processing.
MOST_STRINGS = 1024
MOST_CHARACTERS = 65536
# ``InvalidRequest.code`` of prompts that do not fit: clients shorten theirs when they see it or the
# words "this model's maximum context length is".
TOO_LONG = "context_length_exceeded"
MOST_SHOWN = 200  # characters of a refused value in a message
MOST_LENGTH_PENALTY = 10.0  # beyond it the powers of lengths leave the range of floats


class OctavoError(Exception):
    """Root of every error octavo raises on purpose; its text is fit to be shown to a user."""


class ConfigError(OctavoError):
    """A flag, file or model cannot be used. The command line prints it in one line and exits 2."""


class InvalidRequest(OctavoError):
    """A request that cannot be served (HTTP 400). ``param`` names the field at fault; ``code``
    tells programs what kind of fault it is."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_request"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(OctavoError):
    """The waiting queue is at its bound (HTTP 429). ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(OctavoError):
    """The engine is gone, hung, loading or draining (HTTP 503)."""


class EngineLost(EngineDead):
    """The engine died or stopped answering while it had the request; another may take it."""


class StepFailed(OctavoError):
    """An exception inside a worker's step, in place of the step's result."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class Progress(Protocol):
    """Told how far long work has come: the phase that is under way, and the share of it that is
    done (0..1; -1 unknown). ``num_bytes``: what the whole phase moves; 0: not counted in bytes."""

    def __call__(self, phase: str, fraction: float, num_bytes: int = 0, /) -> None: ...


class FinishReason(str, Enum):
    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left or cancelled
    ERROR = "error"  # a failed step; the message is in the output


class Pooling(str, Enum):
    """How the hidden states of a prompt's tokens, after the final norm, become one vector."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # of all tokens, the mean


@dataclass(slots=True)
class StructuredOutputsParams:
    """What the output must match; names as in vLLM (docs/structured-output.md).

    Exactly one constraint: ``json`` (a JSON schema, as an object or its text), ``regex``,
    ``choice`` (one of these strings), ``grammar`` (Lark), ``json_object`` (any JSON object) or
    ``structural_tag`` (free text with constrained parts). White space between the tokens of JSON
    is bounded; ``disable_any_whitespace`` allows none, ``whitespace_pattern`` is a regex for what
    may stand at each place. ``after``: the constraint begins behind the first occurrence of this
    text in the output, and until then the output is free, but may not end.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return self._set()[0]

    def validate(self) -> None:
        """Raises InvalidRequest naming the field of another type, or for none or several
        constraints."""
        for name, types, wanted in _CONSTRAINTS:
            value = getattr(self, name)
            ok = value is None or isinstance(value, types)
            _check(ok, f"structured_outputs.{name}", value, wanted)
        found = self._set()
        if len(found) != 1:
            names = ", ".join(name for name, _, _ in _CONSTRAINTS)
            raise InvalidRequest(
                f"structured_outputs sets {' and '.join(found) or 'no constraint'}; it must set "
                f"exactly one of {names}",
                "structured_outputs",
            )
        if self.choice is not None:
            texts = bool(self.choice) and all(isinstance(t, str) and t for t in self.choice)
            _check(texts, "structured_outputs.choice", self.choice, "a list of non-empty strings")
        if self.after is not None:
            fit = isinstance(self.after, str) and self.after != ""
            _check(fit, "structured_outputs.after", self.after, "a non-empty string")
        if self.whitespace_pattern is not None:
            pattern, name = self.whitespace_pattern, "structured_outputs.whitespace_pattern"
            _check(isinstance(pattern, str), name, pattern, "a regex")

    def _set(self) -> list[str]:
        values = ((name, getattr(self, name)) for name, _, _ in _CONSTRAINTS)
        return [name for name, value in values if value is not None and value is not False]


_CONSTRAINTS: tuple[tuple[str, Any, str], ...] = (
    ("json", (str, dict), "a JSON schema: an object, or its text"),
    ("regex", str, "a string"),
    ("choice", list, "a list of non-empty strings"),
    ("grammar", str, "a Lark grammar, as a string"),
    ("json_object", bool, "true or false"),
    ("structural_tag", (str, dict), "an object, or its text"),
)


@dataclass(slots=True)
class SamplingParams:
    """How to draw tokens; names, defaults and order of application as in vLLM (docs/sampling.md).

    ``temperature`` below 1e-5 is greedy. ``max_tokens`` None means all that fits. ``top_k`` 0 or -1
    switches it off. ``seed`` None draws a seed from the server's seed and the request id.
    ``logprobs`` k returns the drawn token and the k most likely; -1 means the whole vocabulary.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.validate()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with ``changes``, checked."""
        return replace(self, **changes)

    def settled(self, **changes: Any) -> SamplingParams:
        """A copy of checked parameters with ``changes`` known to be good: ten times as fast."""
        copy = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            setattr(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field of another type or out of range."""
        for name in _INTEGERS:
            value = getattr(self, name)
            _check(_is_integer(value), name, value, "an integer")
        for name in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            _check(value is None or _is_integer(value), name, value, "an integer or None")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            tokens = getattr(self, name)
            if tokens:
                _check(all(map(_is_integer, tokens)), name, tokens, "made of integer token ids")
        for name in ("stop", "bad_words"):
            if texts := getattr(self, name):
                _check(all(isinstance(text, str) for text in texts), name, texts, "made of strings")
        _check(self.n >= 1, "n", self.n, "at least 1")
        _range("temperature", self.temperature, 0.0, 2.0)
        _range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or a positive integer")
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check(
            _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number above 0",
        )
        if self.max_tokens is not None:
            _check(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 1")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens"
            )
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= -1, name, value, "-1 (all), 0 or a positive integer")
        if self.stop:
            _check_strings("stop", self.stop)
        if self.bad_words:
            _check_strings("bad_words", self.bad_words)
        for token, bias in (self.logit_bias or {}).items():
            _range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty", "allowed_token_ids")
        if self.structured_outputs is not None:
            given = self.structured_outputs
            kind = isinstance(given, StructuredOutputsParams)
            _check(kind, "structured_outputs", given, "a StructuredOutputsParams")
            given.validate()


@dataclass(slots=True)
class BeamSearchParams:
    """A beam search: ``beam_width`` continuations by their log-probability, nothing is drawn.

    The score of a continuation is its log-probability / (its tokens ** ``length_penalty``).
    ``early_stopping`` ends the search once ``beam_width`` are complete; else it goes on until none
    better can follow. ``max_tokens`` None means all that fits.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool = False
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.validate()

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field that cannot be."""
        width, penalty = self.beam_width, self.length_penalty
        _check(_is_integer(width) and width >= 1, "beam_width", width, "an integer, at least 1")
        _check(
            _is_finite(penalty) and abs(penalty) <= MOST_LENGTH_PENALTY,
            "length_penalty", penalty, f"in [{-MOST_LENGTH_PENALTY:g}, {MOST_LENGTH_PENALTY:g}]",
        )  # fmt: skip
        _check(
            self.temperature in (0, 1), "temperature", self.temperature,
            "0 or 1 in a beam search, which draws nothing: it ranks by the model's own "
            "log-probabilities",
        )  # fmt: skip

    def sampling_params(self) -> SamplingParams:
        """The same limits and ends for so many choices; checks them."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")


def _is_integer(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # the abstract class asks at length


def _is_finite(value: object) -> bool:
    return (type(value) is float or isinstance(value, Real)) and math.isfinite(value)


def _check(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        shown = repr(value)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]} …"
        raise InvalidRequest(f"{name} is {shown}; it must be {wanted}", name.partition("[")[0])


def _check_strings(name: str, strings: list[str]) -> None:
    if any(not text for text in strings):
        raise InvalidRequest(f"{name} holds an empty string", name)
    length = sum(map(len, strings))
    if len(strings) > MOST_STRINGS or length > MOST_CHARACTERS:
        raise InvalidRequest(
            f"{name} holds {len(strings)} strings of {length} characters in all; at most "
            f"{MOST_STRINGS} of {MOST_CHARACTERS} are taken",
            name,
        )


def _range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    inside = _is_finite(value) and (low < value if open_low else low <= value) and value <= high
    bracket = "(" if open_low else "["
    _check(inside, name, value, f"in {bracket}{low:g}, {high:g}]")


@dataclass(slots=True)
class RequestTimings:
    """Seconds, on one monotonic clock of the host; -1.0 where the event has not happened."""

    arrival: float = -1.0
    first_scheduled: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where the time of traced steps went.

    ``kinds``: kind -> (calls, seconds), longest first: of a GPU's kernels where there is one, else
    of the operators of the worker's thread. ``span``: seconds from the first of them to the last;
    ``idle``: of these, seconds in which none ran; ``longest_gap``: the longest such time.
    """

    trace: Path
    num_steps: int
    kinds: dict[str, tuple[int, float]]
    span: float
    idle: float
    longest_gap: float
