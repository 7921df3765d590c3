"""Values of JSON for hostile bodies: any at all, and the ends of what is allowed."""

from __future__ import annotations

import random
from typing import Any

# The least that a route answers with 200; others are attacked from {}.
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the rain", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions/render": {"prompt": "the rain"},
    "/v1/embeddings": {"input": "the rain"},
    "/tokenize": {"prompt": "the rain"},
    "/detokenize": {"tokens": [40, 41, 42]},
}
_SCHEMAS: tuple[Any, ...] = (
    {}, True, False, [], "x", {"type": "object"}, {"type": "no such type"}, {"properties": "bar"},
    *({"type": "string", "pattern": p} for p in ("^hello there indeed\\\\!$", "([a-z")),
    {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "https://example.com/x"}, {"allOf": [{}] * 2000},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "array", "minItems": 10**9}, {"type": "integer", "minimum": 1e308, "maximum": -1e308},
    {"enum": []}, {"enum": ["x" * 50_000]}, {"const": {"a": [1, None, "\x00"]}}, {"not": {}},
    {"type": "object", "properties": {str(i): {"type": "string"} for i in range(3000)}},
    {"oneOf": [{"type": "string", "minLength": i} for i in range(300)]},
)  # fmt: skip
_PATTERNS = (
    "([a-z", "(a+)+$", "a{1000000}", "(a{1000}){1000}", "(" * 3000, "[", "\\", "(?=a)b", "\\1", "",
    "^$", ".*" * 200, "[\\x00-\\xff]", "(a|b|ab)*c", "\\p{Greek}+", "[0-9]{3}", "x" * 100_000,
)  # fmt: skip


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


# The ends of what is allowed, and what takes work to refuse.
EXTREMES: dict[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "stream_options": (None, {"include_usage": True, "continuous_usage_stats": True}),
    "n": (1, 2, 8),
    "best_of": (None, 1),
    "temperature": (0, 1e-45, 1e-6, 1, 2),
    "top_p": (1e-45, 1e-6, 0.5, 1),
    "top_k": (-1, 0, 1, 2, 2**31),
    "min_p": (0, 1e-45, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.001, 1, 1000),
    "seed": (0, -(2**63), 2**64 - 1),
    "stop": (
        "e",
        ["\x00", "😀", "the" * 20000],
        ["a" * 60] * 1000,
        [chr(c) for c in range(97, 123)],
    ),
    "stop_token_ids": ([], [1], [*range(300)]),
    "bad_words": (["the", " "], ["e"] * 1000, ["the rain in the house " * 40]),
    "include_stop_str_in_output": (True, False),
    "ignore_eos": (True, False),
    "max_tokens": (1, 2, 17, 100),
    "max_completion_tokens": (1, 17),
    "min_tokens": (0, 1, 17),
    "logprobs": (None, 0, 1, 20, True, False),
    "top_logprobs": (None, 0, 20),
    "prompt_logprobs": (0, 20),
    "logit_bias": ({"1": 100, "40": -100}, {str(i): -100 for i in range(300)}, {"0": 100.0}),
    "allowed_token_ids": ([1], [0], [*range(300)], [40] * 200),
    "truncate_prompt_tokens": (-1, 1, 3),
    "skip_special_tokens": (True, False),
    "add_special_tokens": (True, False),
    "echo": (True, False),
    "return_token_ids": (True, False),
    "return_tokens_as_token_ids": (True, False),
    "use_beam_search": (True, True, False),
    "length_penalty": (-2, 0, 1, 2),
    "early_stopping": (True, False),
    "timeout": (1e-6, 0.01, 1e6),
    "input": ("", "x", ["a", "b"], [40], [[40], [41]], [[40] * 255] * 20, "e" * 255),
    "encoding_format": ("float", "base64"),
    "dimensions": (1, 64, 2**31),
    "guided_json": _SCHEMAS,
    "guided_regex": _PATTERNS,
    "guided_choice": ([], [""], ["a", "a"], ["yes", "no"], [str(i) for i in range(5000)]),
    "guided_grammar": ('start: "a"', "start: start", "start: a", "%ignore", 'start: "a"' * 5000),
    "structured_outputs": (
        {},
        {"json": {}, "regex": "a"},
        {"json_object": True},
        {"choice": ["a"]},
        {"regex": "(a+)+$"},
        {"structural_tag": {"triggers": ["<"], "structures": []}},
        {"grammar": "x"},
    ),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "text"},
        {"type": "x"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in _SCHEMAS),
    ),
    "tools": (
        [],
        [{}],
        [{"type": "function", "function": {"name": ""}}],
        [_tool({})] * 3,
        *([_tool(schema)] for schema in _SCHEMAS),
    ),
    "tool_choice": (
        "auto",
        "required",
        "none",
        "x",
        {},
        {"type": "function", "function": {"name": "f"}},
    ),
    "cache_salt": ("x", "😀" * 200),
    "request_id": ("mine", "a" * 256),
    "prompt": ("", "the rain", [[40], [41, 42]], ["a", "b", ""], [[40] * 200] * 8, "e" * 200),
    "tokens": ([], [0, 1, 2, 3], [*range(300)], [40] * 50_000),
}

_TEXTS = (
    "", "x", "\x00", "a\x00b", "\u202e", "😀" * 50, "<|im_start|>", "{{ 1/0 }}", "${x}", "../..",
    "' OR 1=1 --", "<s></s>", "\ufffe\uffff", "e\u0301" * 30, "true", "null", "\r\nx: y",
)  # fmt: skip
_NUMBERS = (0, -1, 1, 2, 3, 7, 255, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1,
            10**40, 0.0, -0.0, 0.5, 1e-45, 1e-320, 1e38, 1e308, -1e308, 1.0000001)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value; deep ones are rare."""
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 3:
        return rng.choice(_NUMBERS)
    if kind < 5:
        return rng.choice(_TEXTS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return rng.randrange(-5, 400)
    if kind == 7:
        return [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 40)))]
    if kind == 8:
        return {rng.choice(_TEXTS): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    return {str(rng.randrange(-3, 400)): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
