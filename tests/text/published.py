"""Patterns of word cuts as llama.cpp publishes them (src/llama-vocab.cpp), by their names there. It
writes both cases out and knows no possessive quantifiers."""

from __future__ import annotations

_SUFFIX = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*")
PUBLISHED = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
    "qwen35": [
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
    ],
    "tekken": ["|".join(_CASES) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END],
    "gpt-4o": [
        "|".join(f"{words}{_SUFFIX}?" for words in _CASES)
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
        + _END
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _END,
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "seed-coder": [_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _END],
    "bailingmoe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "minicpm5": [r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")],
    "bloom": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
}
