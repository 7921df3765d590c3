"""How text is cut into words, by the names of ``tokenizer.ggml.pre``."""

from __future__ import annotations

import unicodedata

import pytest
from tokenizers import Regex, pre_tokenizers

from octavo.text.splits import SPLITS, split_named
from octavo.types import ConfigError
from tests.text.published import PUBLISHED
from tests.text.samples import TEXTS


@pytest.mark.parametrize("name", PUBLISHED)
def test_cuts_are_those_of_the_published_patterns(name):
    """By another engine of regular expressions, over all texts in one and each by itself."""
    regex = pytest.importorskip("regex")

    def cut(pieces, pattern):
        for piece in pieces:
            at = 0
            for found in regex.finditer(pattern, piece):
                yield from (part for part in (piece[at : found.start()], found[0]) if part)
                at = found.end()
            if piece[at:]:
                yield piece[at:]

    for text in [*TEXTS, "".join(TEXTS)]:
        wanted = [text]
        for pattern in PUBLISHED[name]:
            wanted = list(cut(wanted, pattern))
        assert words(name, text) == [piece for piece in wanted if piece], repr(text)


def test_deepseek_llm_cuts_as_its_patterns_say():
    """The class of what it cuts off as punctuation holds the ASCII letters, which cuts words with
    others among them."""
    assert words("deepseek-llm", "don't panic") == ["don", "'", "t", " panic"]
    assert words("deepseek-llm", "Straße\nπ²x12") == [
        "Stra",
        "ß",
        "e",
        "\n",
        "π",
        "²",
        "x",
        "1",
        "2",
    ]
    assert words("deepseek-llm", "你好ab。c Привет") == ["你好", "ab", "。", "c", " Привет"]
    assert words("deepseek-llm", "a   ") == ["a", "   "]


def test_the_class_of_cased_letters_is_not_damaged():
    """Written with other forms of the same letters (NFC), ranges would end elsewhere: Latin, Greek
    (extended, too), Cyrillic and letter-like symbols are whole, and no other letter is in it."""
    letters = pre_tokenizers.Split(Regex(SPLITS["deepseek-llm"].patterns[1]), "isolated")

    def in_class(char):
        return len(letters.pre_tokenize_str(f"a{char}a")) == 1

    def cased(char):
        return unicodedata.category(char) in ("Lu", "Ll", "Lt")

    blocks = [(0x41, 0x530), (0x1F00, 0x2000), (0x2100, 0x2150), (0xFF00, 0xFF60)]
    chars = [chr(code) for low, high in blocks for code in range(low, high)]
    assert [c for c in chars if in_class(c) != cased(c)] == []


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
