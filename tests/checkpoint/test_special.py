"""EOS ids as tokenizer files state them, in all the places where they do (T47a)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.checkpoint.special import gguf_eos_ids, tokenizer_eos_ids
from octavo.types import ConfigError
from tests.text import vocabularies


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}],
    "model": {"vocab": {"a": 0, "<end>": 3}},
}


@pytest.mark.parametrize(
    ("settings", "older", "found"),
    [
        ({"eos_token": "<|im_end|>"}, {}, [9]),
        ({"eos_token": {"content": "</s>", "lstrip": False}}, {}, [7]),
        ({}, {"eos_token": "</s>"}, [7]),
        ({"eos_token": "<|im_end|>"}, {"eos_token": "</s>"}, [9]),
        ({"eos_token": None}, {"eos_token": "</s>"}, []),
        ({"eos_token": "<end>"}, {}, [3]),
        ({"eos_token": "<unheard of>"}, {}, []),
        ({"eos_token": "x", "added_tokens_decoder": {"12": {"content": "x"}}}, {}, [12]),
        ({}, {}, []),
    ],
)
def test_the_eos_token_is_found_where_it_is_stated(
    tmp_path: Path, settings: dict, older: dict, found: list[int]
) -> None:
    files = {"tokenizer": TOKENIZER, "tokenizer_config": settings, "special_tokens_map": older}
    assert tokenizer_eos_ids(write(tmp_path, **files)) == found


def test_a_sentencepiece_model_has_its_own(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    vocabularies.train_sentencepiece(tmp_path)
    assert tokenizer_eos_ids(tmp_path) == [2]
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    assert tokenizer_eos_ids(tmp_path) == [4]


def test_a_directory_without_tokenizer_and_a_file_have_none(tmp_path: Path) -> None:
    assert tokenizer_eos_ids(tmp_path) == []
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert tokenizer_eos_ids(tmp_path / "m.gguf") == []


@pytest.mark.parametrize(
    ("named", "template", "found"),
    [
        ({"eos": 0}, "<|user|>…<|end|>", [0, 3]),
        ({"eos": 0, "eot": 2}, "<|user|>…<|end|>", [0, 2]),
        ({"eos": 3}, "<|user|>…<|end|>", [3]),
        ({"eos": 0, "eom": 2}, "…<end_of_turn>", [0, 2, 4]),
        ({"eos": 0}, "{{ eos_token }}", [0]),
        ({"eos": 0}, None, [0]),
        ({}, "…<|im_end|>", []),  # a plain token, not a control one
        ({"eos": 6}, "…<|end|>…<|return|>", [6]),  # gpt-oss
    ],
)
def test_a_gguf_file_that_does_not_name_its_end_of_turn(
    named: dict[str, int], template: str | None, found: list[int]
) -> None:
    metadata = {f"tokenizer.ggml.{name}_token_id": index for name, index in named.items()}
    metadata |= {
        "tokenizer.ggml.tokens": [
            "</s>",
            "<|user|>",
            "<x>",
            "<|end|>",
            "<end_of_turn>",
            "<|im_end|>",
            "<|return|>",
        ],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 4, 1, 3],
        "tokenizer.chat_template": template,
    }
    assert gguf_eos_ids(metadata) == found


def test_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    settings = {"eos_token": "x", "added_tokens_decoder": {"one": {"content": "x"}}}
    write(tmp_path, tokenizer=TOKENIZER, tokenizer_config=settings)
    with pytest.raises(ConfigError, match="not as transformers writes them"):
        tokenizer_eos_ids(tmp_path)
