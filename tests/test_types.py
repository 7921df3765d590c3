import math

import pytest

from octavo.types import InvalidRequest, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, 1.5, None)),
        *(("temperature", value) for value in (-0.1, 2.1, math.nan, "1")),
        *(("top_p", value) for value in (0.0, 1.1)),
        *(("top_k", value) for value in (-2, 1.5, None)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("presence_penalty", value) for value in (-2.1, 2.1)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1)),
        *(("repetition_penalty", value) for value in (0.0, math.inf, None)),
        *(("max_tokens", value) for value in (-1, 1.5, "5")),
        *(("min_tokens", value) for value in (-1, 17, 0.5)),
        *(("seed", value) for value in (2**64, 1.5)),
        *(("logprobs", value) for value in (-2, 1.5)),
        *(("prompt_logprobs", value) for value in (-2, 1.5)),
        *(("stop", value) for value in ([""], [1])),
        *(("bad_words", value) for value in ([""], [None])),
        ("stop_token_ids", [1.5]),
        *(("allowed_token_ids", value) for value in ([], ["a"])),
        *(("logit_bias", value) for value in ({5: 101.0}, {5: "a"}, {"a": 1.0})),
    ],
)
def test_a_value_out_of_range_or_of_another_type_names_its_field(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_the_ends_of_ranges_are_inside():
    SamplingParams(n=1, temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, seed=-(2**63))
    SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, logit_bias={5: -100.0})
    SamplingParams(max_tokens=None, min_tokens=16, logprobs=-1, prompt_logprobs=0)
    assert SamplingParams(stop="end").stop == ["end"]
