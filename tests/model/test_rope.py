"""T47b: rope scalings against transformers, below and above the original length."""

from __future__ import annotations

import json

import pytest
import torch

from octavo.model.facts import read_spec
from octavo.types import ConfigError
from tests.model.running import all_logits, load, random_ids, reference_logits, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.1, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
}
SCALINGS = {  # name -> (scaling, max_position_embeddings, longest context)
    "linear": ({"rope_type": "linear", "factor": 2.0}, 64, 128),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 64, 128),
    "llama3": (LLAMA3, 256, 256),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        64,
        256,
    ),
    "yarn-tuned": (
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        128,
        128,
    ),
    "longrope": (
        {**LONG, "original_max_position_embeddings": 64, "factor": 4.0},
        256,
        256,
    ),
    "longrope-tuned": (
        {**LONG, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        128,
        128,
    ),
}


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    scaling, original, longest = SCALINGS[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    model = write_checkpoint(
        path,
        "Llama",
        max_position_embeddings=original,
        rope_parameters={"rope_theta": 500.0, **scaling},
    )
    return path, model, longest


@pytest.mark.parametrize("checkpoint", SCALINGS, indirect=True)
@pytest.mark.parametrize("chunk", (None, 13))
@pytest.mark.parametrize("length", (50, 120))
def test_logits_equal_transformers(checkpoint, length, chunk):
    path, reference, longest = checkpoint
    model, ids = load(path), random_ids(length)
    assert model.spec.max_position == longest
    found = all_logits(model, ids, chunk)
    expected = reference_logits(reference, ids, chunk)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ("longrope", "su", "yarn"))
@pytest.mark.parametrize("length", (50, 120))
def test_longrope_of_a_part_of_each_head(tmp_path, kind, length):
    """Phi-3's way: the original length stands beside the scaling, whose name has changed twice."""
    scaling = {**LONG, "short_factor": LONG["short_factor"][:6], "long_factor": [2.0] * 6}
    reference = write_checkpoint(
        tmp_path,
        "Phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_scaling={**scaling},
    )
    del scaling["rope_type"]
    edit(
        tmp_path,
        rope_parameters=None,
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
        rope_scaling={**scaling, "type": kind},
    )
    model, ids = load(tmp_path), random_ids(length)
    assert model.spec.max_position == 256
    torch.testing.assert_close(
        all_logits(model, ids, 13), reference_logits(reference, ids, 13), atol=1e-4, rtol=1e-4
    )


def edit(path, **changes):
    file = path / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(values))
    return values


def test_old_and_new_spellings_are_the_same(tmp_path):
    write_checkpoint(tmp_path, "Llama", rope_parameters={"rope_theta": 500.0, **LLAMA3})
    new = read_spec(tmp_path)
    old = {**LLAMA3}
    old["type"] = old.pop("rope_type")
    edit(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=old)
    assert read_spec(tmp_path) == new


@pytest.mark.parametrize("scaling", (None, {}, {"rope_type": "default"}, {"type": "default"}))
def test_no_scaling(tmp_path, scaling):
    write_checkpoint(tmp_path, "Llama")
    edit(tmp_path, rope_scaling=scaling)
    assert read_spec(tmp_path).layers[0].mixer.rope.scaling is None


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "short_factor is missing"),
        ({**LONG, "long_factor": [1.0] * 7}, "long_factor is .*supports a list of 8 numbers"),
        ({"type": "su"}, "type is 'su'"),
        ({"type": "proportional"}, "one of default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": "big"}, "factor is 'big'"),
        ({"factor": 2.0}, "without a rope_type"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ("linear", "rope_scaling is 'linear'"),
    ],
)
def test_bad_scaling_is_refused_by_name(tmp_path, scaling, message):
    write_checkpoint(tmp_path, "Llama")
    edit(tmp_path, rope_scaling=scaling)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)
