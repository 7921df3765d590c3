"""Small vocabularies trained here and written out in every form octavo reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.text.published import PUBLISHED
from tests.text.samples import CORPUS

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
MARKERS = ["<think>", "</think>"]  # structural, not flagged special
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")


def cut_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2_CUT = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM_CUT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_CUT])
CUTS = {
    "gpt-2": GPT2_CUT,
    "default": GPT2_CUT,
    "smollm": SMOLLM_CUT,
    "llama-bpe": cut_by(LLAMA3_PATTERN),
    "qwen2": cut_by(QWEN2_PATTERN),
    **{
        name: cut_by(*PUBLISHED[name])
        for name in ("tekken", "gpt-4o", "deepseek-v3", "deepseek-coder", "qwen35", "bloom")
    },
}


def trained_byte_level(pre: str, *, bos: bool = False) -> Tokenizer:
    """A byte-level BPE whose words are cut as the models of that name cut them."""
    from tokenizers import normalizers

    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = CUTS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def write_directory(tokenizer: Tokenizer, directory: Path, **settings: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def write_gguf(path: Path, facts: dict[str, Any]) -> Path:
    """A GGUF file with no tensors; ``facts`` as ``GGUFWriter`` arrays, strings, numbers."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in facts.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_facts(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """The metadata of the same vocabulary as a GGUF file has it."""
    content = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = dict.fromkeys(SPECIALS, 3) | dict.fromkeys(MARKERS, 4)
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def train_sentencepiece(directory: Path, **options: Any) -> Path:
    """tokenizer.model of a BPE with byte fallback, as Llama 2's: <unk>, <s>, </s>, 256 bytes."""
    import sentencepiece

    directory.mkdir(parents=True, exist_ok=True)
    corpus = directory / "corpus.txt"
    lines = (line for text in CORPUS for line in text.splitlines() if "\x00" not in line)
    corpus.write_text("\n".join(lines), encoding="utf-8")
    settings = {
        "model_type": "bpe",
        "vocab_size": 800,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.98,
        "max_sentencepiece_length": 16,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": ["<|im_start|>", "<|im_end|>"],
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        minloglevel=2,
        **{**settings, **options},
    )
    return directory / "tokenizer.model"


def sentencepiece_facts(model: Path) -> dict[str, Any]:
    import sentencepiece

    reader = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(reader.get_piece_size())
    kinds = [
        2
        if reader.is_unknown(i)
        else 3
        if reader.is_control(i) or reader.id_to_piece(i).startswith("<|im_")
        else 6
        if reader.is_byte(i)
        else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [reader.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [reader.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
