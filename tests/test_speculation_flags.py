"""Speculation as it is asked for: every spelling means the same, and what is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.cli import serve
from octavo.cli.arguments import parse
from octavo.config import EngineConfig
from octavo.speculation import Speculating, SpeculativeConfig, speculating
from octavo.types import ConfigError

NGRAM5, DRAFT = Speculating(("ngram",), 5), Speculating(("draft_model",), 5, model="DIR")


def asked(*tokens: str) -> Speculating | None:
    return speculating(parse(serve.COMMAND, list(tokens)).build(EngineConfig).speculative)


def refused(*tokens: str) -> str:
    with pytest.raises(ConfigError) as caught:
        asked(*tokens)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "meant"),
    [
        ([], None),
        (["-sc", "{}"], None),
        (["--speculative-model", "[ngram]", "--num-speculative-tokens", "5"], NGRAM5),
        (["--speculative-model", "ngram"], NGRAM5),
        (["--spec-method", "ngram"], NGRAM5),
        (["--spec-method", "[ngram]"], NGRAM5),
        (["--spec-method", "ngram", "--speculative-model", "[ngram]"], NGRAM5),
        (["--speculative-config", '{"method":"ngram","num_speculative_tokens":5}'], NGRAM5),
        (["--speculative-config", '{"model":"[ngram]"}', "--spec-tokens", "5"], NGRAM5),
        (["-sc", '{"method":"ngram"}', "--speculative-config.num_speculative_tokens", "5"], NGRAM5),
        (["--speculative-config.method=ngram"], NGRAM5),
        (["--speculative-model", "DIR"], DRAFT),
        (["--spec-model", "DIR", "--spec-method", "draft_model"], DRAFT),
        (["-sc", '{"model":"DIR"}', "--spec-model", "DIR"], DRAFT),
        (
            ["-sc", '{"model":"DIR","quantization":"int8","num_speculative_tokens":16}'],
            Speculating(("draft_model",), 16, "DIR", "int8"),
        ),
        (["-sc", '{"draft_layers":4}'], Speculating(("draft_layers",), draft_layers=4)),
        (
            ["--spec-method", "draft_layers", "--speculative-config.draft_layers", "4"],
            Speculating(("draft_layers",), draft_layers=4),
        ),
        (
            ["-sc", '{"method":"ngram+draft_model","model":"DIR","prompt_lookup_max":4}'],
            Speculating(("ngram", "draft_model"), model="DIR", longest=4),
        ),
        (
            ["--spec-method", "suffix", "-sc", '{"prompt_lookup_min":1,"prompt_lookup_max":64}'],
            Speculating(("suffix",), shortest=1, longest=64),
        ),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_spellings(tokens: list[str], meant: Speculating | None) -> None:
    assert asked(*tokens) == meant


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (["-sc", '{"tokens":5}'], "--speculative-config has no key 'tokens'; it has method, model"),
        (["--spec-tokens", "5"], "no method is named; give --spec-method ngram"),
        (["--spec-method", "eagle3", "--spec-model", "d"], "eagle3 is not in this version"),
        (["-sc", '{"method":"mtp"}'], "mtp is not in this version; there are ngram, suffix"),
        (["--spec-method", "ngrams"], "no speculative method is called 'ngrams'; there are"),
        (["--spec-method", "ngram+suffix"], "of two, the first is ngram or suffix, the second"),
        (["-sc", '{"method":"draft_model+ngram","model":"d"}'], "of two, the first is ngram or"),
        (["--spec-method", "ngram+suffix+draft_model"], "of two, the first is ngram or suffix"),
        (["--spec-tokens", "0"], "--num-speculative-tokens 0"),
        (["--spec-tokens", "17"], "--num-speculative-tokens 17"),
        (
            ["-sc", '{"method":"ngram","num_speculative_tokens":17}'],
            "num_speculative_tokens 17 must be a whole number from 1 to 16",
        ),
        (["-sc", '{"num_speculative_tokens":2.5}'], "2.5 must be a whole number"),
        (["-sc", '{"draft_layers":true}'], "draft_layers True must be a whole number"),
        (["-sc", '{"method":"ngram","prompt_lookup_min":0}'], "prompt_lookup_min 0 must be"),
        (
            ["-sc", '{"method":"ngram","prompt_lookup_min":5,"prompt_lookup_max":4}'],
            "prompt_lookup_min 5 is above prompt_lookup_max 4",
        ),
        (["-sc", '{"model":5}'], "model 5 must be a model's name or directory"),
        (["--spec-model", ""], "model '' must be a model's name or directory"),
        (["--spec-method", "draft_model"], "draft_model: give --speculative-model MODEL"),
        (["--spec-method", "suffix+draft_model"], "draft_model: give --speculative-model MODEL"),
        (["--spec-method", "draft_layers"], 'say how many layers guess, "draft_layers": K'),
        (["--spec-method", "suffix", "--spec-model", "d"], "suffix takes no model; leave d out"),
        (["-sc", '{"method":"ngram","quantization":"int8"}'], "leave quantization out, or choose"),
        (["-sc", '{"draft_layers":2,"model":"d"}'], "draft_model takes no draft_layers"),
        (["-sc", '{"draft_layers":2,"method":"ngram"}'], "ngram takes no draft_layers"),
        (
            ["-sc", '{"method":"ngram"}', "--spec-method", "suffix"],
            "--spec-method suffix contradicts --speculative-config, which says ngram",
        ),
        (
            ["-sc", '{"model":"a"}', "--spec-model", "b"],
            "--speculative-model b contradicts --speculative-config, which says a",
        ),
        (
            ["-sc", '{"method":"ngram","num_speculative_tokens":4}', "--spec-tokens", "5"],
            "--num-speculative-tokens 5 contradicts --speculative-config, which says 4",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(tokens: list[str], told: str) -> None:
    assert told in refused(*tokens)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"spec_method": "ngrams"}, "no speculative method is called 'ngrams'"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "no method is named"),
        ({"speculative_model": "no/such/model/here"}, "no/such/model/here"),
        (
            {"speculative_config": {"draft_layers": 2}},
            "draft_layers 2, the model has 2: use 1 to 1",
        ),
    ],
    ids=str,
)
def test_a_library_user_is_told_before_anything_runs(
    settings: dict[str, Any], told: str, model_r: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(str(model_r), cpu_threads=1, kv_cache_memory_bytes=1 << 20, **settings)


def test_it_says_what_it_is() -> None:
    config = {"method": "ngram+draft_model", "model": "DIR", "num_speculative_tokens": 3}
    assert str(speculating(SpeculativeConfig(config))) == "ngram+draft_model (DIR), up to 3 tokens"
    layers = speculating(SpeculativeConfig({"draft_layers": 4}))
    assert str(layers) == "draft_layers (the first 4 layers), up to 5 tokens"
