"""AWQ checkpoints (GEMM) are read and written bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.quant.awq import AWQ, config
from octavo.quant.scheme import read_scheme
from tests.quant import slow_readers
from tests.quant.stored import declared, equal, numbers, words


def random_tensors(format: AWQ, outputs: int, inputs: int) -> dict:
    rng = np.random.default_rng(0)
    groups = inputs // (format.group or inputs)
    return {
        "qweight": words(rng, inputs, outputs // 8),
        "qzeros": words(rng, groups, outputs // 8),
        "scales": numbers(rng, groups, outputs),
    }


@pytest.mark.parametrize(
    ("group", "outputs", "inputs"), ((32, 16, 96), (64, 24, 192), (128, 8, 128), (0, 40, 36))
)
def test_reads_what_is_stored(group: int, outputs: int, inputs: int) -> None:
    format = AWQ(group)
    format.check(outputs, inputs)
    tensors = random_tensors(format, outputs, inputs)
    declared(format, tensors, outputs, inputs)
    weight = format.read(tensors, outputs, inputs)
    arrays = [tensors[name].numpy() for name in ("qweight", "qzeros", "scales")]
    equal(weight.dense(), slow_readers.awq(*arrays))
    written = format.write(weight)
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_word_packed_by_hand() -> None:
    """Outputs 0 .. 7 of one input have the codes 0 .. 7, the even ones in the lower half."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32).expand(4, 1),
        "qzeros": torch.tensor([[0x11111111]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.25, dtype=torch.float16),
    }
    weight = AWQ(0).read(tensors, 8, 4)
    assert weight.dense()[:, 3].tolist() == [(code - 1) / 4 for code in range(8)]


def test_matrices_it_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide 576 inputs"):
        AWQ(128).check(64, 576)
    with pytest.raises(ValueError, match="12 outputs of 4 bits"):
        AWQ(32).check(12, 64)


def test_its_config_is_read_back() -> None:
    values = config(AWQ(128), ("lm_head", "mlp.gate"))
    scheme = read_scheme({"quantization_config": values}, None, "config.json")
    assert scheme is not None and scheme.name == "awq"
    assert scheme.format_of("model.layers.3.mlp.gate_proj") == AWQ(128)
    assert scheme.format_of("model.layers.3.mlp.gate") is None
    assert scheme.format_of("lm_head") is None
