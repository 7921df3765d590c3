"""From a request's fields to SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from octavo.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from octavo.types import BeamSearchParams, InvalidRequest, SamplingParams

_PARAMETERS = {field.name for field in fields(SamplingParams)}
# Fields of the same name that are copied when the client sent them.
_COPIED = [
    name
    for name in GenerationRequest.model_fields
    if name in _PARAMETERS and name not in ("logit_bias", "max_tokens", "stop")
]

# What has no say in a beam search -> the values that ask for nothing.
_DRAWS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
}


def completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequest naming the field. With echo, logprobs are the prompt's as well."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {body.n or 1}: only best_of equal to n is served",
            "best_of",
        )
    values = _common(body, defaults)
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    if body.max_tokens == 0 and body.echo:
        values.update(max_tokens=1, min_tokens=0)  # what is drawn is dropped
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            values["prompt_logprobs"] = body.logprobs
    return _build(values)


def chat_params(body: ChatRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequest naming the field."""
    values = _common(body, defaults)
    values.setdefault("max_tokens", None)
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return _build(values)


def beam_params(body: GenerationRequest, params: SamplingParams) -> BeamSearchParams | None:
    """None where no beam search is asked for. Raises InvalidRequest naming the field."""
    if not body.use_beam_search:
        if body.early_stopping or body.length_penalty not in (None, 1):
            field = "early_stopping" if body.early_stopping else "length_penalty"
            raise InvalidRequest(f"{field} needs use_beam_search: true", field)
        return None
    if body.stream:
        raise InvalidRequest(
            "a beam search cannot be streamed: its answers come at its end", "stream"
        )
    for name, neutral in _DRAWS.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"{name} has no effect on a beam search, which ranks by the model's own "
                "log-probabilities: leave it out",
                name,
            )
    if params.prompt_logprobs is not None or body.max_tokens == 0:
        raise InvalidRequest("echo with logprobs, or without output, takes no beam search", "echo")
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        early_stopping=bool(body.early_stopping),
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )


def _common(body: GenerationRequest, defaults: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in defaults.items() if name in _PARAMETERS}
    for name in _COPIED:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.stop is not None:
        values["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(k): v for k, v in body.logit_bias.items()}
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return values


def _build(values: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**values)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}; it must be at least 1 (0 only with echo)",
            "max_tokens",
        )
    return params


def renamed_for_chat(error: InvalidRequest, body: ChatRequest) -> InvalidRequest:
    """Names the field the client sent, where chat spells it differently."""
    if error.param == "prompt":
        return InvalidRequest(str(error), "messages", error.code)
    if error.param == "max_tokens" and body.max_completion_tokens is not None:
        message = str(error).replace("max_tokens", "max_completion_tokens")
        return InvalidRequest(message, "max_completion_tokens", error.code)
    if error.param == "logprobs":
        return InvalidRequest(f"top_{error}", "top_logprobs")
    return error


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(
            f"logit_bias has the key {text!r}; keys are token ids", "logit_bias"
        ) from None
