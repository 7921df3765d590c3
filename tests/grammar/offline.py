"""Requests under constraints beside free ones, for an ``LLM`` on any device, and how each answer
must look."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from octavo import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.grammar.schemas import random_schema
from tests.grammar.test_matcher import has_huge_number

Check = Callable[[str], None]


def matches(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text, re.DOTALL), text

    return check


def validates(schema: dict[str, Any]) -> Check:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)

    def check(text: str) -> None:
        value = json.loads(text)
        assert has_huge_number(value) or validator.is_valid(value), text

    return check


def constraints() -> list[tuple[StructuredOutputsParams | None, Check | None]]:
    """Some of every kind, and every third none."""
    flat = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    schemas = [flat, {"type": "object"}, *(random_schema(random.Random(s)) for s in range(10))]
    bounded: list[tuple[StructuredOutputsParams, Check]] = [
        (StructuredOutputsParams(regex="[a-f]{2,30}!"), matches("[a-f]{2,30}!")),
        (StructuredOutputsParams(choice=["yes", "no", "perhaps"]), matches("yes|no|perhaps")),
        (
            StructuredOutputsParams(grammar='start: "<" /[0-9]{1,9}/ ">" ("+" start)?'),
            matches(r"(<[0-9]{1,9}>\+?)+"),
        ),
        (
            StructuredOutputsParams(choice=["A", "BC"], after="e"),
            matches("[^e]*e(A|BC)"),
        ),
        *((StructuredOutputsParams(json=schema), validates(schema)) for schema in schemas),
    ]
    mixed: list[tuple[StructuredOutputsParams | None, Check | None]] = []
    for index, pair in enumerate(bounded):
        mixed.append(pair)
        if index % 2:
            mixed.append((None, None))
    return mixed


PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 3, "presence_penalty": 0.4},
    {"temperature": 1.0, "n": 2},
]


def asked(num_ids: int, max_tokens: int = 48) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(1)
    prompts, params = [], []
    for index, (constraint, _) in enumerate(constraints()):
        prompts.append([rng.randrange(4, num_ids) for _ in range(rng.randint(1, 40))])
        own = PARAMS[index % len(PARAMS)]
        params.append(SamplingParams(max_tokens=max_tokens, seed=100 * index,
                                     structured_outputs=constraint, **own))  # fmt: skip
    return prompts, params


def check_answers(outputs: list[RequestOutput]) -> int:
    """Whatever has stopped matches its constraint. Returns how many there were."""
    num_whole = 0
    for output, (_, check) in zip(outputs, constraints(), strict=True):
        for answer in output.outputs:
            assert answer.finish_reason in ("stop", "length")
            if check is not None and answer.finish_reason == "stop":
                check(answer.text)
                num_whole += 1
    return num_whole


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def together(llm: LLM, num_ids: int) -> list[RequestOutput]:
    return llm.generate(*asked(num_ids), use_tqdm=False)


def one_by_one(llm: LLM, num_ids: int) -> list[RequestOutput]:
    return [
        llm.generate(prompt, params, use_tqdm=False)[0]
        for prompt, params in zip(*asked(num_ids), strict=True)
    ]
