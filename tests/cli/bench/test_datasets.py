"""Prompts have the lengths that were asked for, and are the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench.datasets import DatasetOptions, load_dataset
from octavo.types import ConfigError


class Letters:
    """A tokenizer whose tokens are letters; id 0 is special, and "ab" is one token (27)."""

    vocab_size = 28
    special_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        merged = text.replace("ab", "{")
        return [ord(c) - 96 for c in merged]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("ab" if i == 27 else chr(96 + i) for i in ids if i)


def options(**fields: Any) -> DatasetOptions:
    return DatasetOptions(**{"num_prompts": 20, **fields})


def test_random_ids_have_the_asked_lengths_and_repeat_with_the_seed() -> None:
    asked = options(random_input_len=40, random_output_len=9, random_range_ratio=0.5)
    samples = load_dataset(asked, None)
    assert samples == load_dataset(asked, None)
    assert samples != load_dataset(options(random_input_len=40, seed=1), None)
    assert all(20 <= len(s.prompt) <= 60 and 4 <= s.num_output_tokens <= 13 for s in samples)
    assert len({len(s.prompt) for s in samples}) > 1


def test_a_shared_prefix_begins_every_prompt() -> None:
    samples = load_dataset(options(random_input_len=5, random_prefix_len=8), None)
    assert len({tuple(s.prompt[:8]) for s in samples}) == 1
    assert len({tuple(s.prompt[8:]) for s in samples}) == 20
    assert all(s.num_prompt_tokens == len(s.prompt) == 13 for s in samples)


def test_text_prompts_have_as_many_tokens_as_asked() -> None:
    tokenizer = Letters()
    for sample in load_dataset(options(random_input_len=50), tokenizer):
        assert isinstance(sample.prompt, str)
        assert len(tokenizer.encode(sample.prompt)) == sample.num_prompt_tokens == 50


def test_prefix_repetition_shares_as_many_prefixes_as_asked() -> None:
    asked = options(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=3,
        prefix_repetition_num_prefixes=4,
    )
    samples = load_dataset(asked, None)
    assert len({tuple(s.prompt[:6]) for s in samples}) == 4
    assert all(len(s.prompt) == 9 for s in samples)


def test_sharegpt_takes_the_first_two_turns(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "an answer here"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    asked = options(dataset_name="sharegpt", dataset_path=str(file), num_prompts=3)
    samples = load_dataset(asked, Letters())
    assert [(s.prompt, s.num_prompt_tokens, s.num_output_tokens) for s in samples] == [
        ("question", 8, 14)
    ] * 3


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("custom", None, "cannot be read"),
        ("custom", "not json", "JSON lines"),
        ("custom", '{"text": "x"}', "JSON lines"),
        ("custom", "", "holds no prompt"),
        ("sharegpt", '{"a": 1}', "ShareGPT"),
    ],
)
def test_an_unusable_file_is_named(
    tmp_path: Path, name: str, content: str | None, part: str
) -> None:
    file = tmp_path / "data"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_dataset(options(dataset_name=name, dataset_path=str(file)), None)
    assert str(file) in str(caught.value)


def test_a_file_dataset_needs_a_file() -> None:
    with pytest.raises(ConfigError, match="--dataset-path"):
        load_dataset(options(dataset_name="custom"), None)
