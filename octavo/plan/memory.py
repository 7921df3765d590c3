"""What each rank holds, what is left for a KV cache, and what that is good for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.model.loader.sizes import divided, weight_bytes
from octavo.model.shard import Shard, check_divisible
from octavo.model.spec import MLASpec, MoESpec
from octavo.model.stages import Stage, all_layers
from octavo.model.structure import Structure, kv_bytes_per_block, structure_of
from octavo.plan.checkpoint import Checkpoint, cache_itemsize
from octavo.plan.hardware import CONTEXT_BYTES, NCCL_BYTES
from octavo.types import ConfigError
from octavo.worker.gpu_memory import GpuMemory, gpu_sizes, plan_gpu_memory
from octavo.worker.memory import CPU_DEFAULTS, plan_memory
from octavo.worker.sizes import MemoryPlan, Sizes, blocks_for, settle_sizes, shown

# Rows beyond --max-num-seqs that a captured step may have, and libraries' workspaces in graphs
# (worker/graphs.py, worker/cuda_runner.py).
SPARE_ROWS = 64
WORKSPACES = 256 << 20
_COLUMNS = 4 * 2 * (16 + 16)  # bytes of a slot's parameters, about


@dataclass(frozen=True)
class Rank:
    """Bytes of one device's share; ``kv_block``: of a block of the KV cache as a function of its
    tokens."""

    shard: Shard
    structure: Structure
    weights: int
    kv_block: Callable[[int], int]

    @property
    def stage(self) -> Stage:
        return self.structure.stage


@dataclass(frozen=True)
class Fit:
    """``plan``: None where it does not fit, for the ``problem``. ``per_rank``: what the fullest
    rank holds, in bytes. ``estimated``: activations and graphs are (on a CPU there are none)."""

    plan: MemoryPlan | None
    problem: str
    per_rank: dict[str, int]
    estimated: bool

    @property
    def concurrency(self) -> float:
        """Requests of full length that the KV cache holds at once."""
        if self.plan is None:
            return 0.0
        each = blocks_for(self.plan.max_model_len, self.plan.block_size)
        return self.plan.num_blocks / each


def ranks_of(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: str,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    all_ranks: bool = False,
) -> list[Rank]:
    """The first rank of each stage, which has the largest share of its layers, or all. Raises
    ConfigError, naming what cannot be divided, where the model cannot be spread so."""
    spec, rounding = checkpoint.spec, checkpoint.quantization.rounding
    check_divisible(spec, tensor_size, pipeline_size)
    stages, computing = [all_layers(len(spec.layers))], checkpoint.computing(device)
    if pipeline_size > 1:
        whole = structure_of(spec, rounding=rounding, alike=checkpoint.alike)
        stages = divided(whole, checkpoint.stored, computing, pipeline_size)
    found = []
    for stage in stages:
        for index in range(tensor_size if all_ranks else 1):
            shard = Shard(index, tensor_size)
            structure = structure_of(spec, shard, stage, rounding, checkpoint.alike)
            size, _ = weight_bytes(structure, checkpoint.stored, computing)
            kv_block = _kv_block(checkpoint, config, structure, shard, device)
            found.append(Rank(shard, structure, size, kv_block))
    return found


def _kv_block(
    checkpoint: Checkpoint, config: EngineConfig, structure: Structure, shard: Shard, device: str
) -> Callable[[int], int]:
    asked = config.cache.kv_cache_dtype
    itemsize = cache_itemsize(config, checkpoint)
    if itemsize == 1 and any(isinstance(x.mixer, MLASpec) for x in structure.spec.layers):
        raise ConfigError(
            f"--kv-cache-dtype {asked}: not for latent attention, whose cache is compressed; use "
            "auto"
        )
    tiled = device == "cpu" and checkpoint.dtype != "float16"
    rounded = asked == "int8"
    return lambda tokens: kv_bytes_per_block(structure, shard, tokens, itemsize, tiled, rounded)


def fit_gpu(config: EngineConfig, ranks: list[Rank], total: int, dtype_bytes: int) -> Fit:
    """On GPUs of ``total`` bytes each, with nothing else on them."""
    spec, several = ranks[0].structure.spec, len(ranks) > 1 or ranks[0].shard.size > 1
    weights = max(rank.weights for rank in ranks)
    try:
        sizes = gpu_sizes(config, spec.max_position, total)
    except ConfigError as error:
        return Fit(None, str(error), {"weights": weights}, True)
    taken = CONTEXT_BYTES + (NCCL_BYTES if several else 0)
    memory = GpuMemory(
        total,
        total - taken,
        weights,
        slots_bytes(sizes, spec.vocab_size),
        max(activation_bytes(rank, sizes, dtype_bytes) for rank in ranks),
        0 if config.enforce_eager else graph_bytes(sizes, spec.vocab_size),
    )
    parts = {
        "weights": weights,
        "slots": memory.slots,
        "activations": memory.activations,
        "graphs": memory.graphs,
        "cuda": taken,
        "left_for_cache": memory.allowed(config.cache.gpu_memory_utilization),
    }
    if weights > memory.free:
        need, free = shown(weights), shown(memory.free)
        problem = f"the weights of a rank need {need}, {free} of {shown(total)} can be free"
        return Fit(None, problem, parts, True)
    fullest = max(ranks, key=lambda rank: rank.kv_block(sizes.block_size))
    try:
        plan = plan_gpu_memory(config, sizes, fullest.kv_block, memory)
    except ConfigError as error:
        return Fit(None, str(error), parts, True)
    return Fit(plan, "", {**parts, "kv_cache": plan.kv_cache_bytes}, True)


def fit_cpu(config: EngineConfig, ranks: list[Rank], available: int) -> Fit:
    """On a CPU with ``available`` bytes before anything is loaded, of which ranks have an equal
    part."""
    weights = sum(rank.weights for rank in ranks)
    spec = ranks[0].structure.spec
    parts = {"weights": max(rank.weights for rank in ranks)}
    parts["left_for_cache"] = left = max(0, available - weights) // len(ranks)
    if weights > available:
        problem = f"the weights need {shown(weights)}, {shown(available)} of memory are free"
        return Fit(None, problem, parts, False)
    size = settle_sizes(config, CPU_DEFAULTS, spec.max_position).block_size
    fullest = max(ranks, key=lambda rank: rank.kv_block(size))
    try:
        plan = plan_memory(config, fullest.kv_block, spec.max_position, left)
    except ConfigError as error:
        return Fit(None, str(error), parts, False)
    return Fit(plan, "", {**parts, "kv_cache": plan.kv_cache_bytes}, False)


def slots_bytes(sizes: Sizes, vocabulary: int) -> int:
    """State of requests that outlives a step (worker/device_tables.py)."""
    places = sizes.max_model_len + 1
    blocks = blocks_for(places, sizes.block_size)
    return sizes.max_num_seqs * (4 * (places + blocks) + 2 * vocabulary + _COLUMNS)


def graph_bytes(sizes: Sizes, vocabulary: int) -> int:
    """Of the largest captured step: its logits in FP32, and workspaces."""
    return (sizes.max_num_seqs + SPARE_ROWS) * vocabulary * 4 + WORKSPACES


def activation_bytes(rank: Rank, sizes: Sizes, itemsize: int) -> int:
    """Of the largest step: either its draw (logits twice in FP32), or its widest layer beside the
    logits."""
    spec = rank.structure.spec
    rows, tokens = sizes.max_num_seqs, sizes.max_num_batched_tokens
    logits = rows * spec.vocab_size * 4
    streams = 2 * tokens * spec.hidden_size * itemsize
    widest = 0
    for layer in spec.layers:
        inner = layer.mlp.intermediate_size
        if isinstance(layer.mlp, MoESpec):
            inner *= layer.mlp.router.top_k
        widest = max(widest, 2 * inner // rank.shard.size)
    return max(2 * logits, logits + tokens * widest * itemsize) + streams


def with_layout(config: EngineConfig, tp: int, pp: int, dp: int) -> EngineConfig:
    parallel = replace(
        config.parallel,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )
    return replace(config, parallel=parallel)
