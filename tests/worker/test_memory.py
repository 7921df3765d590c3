"""How cache, lengths and defaults follow from flags, model and free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.types import ConfigError
from octavo.worker.memory import left_for_cache, plan_memory
from octavo.worker.sizes import MemoryPlan

TOKEN_BYTES = 1000
GIB = 1 << 30


def planned(
    length: int = 4096,
    available: int = 8 * GIB,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    chunked: bool = True,
    replicas: int = 1,
    **cache: int,
) -> MemoryPlan:
    config = EngineConfig(
        parallel=ParallelConfig(data_parallel_size=replicas),
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=chunked,
        ),
    )
    return plan_memory(config, lambda size: size * TOKEN_BYTES, length, available)


def test_defaults_are_given_with_their_reasons() -> None:
    plan = planned()
    assert (plan.block_size, plan.max_num_seqs, plan.max_num_batched_tokens) == (16, 128, 2048)
    assert plan.max_model_len == 4096
    assert plan.num_blocks == 128 * 256  # below 40 % of 8 GiB: all that 128 full requests can use
    assert plan.kv_cache_bytes == plan.num_blocks * 16 * TOKEN_BYTES
    assert set(plan.reasons) == {
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "max_model_len",
    }


def test_the_cache_takes_forty_percent_of_what_is_free_at_most() -> None:
    plan = planned(available=100 << 20)
    assert plan.num_blocks == int((100 << 20) * 0.4) // 16_000
    assert "40%" in plan.reasons["kv_cache_memory_bytes"]


def test_of_several_replicas_each_plans_with_its_part_of_the_memory() -> None:
    """Whatever the others have taken by now."""
    alone = ParallelConfig()
    assert left_for_cache(alone, 100, 30) == 100
    one_of_two = replace(alone, data_parallel_size=2, replica_memory=60)
    assert left_for_cache(one_of_two, 100, 20) == 40
    assert left_for_cache(one_of_two, 25, 20) == 25
    assert left_for_cache(one_of_two, 100, 70) == 0
    plan = planned(available=100 << 20, replicas=2)
    assert "in this replica's 1/2 of the memory" in plan.reasons["kv_cache_memory_bytes"]


def test_explicit_bytes_and_blocks_are_exact_and_need_no_reason() -> None:
    plan = planned(kv_cache_memory_bytes=1_000_000, max_model_len=512, max_num_seqs=4)
    assert plan.num_blocks == 62
    assert "kv_cache_memory_bytes" not in plan.reasons and "max_model_len" not in plan.reasons
    assert planned(kv_cache_memory_bytes=1_000_000, num_gpu_blocks_override=10).num_blocks == 10


@pytest.mark.parametrize("asked", [None, -1])
def test_a_length_nobody_asked_for_is_lowered_to_what_fits(asked: int | None) -> None:
    plan = planned(max_model_len=asked, num_gpu_blocks_override=10)
    assert plan.max_model_len == 160
    assert plan.reasons["max_model_len"] == (
        "lowered from the model's 4096: the KV cache holds 10 blocks of 16 tokens"
    )


def test_an_explicit_length_that_does_not_fit_is_refused_with_numbers_and_flags() -> None:
    with pytest.raises(ConfigError) as error:
        planned(max_model_len=2000, kv_cache_memory_bytes=1_000_000)
    text = str(error.value)
    assert "needs 125 KV blocks of 16 tokens (1.9 MiB), the cache has 62 (0.9 MiB" in text
    assert "--max-model-len 992, --kv-cache-memory-bytes 2000000" in text
    assert "--num-gpu-blocks-override 125" in text
    for flag, value in (
        ("max_model_len", 992),
        ("kv_cache_memory_bytes", 2_000_000),
        ("num_gpu_blocks_override", 125),
    ):
        settings = {"max_model_len": 2000, "kv_cache_memory_bytes": 1_000_000, flag: value}
        planned(**settings)


def test_a_length_above_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is above the model's maximum of 4096"):
        planned(max_model_len=5000)


def test_a_cache_too_small_for_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="use --kv-cache-memory-bytes 16000 or more"):
        planned(kv_cache_memory_bytes=100)


@pytest.mark.parametrize(
    "asked", [{"kv_cache_memory_bytes": 9 * GIB}, {"num_gpu_blocks_override": 600_000}]
)
def test_a_cache_larger_than_free_memory_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"GiB, 8\.00 GiB of memory are free"):
        planned(**asked)


def test_without_chunked_prefill_a_step_holds_the_longest_request() -> None:
    plan = planned(chunked=False)
    assert plan.max_num_batched_tokens == plan.max_model_len == 4096
    assert "split" in plan.reasons["max_num_batched_tokens"]
    assert planned(chunked=False, max_model_len=100).max_num_batched_tokens == 2048
    lowered = planned(chunked=False, max_num_batched_tokens=512)
    assert (lowered.max_num_batched_tokens, lowered.max_model_len) == (512, 512)
    assert "--max-num-batched-tokens" in lowered.reasons["max_model_len"]
    with pytest.raises(ConfigError, match=r"1000 is above --max-num-batched-tokens 512"):
        planned(chunked=False, max_num_batched_tokens=512, max_model_len=1000)
