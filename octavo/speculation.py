"""Speculative decoding as it is asked for: flags, their spellings, and one canonical form of them.

What the methods do is in ``worker.speculative``, how many guesses are made in ``core.speculation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.flags import flag, internal
from octavo.types import ConfigError

# Tokens that a GPU draws in a step at most, but for the rows that it may have anyway.
MOST_DRAWS = 1024
METHODS = ("ngram", "suffix", "draft_model", "draft_layers")
OF_TEXT = ("ngram", "suffix")  # methods that compute nothing
DEFAULT_TOKENS, MOST_TOKENS = 5, 16
SHORTEST, LONGEST = 2, 16  # ids that an n-gram must, and can, match
# Methods of vLLM's that are not here.
OF_LATER_VERSIONS = ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp", "dflash")


@dataclass(frozen=True)
class SpeculativeConfig:
    speculative_config: dict[str, Any] = flag(
        {},
        'guess tokens ahead, as JSON: "method" (ngram, suffix, draft_model, draft_layers, or two '
        'such as "ngram+draft_model"), "num_speculative_tokens", "model", "quantization", '
        '"draft_layers", "prompt_lookup_min", "prompt_lookup_max"',
        "-sc",
        group="speculation",
        kind="json",
    )
    spec_method: str | None = flag(
        None,
        "method alone; ngram guesses what followed the last tokens before, suffix also in other "
        "answers",
        group="speculation",
    )
    speculative_model: str | None = flag(
        None,
        "a smaller model with the same vocabulary that guesses (also [ngram]: no model)",
        "--spec-model",
        group="speculation",
    )
    num_speculative_tokens: int | None = flag(
        None,
        f"most guesses of a request in a step (default {DEFAULT_TOKENS}); fewer, or none, where "
        "they do not pay",
        "--spec-tokens",
        group="speculation",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    draft_path: str = internal("")  # the draft model's files, once they are found


@dataclass(frozen=True)
class Speculating:
    """All spellings in one form. ``methods``: the first that has guesses makes them."""

    methods: tuple[str, ...]
    num_tokens: int = DEFAULT_TOKENS
    model: str | None = None
    quantization: str | None = None
    draft_layers: int = 0
    shortest: int = SHORTEST
    longest: int = LONGEST

    @property
    def draft(self) -> str | None:
        """The method among them that computes something."""
        return next((method for method in self.methods if method not in OF_TEXT), None)

    def __str__(self) -> str:
        where = f" ({self.model})" if self.model else ""
        where += f" (the first {self.draft_layers} layers)" if self.draft_layers else ""
        return f"{'+'.join(self.methods)}{where}, up to {self.num_tokens} tokens"


# Keys of --speculative-config and the fields they set.
_KEYS = {
    "method": "method",
    "model": "model",
    "num_speculative_tokens": "num_tokens",
    "quantization": "quantization",
    "draft_layers": "draft_layers",
    "prompt_lookup_min": "shortest",
    "prompt_lookup_max": "longest",
}


def speculating(config: SpeculativeConfig) -> Speculating | None:
    """What is asked for; None: no speculation. Raises ConfigError for what is unknown, missing or
    contradicts itself."""
    given = _given(config)
    if not given:
        return None
    _check_numbers(given)
    model = given.get("model")
    if model is not None and not (isinstance(model, str) and model):
        raise ConfigError(f"speculation: model {model!r} must be a model's name or directory")
    method = given.pop("method", None)
    if model in ("[ngram]", "ngram"):
        del given["model"]
        if method not in (None, "ngram", "[ngram]"):
            raise ConfigError(f"--speculative-model {model} contradicts the method {method}")
        model, method = None, "ngram"
    if method is None:
        method = "draft_model" if model else "draft_layers" if "draft_layers" in given else None
    if method is None:
        raise ConfigError(
            "speculation: no method is named; give --spec-method ngram (no model needed), or "
            "--speculative-model MODEL"
        )
    found = Speculating(_methods(method), **given)
    _check_together(found)
    return found


def _given(config: SpeculativeConfig) -> dict[str, Any]:
    """What was given, by field of ``Speculating`` and "method"; the same twice is one."""
    given: dict[str, Any] = {}
    for key, value in config.speculative_config.items():
        if key not in _KEYS:
            raise ConfigError(f"--speculative-config has no key {key!r}; it has {', '.join(_KEYS)}")
        given[_KEYS[key]] = value
    flags = (
        ("--spec-method", "method", config.spec_method),
        ("--speculative-model", "model", config.speculative_model),
        ("--num-speculative-tokens", "num_tokens", config.num_speculative_tokens),
    )
    for spelling, name, value in flags:
        if value is None:
            continue
        if given.get(name, value) != value:
            raise ConfigError(
                f"{spelling} {value} contradicts --speculative-config, which says {given[name]}"
            )
        given[name] = value
    return given


def _methods(method: Any) -> tuple[str, ...]:
    names = tuple(str(method).strip("[]").split("+"))
    for name in names:
        if name in OF_LATER_VERSIONS:
            raise ConfigError(
                f"speculative method {name} is not in this version; there are {', '.join(METHODS)}"
            )
        if name not in METHODS:
            raise ConfigError(
                f"no speculative method is called {name!r}; there are {', '.join(METHODS)}, or two "
                "of them such as ngram+draft_model"
            )
    kinds = [name in OF_TEXT for name in names]
    if len(names) > 2 or (len(names) == 2 and kinds != [True, False]):
        raise ConfigError(
            f"speculative method {'+'.join(names)}: of two, the first is ngram or suffix, the "
            "second draft_model or draft_layers"
        )
    return names


def _check_numbers(given: dict[str, Any]) -> None:
    ranges = {
        "num_tokens": (1, MOST_TOKENS),
        "draft_layers": (1, 1 << 16),
        "shortest": (1, 64),
        "longest": (1, 64),
    }
    spelling = {field: key for key, field in _KEYS.items()}
    for name, (least, most) in ranges.items():
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"speculation: {spelling[name]} {value!r} must be a whole number from {least} to "
                f"{most}"
            )


def _check_together(found: Speculating) -> None:
    name = "+".join(found.methods)
    if found.shortest > found.longest:
        raise ConfigError(
            f"speculation: prompt_lookup_min {found.shortest} is above prompt_lookup_max "
            f"{found.longest}"
        )
    if found.draft == "draft_model" and found.model is None:
        raise ConfigError(f"speculative method {name}: give --speculative-model MODEL")
    if found.draft == "draft_layers" and not found.draft_layers:
        raise ConfigError(
            f'speculative method {name}: say how many layers guess, "draft_layers": K in '
            "--speculative-config"
        )
    if found.draft != "draft_model" and (found.model or found.quantization):
        raise ConfigError(
            f"speculative method {name} takes no model; leave {found.model or 'quantization'} out, "
            "or choose draft_model"
        )
    if found.draft != "draft_layers" and found.draft_layers:
        raise ConfigError(f"speculative method {name} takes no draft_layers: choose draft_layers")


def reason(wanted: Speculating | None) -> dict[str, str]:
    """For what a start tells of its settings."""
    return {} if wanted is None else {"speculation": str(wanted)}


def most_draws(max_num_seqs: int, most: int) -> int:
    """Tokens that a GPU draws in a step, where rows bring up to ``most`` guesses."""
    return max(max_num_seqs, min(MOST_DRAWS, max_num_seqs * (most + 1)))


def check_stages(wanted: Speculating | None, num_stages: int) -> None:
    """Raises ConfigError for methods that a pipeline of several stages cannot use: the first stage
    must guess what the last one does, from the text of the request alone."""
    if wanted is not None and num_stages > 1 and wanted.methods != ("ngram",):
        raise ConfigError(
            f"speculative method {'+'.join(wanted.methods)} with --pipeline-parallel-size "
            f"{num_stages}: with several stages there is ngram alone; use it, or -tp"
        )
