"""What quantization configs say, where they stand, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.quant.awq import AWQ
from octavo.quant.format import Scheme
from octavo.quant.gptq import GPTQ
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError

GATE = "model.layers.1.mlp.gate_proj"
GPTQ_4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ_4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def read(values: dict[str, Any], key: str = "quantization_config") -> Scheme:
    scheme = read_scheme({key: values}, None, "config.json")
    assert scheme is not None
    return scheme


FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ({**FP8, "activation_scheme": "token"}, "activation_scheme is 'token'; supported: dynamic"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; supported: two num"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size is '128'; supported: two numbers"),
        (
            {**FP8, "weight_block_size": [0, 128]},
            r"weight_block_size is \[0, 128\]; supported: two",
        ),
        (
            {**FP8, "weight_block_size": [1.5, 2]},
            r"weight_block_size is \[1.5, 2\]; supported: two",
        ),
        (
            {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme is 'static'; supported: dynamic, with weight_block_size",
        ),
        (
            {**FP8, "weight_block_size": [128, 10**30]},
            r"weight_block_size is \[128, 10+\]; supported: two numbers up to 65,536",
        ),
        ({**FP8, "weight_block_size": "9" * 5000 + "x1"}, "weight_block_size is '999"),
        ({**FP8, "ignored_layers": [1]}, r"ignored_layers is \[1\]; supported: a list of names"),
    ),
)
def test_what_is_not_supported_of_fp8_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config.{message}"):
        read_scheme({"quantization_config": values}, None, "config.json")


@pytest.mark.parametrize(
    "text",
    (
        *("(", "a{99999999999}", "(?L)a", "(?au)a", "(" * 5000 + ")" * 5000),
        *("(.*)*x", "((a+))+x", "(a|b)*x", "(?:x(?:.*)y)+", "(a{2,})+", ".*.*.*.*.*.*.*x"),
    ),
)
def test_regular_expressions_that_break_or_never_end_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: quantization_config\.") as caught:
        read({**FP8, "ignored_layers": [f"re:{text}"]})
    assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="dynamic holds"):
        read({**GPTQ_4, "dynamic": {text: {}}})


@pytest.mark.parametrize(
    "text",
    (
        *(r".*self_attn.*", r"model\.layers\.(0|1|2)\..*", r"[*+(]+x\(.*\)*", "(q|k|v)?_proj"),
        *(r".*\.(?:[0-9]|1[0-7])\..*(q|k|v)_proj", "(?:.*lm_head.*|.*mtp.*)", r"^(?!.*foo).*$"),
        *(r"(.*\.0\..*)|(.*\.1\..*)|(.*\.2\..*)|(.*\.3\..*)", "a{3}(?:bc){2}d*"),
    ),
)
def test_regular_expressions_that_files_have_are_taken(text: str) -> None:
    read({**FP8, "ignored_layers": [f"re:{text}"]})


def test_a_dense_checkpoint_has_no_scheme(tmp_path: Path) -> None:
    assert read_scheme({}, tmp_path, "config.json") is None
    assert read_scheme({"quantization_config": None}, None, "config.json") is None


def test_older_files_beside_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(
        json.dumps({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"})
    )
    scheme = read_scheme({}, tmp_path, "config.json")
    assert scheme is not None and scheme.format_of(GATE) == AWQ(64)
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 3, "group_size": -1, "desc_act": True, "sym": False})
    )
    scheme = read_scheme({}, tmp_path, "config.json")
    assert scheme is not None and scheme.format_of(GATE) == GPTQ(3, 0, False)
    scheme = read_scheme({"quantization_config": AWQ_4}, tmp_path, "config.json")
    assert scheme is not None and scheme.format_of(GATE) == AWQ(128)


def test_errors_of_older_files_name_them(tmp_path: Path) -> None:
    path = tmp_path / "quantize_config.json"
    path.write_text(json.dumps({"bits": 5, "group_size": 128}))
    with pytest.raises(ConfigError, match=f"^{path}: bits is 5; supported: 2 or 3 or 4 or 8$"):
        read_scheme({}, tmp_path, "config.json")
    path.write_text("{")
    with pytest.raises(ConfigError, match=f"^{path}: not valid JSON"):
        read_scheme({}, tmp_path, "config.json")


def test_gptqmodels_rules_change_modules_or_leave_them_dense() -> None:
    rules = {
        r"-:.*\.layers\.0\..*": {},
        r"+:.*\.up_proj": {"bits": 8, "group_size": 64},
        r".*\.down_proj": {"sym": False},
        r".*": {},
    }
    scheme = read({**GPTQ_4, "dynamic": rules})
    assert scheme.format_of("model.layers.0.mlp.up_proj") is None
    assert scheme.format_of("model.layers.1.mlp.up_proj") == GPTQ(8, 64)
    assert scheme.format_of("model.layers.1.mlp.down_proj") == GPTQ(4, 128, False)
    assert scheme.format_of(GATE) == GPTQ(4, 128)


def test_gptq_of_some_modules_of_each_block() -> None:
    listed = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.gate_proj"]]
    scheme = read({**GPTQ_4, "modules_in_block_to_quantize": listed, "lm_head": True})
    assert scheme.format_of(GATE) == scheme.format_of("lm_head") == GPTQ(4, 128)
    assert scheme.format_of("model.layers.1.mlp.up_proj") is None
    assert read({**GPTQ_4, "lm_head": False}).format_of("lm_head") is None


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ({}, "quantization_config.quant_method is not there; supported: gptq, awq"),
        ({"quant_method": "hqq"}, "quantization_config.quant_method is 'hqq'; supported: gptq"),
        ({**GPTQ_4, "bits": 5}, "quantization_config.bits is 5; supported: 2 or 3 or 4 or 8"),
        ({**GPTQ_4, "bits": None}, "quantization_config.bits is not there; supported: 2"),
        ({**GPTQ_4, "bits": True}, "quantization_config.bits is True"),
        ({**GPTQ_4, "group_size": 50}, "group_size is 50; supported: -1 or a multiple of 4"),
        ({**GPTQ_4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported"),
        ({**GPTQ_4, "is_marlin_format": True}, "is_marlin_format is True; supported: false"),
        ({**GPTQ_4, "sym": 1}, "quantization_config.sym is 1; supported: true or false"),
        ({**GPTQ_4, "dynamic": {"-:(": {}}}, "dynamic holds '\\(': no regular expression"),
        ({**GPTQ_4, "dynamic": {".*": {"bits": 7}}}, r"dynamic\.\.\*\.bits is 7; supported"),
        ({**GPTQ_4, "modules_in_block_to_quantize": [1]}, "supported: lists of names"),
        ({**GPTQ_4, "modules_in_block_to_quantize": 1}, "supported: lists of names"),
        ({**GPTQ_4, "dynamic": [".*"]}, r"dynamic is \['\.\*'\]; supported: a JSON object"),
        ({**GPTQ_4, "dynamic": {".*": 8}}, r"dynamic\.\.\* is 8; supported: a JSON object"),
        ({**GPTQ_4, "bits": 4.0}, "bits is 4.0; supported: 2 or 3 or 4 or 8"),
        ({**GPTQ_4, "bits": [4]}, r"bits is \[4\]; supported: 2 or 3 or 4 or 8"),
        ({**GPTQ_4, "group_size": "128"}, "group_size is '128'; supported: -1 or a multiple"),
        ({**GPTQ_4, "quant_method": ["gptq"]}, r"quant_method is \['gptq'\]; supported: gptq"),
        ({**AWQ_4, "bits": 3}, "quantization_config.bits is 3; supported: 4"),
        ({**AWQ_4, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({**AWQ_4, "version": "GEMV_FAST"}, "version is 'gemv_fast'; supported: gemm"),
        ({**AWQ_4, "version": "marlin"}, "version is 'marlin'; supported: gemm"),
        ({**AWQ_4, "modules_to_not_convert": "lm_head"}, "supported: a list of names"),
    ),
)
def test_what_is_not_supported_is_refused_in_one_line(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}") as caught:
        read_scheme({"quantization_config": {"": 0, **values}}, None, "config.json")
    assert "\n" not in str(caught.value)
