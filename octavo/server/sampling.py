"""From a request's fields to SamplingParams."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from octavo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseFormat,
)
from octavo.types import (
    BeamSearchParams,
    InvalidRequest,
    SamplingParams,
    StructuredOutputsParams,
)

_PARAMETERS = {field.name for field in fields(SamplingParams)}
# Fields of the same name that are copied when the client sent them.
_COPIED = [
    name
    for name in GenerationRequest.model_fields
    if name in _PARAMETERS
    and name not in ("logit_bias", "max_tokens", "stop", "structured_outputs")
]

MOST_BEAMS = 64  # of one prompt: each step ranks twice as many tokens after each beam
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
    if constraints := _constraints(body):
        raise InvalidRequest(
            f"{next(iter(constraints))} and use_beam_search cannot be combined in this version",
            next(iter(constraints)),
        )
    if params.n > MOST_BEAMS:
        raise InvalidRequest(f"n is {params.n}; a beam search takes at most {MOST_BEAMS}", "n")
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
    constraint = structured_outputs(body)
    if constraint is not None:
        values["structured_outputs"] = constraint
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return values


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The constraint, by whichever name the client sent it. Raises InvalidRequest naming it."""
    sent = _constraints(body)
    if not sent:
        if body.guided_whitespace_pattern is not None:
            raise InvalidRequest(
                "guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern"
            )
        return None
    if len(sent) > 1:
        first, second, *_ = sent
        raise InvalidRequest(f"{second} and {first} both constrain the output: send one", second)
    (values,) = sent.values()
    if body.guided_whitespace_pattern is not None:
        if "whitespace_pattern" in values:
            raise InvalidRequest(
                "guided_whitespace_pattern and structured_outputs.whitespace_pattern are the same: "
                "send one",
                "guided_whitespace_pattern",
            )
        values["whitespace_pattern"] = body.guided_whitespace_pattern
    try:
        return StructuredOutputsParams(**values)
    except InvalidRequest as error:
        raise renamed_constraint(error, body) from None


def _constraints(body: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Field -> the values it gives to StructuredOutputsParams, of each field that constrains."""
    found: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.model_dump(
            exclude_none=True, by_alias=True
        )
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            found[f"guided_{kind}"] = {kind: value}
    asked = body.response_format
    if asked is not None and asked.type != "text":
        found["response_format"] = _by_format(asked)
    return found


def _by_format(asked: ResponseFormat) -> dict[str, Any]:
    tag = asked.model_dump(include={"type", "structures", "triggers", "format"}, exclude_none=True)
    extra = [name for name in ("structures", "triggers", "format") if name in tag]
    if asked.type != "structural_tag" and extra:
        raise InvalidRequest(
            f"response_format.{extra[0]} belongs to type structural_tag", "response_format"
        )
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        need = "needs" if asked.type == "json_schema" else "takes no"
        raise InvalidRequest(
            f"response_format of type {asked.type} {need} json_schema", "response_format"
        )
    if asked.json_schema is not None:
        return {"json": asked.json_schema.schema_}
    return {"json_object": True} if asked.type == "json_object" else {"structural_tag": tag}


def renamed_constraint(error: InvalidRequest, body: GenerationRequest) -> InvalidRequest:
    """Names the field by which the client sent its constraint."""
    param = error.param or ""
    if body.structured_outputs is not None or not param.startswith("structured_outputs"):
        return error
    sent = next(iter(_constraints(body)), "structured_outputs")
    if sent == "response_format":
        inner = {"json": ".json_schema.schema", "json_object": "", "structural_tag": ""}
        new = sent + inner.get(param.rpartition(".")[2], "")
    else:
        new = sent
    return InvalidRequest(str(error).replace(param, new), new)


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
    if (error.param or "").startswith("structured_outputs") and not _constraints(body):
        return _of_tools(str(error))
    if error.param == "logprobs":
        return InvalidRequest(f"top_{error}", "top_logprobs")
    return error


def _of_tools(message: str) -> InvalidRequest:
    """What is wrong with a constraint that was made of the schemas of tools."""
    rest = message.removeprefix("structured_outputs").removeprefix(".grammar")
    where = ", at " if rest.startswith(".") else ": "
    rest = re.sub(r"^at \d+\(\d+\): ", "", rest.lstrip(".: "))  # of a text of our own
    return InvalidRequest(f"a schema of tools{where}{rest}", "tools")


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(
            f"logit_bias has the key {text!r}; keys are token ids", "logit_bias"
        ) from None
