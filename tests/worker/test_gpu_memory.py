"""How a GPU's memory is divided, and what is said when it does not suffice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.flags import from_flags
from octavo.types import ConfigError
from octavo.worker.gpu_memory import (
    MARGIN,
    GpuMemory,
    gpu_sizes,
    out_of_memory,
    plan_gpu_memory,
)
from octavo.worker.sizes import MemoryPlan

GIB = 1 << 30
TOKEN_BYTES = 128 << 10  # Llama-8B: 32 layers, 8 heads of 128, K and V, BF16
H200 = GpuMemory(
    total=140 * GIB,
    free=139 * GIB,
    weights=15 * GIB,
    slots=GIB,
    activations=2 * GIB,
    graphs=GIB,
)


def measured(memory: GpuMemory, config: EngineConfig, length: int) -> GpuMemory:
    """``memory`` as a worker would measure it: linear in tokens and rows."""
    base, now = (
        gpu_sizes(EngineConfig(), length, memory.total),
        gpu_sizes(config, length, memory.total),
    )
    tokens = now.max_num_batched_tokens / base.max_num_batched_tokens
    rows = now.max_num_seqs / base.max_num_seqs
    return replace(
        memory,
        activations=int(memory.activations * tokens),
        slots=int(memory.slots * rows),
        graphs=0 if config.enforce_eager else int(memory.graphs * rows),
    )


def planned(memory: GpuMemory = H200, length: int = 131_072, **flags: object) -> MemoryPlan:
    config = from_flags(EngineConfig, flags)
    sizes = gpu_sizes(config, length, memory.total)
    found = measured(memory, config, length)
    return plan_gpu_memory(config, sizes, lambda size: size * TOKEN_BYTES, found)


def refused(memory: GpuMemory = H200, length: int = 131_072, **flags: object) -> str:
    with pytest.raises(ConfigError) as error:
        planned(memory, length, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_each_flag_helps(text: str, memory: GpuMemory, length: int, **flags: object) -> int:
    """Every flag that the message proposes does, alone. Returns how many there are."""
    proposed = re.findall(r"(--[a-z-]+)(?: ([0-9.]+))?", text.rpartition(": use ")[2])
    for name, value in proposed:
        typed = True if not value else float(value) if "." in value else int(value)
        planned(memory, length, **{**flags, name[2:].replace("-", "_"): typed})
    return len(proposed)


def test_defaults_of_a_large_and_of_a_small_gpu() -> None:
    large, small = planned(), planned(GpuMemory(24 * GIB, 23 * GIB, 2 * GIB), length=4096)
    assert (large.block_size, large.max_num_seqs, large.max_num_batched_tokens) == (64, 1024, 8192)
    assert (small.block_size, small.max_num_seqs, small.max_num_batched_tokens) == (64, 256, 2048)
    assert large.reasons["block_size"] == "faster than 16 on CUDA"
    assert "70 GiB or more" in large.reasons["max_num_seqs"]
    asked = planned(block_size=16, max_num_seqs=7, max_num_batched_tokens=100)
    assert (asked.block_size, asked.max_num_seqs, asked.max_num_batched_tokens) == (16, 7, 100)
    assert not {"block_size", "max_num_seqs", "max_num_batched_tokens"} & set(asked.reasons)


def test_everything_together_is_the_share_this_instance_may_use() -> None:
    for share in (0.5, 0.92):
        plan = planned(gpu_memory_utilization=share)
        whole = plan.kv_cache_bytes + H200.fixed
        assert 0 <= share * H200.total - whole < 64 * TOKEN_BYTES + 1
        assert plan.max_model_len == 131_072
    assert (
        "what --gpu-memory-utilization 0.92 leaves of 140.00 GiB in all"
        in (plan.reasons["kv_cache_memory_bytes"])
    )
    assert (
        "weights 15.00 GiB, slots 1.00 GiB, activations 2.00 GiB, graphs 1.00 GiB"
        in (plan.reasons["kv_cache_memory_bytes"])
    )


def test_what_other_processes_hold_is_not_planned_with() -> None:
    shared = replace(H200, free=60 * GIB)
    plan = planned(shared)
    assert 0 <= shared.free - MARGIN - shared.fixed - plan.kv_cache_bytes < 64 * TOKEN_BYTES
    reason = plan.reasons["kv_cache_memory_bytes"]
    assert reason.startswith("all that is free of") and "held by others 80.00 GiB" in reason
    half = planned(replace(H200, free=75 * GIB), gpu_memory_utilization=0.4)
    assert 0 <= 56 * GIB - H200.fixed - half.kv_cache_bytes < 64 * TOKEN_BYTES + 1


def test_a_small_model_takes_no_more_than_its_requests_can_use() -> None:
    plan = planned(length=1024, max_num_seqs=8)
    assert plan.num_blocks == 8 * 16
    assert "full length" in plan.reasons["kv_cache_memory_bytes"]


def test_explicit_bytes_and_blocks_are_exact() -> None:
    plan = planned(kv_cache_memory_bytes=100 * 64 * TOKEN_BYTES + 5, max_model_len=512)
    assert plan.num_blocks == 100 and "kv_cache_memory_bytes" not in plan.reasons
    both = planned(kv_cache_memory_bytes=GIB, num_gpu_blocks_override=10)
    assert both.num_blocks == 10 and both.max_model_len == 640
    beyond_the_share = planned(kv_cache_memory_bytes=115 * GIB)
    assert beyond_the_share.kv_cache_bytes > 0.92 * H200.total - H200.fixed


@pytest.mark.parametrize(
    "asked", [{"kv_cache_memory_bytes": 121 * GIB}, {"num_gpu_blocks_override": 16_000}]
)
def test_a_cache_larger_than_what_remains_is_refused(asked: dict[str, int]) -> None:
    text = refused(**asked)
    assert "119.50 GiB of the GPU's memory remain for it (140.00 GiB in all" in text


def test_a_length_nobody_asked_for_is_lowered_to_what_fits() -> None:
    tight = replace(H200, free=25 * GIB)
    plan = planned(tight)
    assert plan.max_model_len == plan.num_blocks * 64 < 131_072
    assert "lowered from the model's 131072: the KV cache holds" in plan.reasons["max_model_len"]


def test_an_explicit_length_that_does_not_fit_is_refused_with_flags_that_help() -> None:
    tight = GpuMemory(24 * GIB, 23 * GIB, 15 * GIB, GIB // 4, 2 * GIB, GIB // 2)
    flags = {"max_model_len": 40_000}
    text = refused(tight, **flags)
    assert (
        "--max-model-len 40000 needs 625 KV blocks of 64 tokens (4.88 GiB), the cache has" in text
    )
    assert "24.00 GiB in all; held by others 1.00 GiB, weights 15.00 GiB" in text
    assert assert_each_flag_helps(text, tight, 131_072, **flags) == 3


@pytest.mark.parametrize(
    ("memory", "flags", "count"),
    [
        # Room for nothing under the share, but on the card: all that gives it more.
        (GpuMemory(24 * GIB, int(23.5 * GIB), 20 * GIB, GIB // 4, 2 * GIB, GIB // 2), {}, 3),
        # The share is not what binds: other processes do.
        (GpuMemory(80 * GIB, 19 * GIB, 15 * GIB, GIB, 2 * GIB, GIB), {}, 3),
        # Eager already, few rows: only the tokens of a step are left.
        (
            GpuMemory(80 * GIB, 17 * GIB, 15 * GIB, 1 << 20, 4 * GIB, GIB),
            {"enforce_eager": True, "max_num_seqs": 4},
            1,
        ),
    ],
)
def test_no_room_at_all_is_told_with_flags_that_help(
    memory: GpuMemory, flags: dict[str, object], count: int
) -> None:
    text = refused(memory, **flags)
    assert "a request of 16 tokens needs 1 KV blocks" in text and "the cache has 0" in text
    assert assert_each_flag_helps(text, memory, 131_072, **flags) == count


def test_weights_that_leave_nothing_are_told_as_such() -> None:
    text = refused(GpuMemory(24 * GIB, 16 * GIB, 15 * GIB, GIB, GIB, 0))
    assert "held by others 8.00 GiB" in text
    assert text.endswith("use a smaller model, or a GPU with more memory free")


def test_too_few_explicit_blocks_for_the_length_name_their_own_flag() -> None:
    flags = {"max_model_len": 1000, "num_gpu_blocks_override": 4}
    text = refused(**flags)
    assert "use --max-model-len 256, --num-gpu-blocks-override 16 or no" in text
    planned(**{**flags, "num_gpu_blocks_override": 16})
    flags = {"max_model_len": 1000, "kv_cache_memory_bytes": 4 * 64 * TOKEN_BYTES}
    assert assert_each_flag_helps(refused(**flags), H200, 131_072, **flags) == 2


def test_an_allocation_that_fails_anyway_names_phase_numbers_and_flags() -> None:
    config = EngineConfig()
    sizes = gpu_sizes(config, 4096, H200.total)
    for phase in ("profile", "cache", "graphs"):
        text = str(out_of_memory(phase, config, sizes, H200))
        assert f"phase: {phase}; 140.00 GiB in all" in text
        flags = re.findall(r"--[a-z-]+", text.rpartition(": use")[2])
        assert len(flags) == 3 and set(flags) < {
            "--max-num-batched-tokens",
            "--max-num-seqs",
            "--max-model-len",
            "--gpu-memory-utilization",
            "--enforce-eager",
        }
    assert "smaller model" in str(out_of_memory("weights", config, sizes, H200))
