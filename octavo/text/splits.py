"""``tokenizer.ggml.pre``: how text is cut into words before byte-pair merges, by the name GGUF
files use for it.

The patterns are those of the models' own tokenizer.json files; names that share one are listed
together (the list of names: llama.cpp, src/llama-vocab.cpp). An unknown name is an error, because
a wrong cut gives a model ids that it never saw in training.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.types import ConfigError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORDS = f"{_LEAD}{_UPPER}*{_LOWER}+SUFFIX|{_LEAD}{_UPPER}+{_LOWER}*SUFFIX"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS.replace("SUFFIX", "") + r"|\p{N}" + _REST
_GPT4O = _WORDS.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)
# Letters that have a case. Ends that NFC would change are escapes.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Split:
    """``patterns`` cut one after the other; none: GPT-2's own rule."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # every digit by itself, then the rule
    whole_words: bool = False  # a word that is a token is taken without merging
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        parts: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        own_rule = not self.patterns
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_rule))
        return pre_tokenizers.Sequence(parts)

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = Split()
_GROUPS: list[tuple[Split, str]] = [
    (
        _GPT2,
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum a.x-4.0 "
        "gigachat",
    ),
    (Split(digits=True), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        Split((_LLAMA3,), whole_words=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (Split((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (Split((_QWEN2,), nfc=True), "qwen2"),
    (Split((_QWEN2,)), "deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2 f2llmv2"),
    (Split((_QWEN35,), nfc=True), "qwen35"),
    (Split((_SEED,)), "seed-coder"),
    (Split((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Split((_EXAONE_MOE,)), "exaone-moe"),
    (Split(_MINICPM5, whole_words=True), "minicpm5"),
    (Split((_BLOOM,)), "bloom gpt3-finnish poro-chat"),
    (Split((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
    (Split((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2 talkie"),
    (Split(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (Split(_DEEPSEEK_LLM, digits=True), "deepseek-llm"),
    (Split(_DEEPSEEK_CODER, digits=True), "deepseek-coder"),
]
SPLITS = {name: split for split, names in _GROUPS for name in names.split()}


def split_named(name: str, where: object) -> Split:
    """Raises ConfigError naming ``where``, the unknown name and the known ones."""
    if name not in SPLITS:
        raise ConfigError(
            f"{where}: tokenizer.ggml.pre is {name!r}, which octavo does not know; supported: "
            f"{', '.join(sorted(SPLITS))}. Use --tokenizer with the model's tokenizer.json"
        )
    return SPLITS[name]
