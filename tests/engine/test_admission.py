import pytest

from octavo.config import SchedulerConfig
from octavo.core.request import worst_case_blocks
from octavo.engine.admission import QueueGate, prepare
from octavo.engine.messages import EngineInfo, unpack_ids
from octavo.types import InvalidRequest, QueueFull, SamplingParams


def info(**changes):
    facts = {
        "model": "m", "architecture": "llama", "dtype": "float32", "device": "cpu", "threads": 1,
        "vocab_size": 100,
        "max_model_len": 64, "eos_ids": [1], "block_size": 16, "num_blocks": 8, "kv_cache_bytes": 1,
        "weight_bytes": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64, "implementations": {},
        "startup_seconds": {}, "reasons": {},
    }  # fmt: skip
    return EngineInfo(**{**facts, **changes})


def prepared(ids, facts=None, **params):
    return prepare(
        facts or info(), SamplingParams(**params), ids, handle=1, request_id="r", arrival=0.0
    )


def test_length_boundary_is_exact_and_names_both_numbers():
    assert prepared([5] * 60, max_tokens=4).max_tokens == 4
    with pytest.raises(InvalidRequest, match=r"60 tokens and max_tokens is 5.* 64 ") as caught:
        prepared([5] * 60, max_tokens=5)
    assert caught.value.param == "max_tokens"
    assert prepared([5] * 63, max_tokens=None).max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"64 tokens.*64 tokens"):
        prepared([5] * 64, max_tokens=None)


def test_omitted_max_tokens_is_all_that_fits_length_and_pool():
    assert prepared([5] * 10, max_tokens=None).max_tokens == 54
    small = info(num_blocks=3)
    request = prepared([5] * 10, small, max_tokens=None)
    assert request.max_tokens == 38
    assert worst_case_blocks(10, 38, 1, 16) == 3
    assert prepared([5] * 20, small, n=2, max_tokens=None).max_tokens == 12
    with pytest.raises(InvalidRequest, match=r"4 KV cache blocks.*has 3"):
        prepared([5] * 10, small, max_tokens=39)
    with pytest.raises(InvalidRequest, match=r"whole cache has 3"):
        prepared([5] * 40, small, n=4, max_tokens=None)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"logit_bias": {191222: -100.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 100]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"n": 5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refusal_names_the_field(params, field):
    with pytest.raises(InvalidRequest) as caught:
        prepared([5, 6], **params)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "ids", [[], [100], [-1], [2**63], [2**70], [1.5], ["a"], [[1, 2]], [[1], [2, 3]]]
)
def test_bad_prompt_ids(ids):
    with pytest.raises(InvalidRequest) as caught:
        prepared(ids)
    assert caught.value.param == "prompt"


def test_truncation_keeps_the_end():
    ids = list(range(2, 92))
    assert unpack_ids(prepared(ids, truncate_prompt_tokens=3).prompt_ids).tolist() == [89, 90, 91]
    request = prepared(ids, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(unpack_ids(request.prompt_ids)) == 54


def test_top_k_beyond_the_vocabulary_is_the_vocabulary():
    assert prepared([5], top_k=10**15).params.top_k == 100


def test_gate_bounds_requests_but_not_what_free_places_take():
    gate = QueueGate(SchedulerConfig(max_num_queued_reqs=2), max_num_seqs=4)
    for _ in range(6):
        gate.check(1, 10, 0.0, num_free_slots=4)
        gate.enter(10, 0.0)
    with pytest.raises(QueueFull, match=r"6 requests are waiting, at most 2") as caught:
        gate.check(1, 10, 0.0, num_free_slots=4)
    assert caught.value.retry_after >= 1
    for _ in range(5):
        gate.leave(10, 0.1, started=True)
    gate.check(1, 10, 0.1, num_free_slots=0)


def test_gate_bounds_tokens_but_takes_one_request_of_any_length():
    gate = QueueGate(SchedulerConfig(max_num_queued_tokens=100), max_num_seqs=4)
    gate.check(1, 1000, 0.0)
    gate.enter(90, 0.0)
    with pytest.raises(QueueFull, match="prompt tokens"):
        gate.check(1, 11, 0.0)
    gate.check(1, 10, 0.0)


def test_gate_predicts_the_wait_from_the_measured_rate():
    gate = QueueGate(SchedulerConfig(max_queue_wait=5.0), max_num_seqs=100)
    for _ in range(20):
        gate.enter(100, 0.0)
    assert gate.predicted_wait(0.5) == 0.0  # nothing to predict from
    for second in range(1, 11):
        gate.leave(100, float(second), started=True)
    assert 9.0 < gate.predicted_wait(10.0) < 11.5  # 1000 tokens wait, about 100 start per second
    with pytest.raises(QueueFull, match="predicted wait"):
        gate.check(1, 100, 10.0)
    assert gate.predicted_wait(40.0) > 20.0  # nothing started any more
