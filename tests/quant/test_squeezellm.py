"""SqueezeLLM checkpoints: tables of outputs, outliers by rows, and how their config says it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.quant.scheme import read_scheme
from octavo.quant.squeezellm import SqueezeLLM, config
from octavo.types import ConfigError
from tests.quant import slow_readers
from tests.quant.stored import declared, equal, numbers, words

OUTPUTS, INPUTS = 6, 64
UP = "model.layers.0.mlp.up_proj"


def random_tensors(bits: int, sparse: bool, dtype: torch.dtype = torch.float32) -> dict:
    rng = np.random.default_rng(0)
    tensors = {
        "qweight": words(rng, INPUTS * bits // 32, OUTPUTS),
        "lookup_table": numbers(rng, OUTPUTS, 1 << bits, dtype=dtype),
    }
    if sparse:
        counts = (3, 0, 1, 5, 0, 2)  # rows without any, the last one with some
        columns = [np.sort(rng.choice(INPUTS, count, replace=False)) for count in counts]
        tensors |= {
            "rows": torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            "cols": torch.from_numpy(np.concatenate(columns)).int(),
            "vals": numbers(rng, sum(counts), dtype=torch.float32),
        }
    return tensors


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("bits", (3, 4))
def test_reads_what_is_stored(bits: int, sparse: bool, dtype: torch.dtype) -> None:
    format, tensors = SqueezeLLM(bits), random_tensors(bits, sparse, dtype)
    format.check(OUTPUTS, INPUTS)
    declared(format, tensors, OUTPUTS, INPUTS)
    weight = format.read(tensors, OUTPUTS, INPUTS)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    outliers = (arrays["rows"], arrays["cols"], arrays["vals"]) if sparse else None
    slow = slow_readers.squeezellm(arrays["qweight"], arrays["lookup_table"], outliers, bits)
    equal(weight.dense(), slow)
    equal(weight[2:5].dense(), slow[2:5])
    written = format.write(weight)
    assert set(written) == set(tensors)
    assert all(
        torch.equal(written[name], tensor.to(written[name])) for name, tensor in tensors.items()
    )


def test_a_row_of_outliers_by_hand() -> None:
    """Eight inputs of one output: codes 0 .. 7, number n / 4 for code n; 10 more at input 5."""
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "lookup_table": torch.arange(16.0)[None] / 4,
        "rows": torch.tensor([0, 1], dtype=torch.int32),
        "cols": torch.tensor([5], dtype=torch.int32),
        "vals": torch.tensor([10.0]),
    }
    weight = SqueezeLLM(4).read(tensors, 1, 8)
    assert weight.dense()[0].tolist() == [0, 0.25, 0.5, 0.75, 1, 11.25, 1.5, 1.75]


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"rows": [0, 3, 3, 4, 9, 9]}, "rows does not ascend from 0 over 7 numbers"),
        ({"rows": [0, 3, 2, 4, 9, 9, 11]}, "rows does not ascend from 0"),
        ({"rows": [0, 2**31 - 1, -(2**31), -1, 9, 9, 11]}, "rows does not ascend from 0"),
        ({"rows": [1, 3, 3, 4, 9, 9, 11]}, "rows does not ascend from 0"),
        ({"rows": [0, 3, 3, 4, 9, 9, 10]}, "rows end at 10, but there are 11 cols, 11 vals"),
        ({"cols": [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 64]}, "cols holds 0 to 64, of 64"),
        ({"cols": [-1, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]}, "cols holds -1 to 4, of 64"),
        ({"cols": [0, 2, 2, 3, 0, 1, 2, 3, 4, 0, 1]}, "cols does not ascend within a row"),
        ({"vals": [float("nan")] * 11}, "vals holds numbers that are not finite"),
        ({"lookup_table": [[float("inf")] * 16] * 6}, "lookup_table holds numbers that are not"),
        ({"cols": None}, "outliers need rows, cols and vals, there is only rows, vals"),
    ),
)
def test_outliers_that_mean_nothing_are_refused(changes: dict, message: str) -> None:
    tensors = random_tensors(4, True)
    for name, values in changes.items():
        stored = tensors.pop(name)
        if values is not None:
            tensors[name] = torch.tensor(values, dtype=stored.dtype)
    with pytest.raises(ValueError, match=message):
        SqueezeLLM(4).read(tensors, OUTPUTS, INPUTS)


def test_inputs_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(ValueError, match="40 inputs of 3 bits do not fill whole words"):
        SqueezeLLM(3).check(8, 40)


def test_how_its_config_is_told(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(json.dumps({"wbits": 3}))
    scheme = read_scheme({}, tmp_path, "config.json")
    assert scheme is not None and scheme.name == "squeezellm"
    assert scheme.format_of(UP) == SqueezeLLM(3)
    values = config(SqueezeLLM(4))
    scheme = read_scheme({"quantization_config": values}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == SqueezeLLM(4)
    assert scheme.format_of("lm_head") is None
    values = {"quant_method": "squeezellm", "bits": 4}
    scheme = read_scheme({"quantization_config": values}, None, "config.json")
    assert scheme is not None and scheme.format_of(UP) == SqueezeLLM(4)
    with pytest.raises(ConfigError, match="wbits is 2; supported: 3 or 4"):
        read_scheme({"quantization_config": {**values, "wbits": 2}}, None, "config.json")
