"""What is sent: prompts with their wanted output lengths, the same for the same seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.flags import flag
from octavo.types import ConfigError

# Without a tokenizer, ids are drawn from here: above the control tokens, inside any vocabulary.
_LOWEST_ID = 32
_PLAIN_VOCABULARY = 320


class Tokens(Protocol):
    """What is needed of a tokenizer (octavo.text.tokenizer.Tokenizer)."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class Sample:
    """``prompt`` is text or token ids; ``num_prompt_tokens`` is 0 when nobody counted them."""

    prompt: str | list[int]
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class DatasetOptions:
    dataset_name: str = flag(
        "random",
        "what to send",
        group="dataset",
        choices=("random", "sharegpt", "custom", "prefix_repetition"),
        top=True,
    )
    dataset_path: str | None = flag(
        None, "file of sharegpt (JSON) or custom (JSON lines with prompt)", group="dataset"
    )
    num_prompts: int = flag(1000, "requests to send", group="dataset", top=True, minimum=1)
    tokenizer: str | None = flag(
        None,
        "model whose tokenizer makes text prompts and counts (without: token ids)",
        group="dataset",
    )
    seed: int = flag(0, "seed of the prompts and of the arrivals", group="dataset", minimum=0)
    random_input_len: int = flag(
        1024, "prompt tokens", "--input-len", group="dataset", top=True, minimum=1
    )
    random_output_len: int = flag(
        128, "output tokens", "--output-len", group="dataset", top=True, minimum=1
    )
    random_range_ratio: float = flag(
        0.0,
        "lengths vary by this share, both ways",
        group="dataset",
        minimum=0.0,
        maximum=1.0,
    )
    random_prefix_len: int = flag(
        0, "tokens that all prompts share, before the rest", group="dataset", minimum=0
    )
    sharegpt_output_len: int | None = flag(
        None, "output tokens (default: as long as the answer in the file)", group="dataset"
    )
    custom_output_len: int = flag(
        256, "output tokens where a line has no output_tokens", group="dataset", minimum=1
    )
    prefix_repetition_prefix_len: int = flag(
        256, "tokens of a shared prefix", group="dataset", minimum=1
    )
    prefix_repetition_suffix_len: int = flag(256, "tokens after it", group="dataset", minimum=1)
    prefix_repetition_num_prefixes: int = flag(10, "different prefixes", group="dataset", minimum=1)
    prefix_repetition_output_len: int = flag(128, "output tokens", group="dataset", minimum=1)


def load_dataset(options: DatasetOptions, tokenizer: Tokens | None) -> list[Sample]:
    """``num_prompts`` samples; ConfigError when a file is missing, unreadable or too short."""
    rng = np.random.default_rng(options.seed)
    if options.dataset_name == "random":
        return _random(options, tokenizer, rng)
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(options, tokenizer, rng)
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")
    path = Path(options.dataset_path)
    try:
        samples = (_sharegpt if options.dataset_name == "sharegpt" else _custom)(
            options, path.read_text(), tokenizer, rng
        )
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        kind = "a ShareGPT JSON list" if options.dataset_name == "sharegpt" else "JSON lines"
        raise ConfigError(f"--dataset-path {path}: not {kind} ({error!r})") from error
    if not samples:
        raise ConfigError(f"--dataset-path {path}: holds no prompt")
    return [samples[i % len(samples)] for i in range(options.num_prompts)]


def random_ids(
    rng: np.random.Generator, count: int, vocabulary: int = _PLAIN_VOCABULARY
) -> list[int]:
    return [int(i) for i in rng.integers(_LOWEST_ID, vocabulary, size=count)]


def _prompt(
    rng: np.random.Generator, count: int, tokenizer: Tokens | None, prefix: list[int]
) -> str | list[int]:
    """``prefix`` and ``count`` random tokens: ids, or with a tokenizer text of that many tokens."""
    if tokenizer is None:
        return prefix + random_ids(rng, count)
    ids = prefix + _ordinary_ids(rng, count, tokenizer)
    wanted = len(ids)
    text = tokenizer.decode(ids)
    for _ in range(8):  # decoding merges some ids: trim or extend until the length is right
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == wanted:
            break
        extra = _ordinary_ids(rng, max(0, wanted - len(ids)), tokenizer)
        text = tokenizer.decode(ids[:wanted] + extra)
    return text


def _ordinary_ids(rng: np.random.Generator, count: int, tokenizer: Tokens) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        drawn = rng.integers(0, tokenizer.vocab_size, size=count - len(ids))
        ids += [int(i) for i in drawn if int(i) not in tokenizer.special_ids]
    return ids


def _random(
    options: DatasetOptions, tokenizer: Tokens | None, rng: np.random.Generator
) -> list[Sample]:
    def lengths(mean: int) -> list[int]:
        low = max(1, int(mean * (1 - options.random_range_ratio)))
        high = int(mean * (1 + options.random_range_ratio))
        return [int(n) for n in rng.integers(low, high + 1, size=options.num_prompts)]

    inputs, outputs = lengths(options.random_input_len), lengths(options.random_output_len)
    shared = options.random_prefix_len
    if tokenizer is None:
        prefix = random_ids(rng, shared)
    else:
        prefix = _ordinary_ids(rng, shared, tokenizer)
    return [
        Sample(_prompt(rng, count, tokenizer, prefix), shared + count, wanted)
        for count, wanted in zip(inputs, outputs)
    ]


def _prefix_repetition(
    options: DatasetOptions, tokenizer: Tokens | None, rng: np.random.Generator
) -> list[Sample]:
    length, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    prefixes = [
        random_ids(rng, length) if tokenizer is None else _ordinary_ids(rng, length, tokenizer)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    samples = [
        Sample(
            _prompt(rng, suffix, tokenizer, prefixes[i % len(prefixes)]),
            length + suffix,
            options.prefix_repetition_output_len,
        )
        for i in range(options.num_prompts)
    ]
    return [samples[i] for i in rng.permutation(len(samples))]


def _count(text: str, tokenizer: Tokens | None) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False)) if tokenizer else 0


def _sharegpt(
    options: DatasetOptions, text: str, tokenizer: Tokens | None, rng: np.random.Generator
) -> list[Sample]:
    """The first two turns of each conversation: a prompt, and an answer whose length is wanted."""
    samples: list[Sample] = []
    entries: list[dict[str, Any]] = [e for e in json.loads(text) if len(e["conversations"]) >= 2]
    for index in rng.permutation(len(entries)):
        prompt, answer = (turn["value"] for turn in entries[index]["conversations"][:2])
        wanted = options.sharegpt_output_len or _count(answer, tokenizer) or len(answer) // 4
        if prompt and wanted >= 1:
            samples.append(Sample(prompt, _count(prompt, tokenizer), wanted))
        if len(samples) == options.num_prompts:
            break
    return samples


def _custom(
    options: DatasetOptions, text: str, tokenizer: Tokens | None, rng: np.random.Generator
) -> list[Sample]:
    """JSON lines: ``{"prompt": "…", "output_tokens": 100}``, in the file's order."""
    samples: list[Sample] = []
    for line in filter(str.strip, text.splitlines()[: options.num_prompts]):
        entry = json.loads(line)
        wanted = int(entry.get("output_tokens") or options.custom_output_len)
        samples.append(Sample(entry["prompt"], _count(entry["prompt"], tokenizer), wanted))
    return samples
