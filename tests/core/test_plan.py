import dataclasses

import numpy as np
import pytest

from octavo.core.plan import Logprobs, StepPlan, StepResult, decode, encode
from tests.core.harness import Harness


def assert_equal(left, right):
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(a, b)
        elif dataclasses.is_dataclass(a):
            assert_equal(a, b)
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                if dataclasses.is_dataclass(a[key]):
                    assert_equal(a[key], b[key])
                else:
                    assert a[key] == b[key]
        else:
            assert a == b


def test_a_plan_survives_encoding():
    h = Harness()
    h.add([5, 6, 7], max_tokens=4, logit_bias={3: 1.5}, seed=2**63 + 1, stop=["x"])
    plan = h.schedule()
    assert_equal(plan, decode(encode(plan), StepPlan))


def test_a_result_survives_encoding():
    def logprobs(count):
        shape = (count, 3)
        ids, ranks = np.arange(count * 3, dtype=np.int32), np.ones(count, np.int32)
        return Logprobs(ids.reshape(shape), np.full(shape, -0.5, np.float32), ranks)

    result = StepResult(
        7,
        np.array([[4], [5]], np.int32),
        np.array([1, 1], np.int32),
        np.array([1], np.int32),
        logprobs(1),
        {0: logprobs(4)},
        grammar_ends={0: "", 1: "nothing fits"},
        busy_seconds=np.array([0.25, 0.5], np.float32),
    )
    assert_equal(result, decode(encode(result), StepResult))
    with pytest.raises(ValueError, match="StepPlan"):
        decode(encode(result), StepPlan)
