"""What ``LLM`` and ``AsyncLLM`` give. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.types import RequestTimings


@dataclass(slots=True)
class Logprob:
    """Log-probability of one candidate, its rank (1 = most likely) and its decoded text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One entry per token: id -> Logprob; the drawn token is always among them.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """A continuation that ``LLM.beam_search`` found; names as in vLLM. ``tokens``: the prompt's and
    its own; ``text``: of its own alone; ``logprobs``: of its own."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """``embedding``: FP32 values, as many as the model's hidden size."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What ``LLM.embed`` gives for one prompt; names as in vLLM."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n answers, as ``LLM.generate`` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)
