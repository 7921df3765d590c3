"""Sampling defaults and the ids that end answers are checked once, at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.start import _default_sampling, _eos_ids
from octavo.types import ConfigError


def defaults(path: Path, **model: Any) -> dict[str, object]:
    config = EngineConfig()
    return _default_sampling(replace(config, model=replace(config.model, **model)), path)


def test_the_operators_sampling_defaults_win_over_the_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7}))
    assert defaults(tmp_path) == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    override = {"temperature": 0.1, "max_new_tokens": 3}
    assert defaults(tmp_path, override_generation_config=override) == {
        "temperature": 0.1,
        "top_p": 0.9,
        "max_tokens": 3,
    }
    assert defaults(tmp_path, generation_config="vllm") == {}


@pytest.mark.parametrize(
    "model",
    [
        {"override_generation_config": {"temperatur": 1}},
        {"override_generation_config": {"temperature": 9}},
        {"override_generation_config": {"temperature": "hot"}},
        {"generation_config": "atuo"},
    ],
)
def test_unusable_sampling_defaults_end_the_start(tmp_path: Path, model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        defaults(tmp_path, **model)


@pytest.mark.parametrize("eos", [320, -1, 10**18, [1, 320]])
def test_an_eos_outside_the_vocabulary_ends_the_start(tmp_path: Path, eos: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match="outside the model's vocabulary of 320 tokens"):
        _eos_ids(EngineConfig(), tmp_path, 320)


def test_an_eos_of_another_models_tokenizer_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    content = {"added_tokens": [{"id": 400, "content": "</s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="the tokenizer files that belong to this model"):
        _eos_ids(EngineConfig(), tmp_path, 320)
    assert _eos_ids(EngineConfig(), tmp_path, 401) == [400]
