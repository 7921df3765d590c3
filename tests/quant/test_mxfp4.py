"""MXFP4 blocks as a weight, equal to a slow reader."""

from __future__ import annotations

import numpy as np
import torch

from octavo.quant import mxfp4
from octavo.quant.scheme import read_scheme
from tests.quant import slow_readers
from tests.quant.stored import equal


def test_reads_what_is_stored() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 3, 16), dtype=np.uint8)
    scales = rng.integers(64, 190, (6, 3), dtype=np.uint8)
    scales[0] = 0, 255, 1  # the least power, no number, the next one
    weight = mxfp4.read(torch.from_numpy(blocks), torch.from_numpy(scales))
    assert weight.shape == (6, 96) and weight.group == 32
    equal(weight.dense(), slow_readers.mxfp4(blocks, scales))


def test_its_config_leaves_projections_dense() -> None:
    values = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    scheme = read_scheme({"quantization_config": values}, None, "config.json")
    assert scheme is not None and scheme.name == "mxfp4"
    assert scheme.format_of("model.layers.0.self_attn.q_proj") is None
