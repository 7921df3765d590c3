"""How text is cut into words, by the names of ``tokenizer.ggml.pre``."""

from __future__ import annotations

import pytest

from octavo.text.splits import SPLITS, split_named
from octavo.types import ConfigError


def words(name, text):
    pieces = split_named(name, "file").pre_tokenizer().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_rule_keeps_all_of_the_text(name):
    text = "It's 12345 x  y\n\n z!?\r\n你好 naïve İ\t()"
    assert "".join(words(name, text)) == text


def test_rules_differ_where_the_models_do():
    assert words("gpt-2", "a 1234") == ["a", " 1234"]
    assert words("smollm", "a 12") == ["a", " ", "1", "2"]
    assert words("llama-bpe", "a1234") == ["a", "123", "4"]
    assert words("qwen2", "a12") == ["a", "1", "2"]
    assert words("gpt-4o", "fooBar's") == ["foo", "Bar's"]
    assert words("tekken", "fooBAR12") == ["foo", "BAR", "1", "2"]
    assert words("deepseek-v3", "你好ab!x") == ["你好", "ab", "!x"]


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"m\.gguf: .*'own'.*qwen2.*--tokenizer"):
        split_named("own", "m.gguf")
