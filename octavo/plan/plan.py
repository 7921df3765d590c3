"""All that ``octavo plan`` says of a model on a machine, as data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from octavo.config import EngineConfig
from octavo.plan.checkpoint import Checkpoint, kept_as
from octavo.plan.choices import (
    Kept,
    Layout,
    Load,
    Target,
    fit,
    kept_plainly,
    layout_of,
    layouts,
    timed,
    ways_to_keep,
)
from octavo.plan.hardware import EFFICIENCIES, MEASURED, efficiency_of
from octavo.plan.memory import Fit, Rank, ranks_of, with_layout
from octavo.plan.roofline import Times

_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Serve:
    """The command that was asked about. ``model``: as it was named; ``given``: the flags, by their
    spelling."""

    model: str
    given: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str, without: Sequence[str] = (), model: str | None = None) -> str:
        """With flags added, which replace those given, and some left out."""
        new = [word for word in words if word.startswith("-")]
        kept = {
            flag: value
            for flag, value in self.given.items()
            if flag not in without and flag not in new
        }
        parts = ["octavo", "serve", model or self.model]
        for flag, value in kept.items():
            parts += [flag, value] if value else [flag]
        return shlex.join([*parts, *words])


@dataclass(frozen=True)
class Advice:
    """An answer to a line of the guide. ``line``: what it says; ``number``, ``reason``: of this
    model on this machine; ``command``: to be pasted."""

    line: str
    number: str
    reason: str
    command: str


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds. ``kv_bytes_per_token``: of the whole model, on one device;
    ``kv_load_bytes``: of the load. ``weights``: of each rank in order. ``devices_needed``: the
    fewest of 1, 2, 4, 8, 16 that hold the model by tensor parallelism; None: more."""

    checkpoint: Checkpoint
    config: EngineConfig
    target: Target
    load: Load
    serve: Serve
    layout: Layout
    ranks: list[Rank]
    weights: list[int]
    kv_bytes_per_token: float
    fit: Fit
    one: Times | None
    many: Times | None
    layouts: list[Layout]
    kept: list[Kept]
    devices_needed: int | None

    @property
    def kv_load_bytes(self) -> int:
        return int(self.kv_bytes_per_token * self.load.tokens * self.load.requests)

    @property
    def tokens(self) -> int:
        """That the KV cache of a replica holds."""
        plan = self.fit.plan
        return 0 if plan is None else plan.num_blocks * plan.block_size


def make_plan(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, load: Load, serve: Serve
) -> Plan:
    """Of the layout that the flags give, or, where they give none, of the best one for
    ``target.count`` devices. Raises ConfigError where the model cannot be divided as asked."""
    parallel = config.parallel
    every = layouts(checkpoint, config, target, load)
    asked = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if {"-tp", "-pp", "-dp"} & set(serve.given) or not every:
        dp = parallel.data_parallel_size
        layout = layout_of(checkpoint, config, target, load, *asked, dp)
    else:
        layout = every[0]
        serve = replace(serve, given={**serve.given, **_pairs(layout.flags)})
    tp, pp = layout.tp, layout.pp
    config = with_layout(config, tp, pp, layout.dp)
    if target.device == "cpu":  # replicas share the memory
        target = replace(target, memory_bytes=target.memory_bytes // layout.dp)
    ranks = ranks_of(checkpoint, config, target.device, tp, pp, all_ranks=True)
    found = fit(config, ranks, target, checkpoint)
    block = 64 if found.plan is None else found.plan.block_size
    whole = ranks_of(checkpoint, config, target.device)[0]
    firsts = [rank for rank in ranks if rank.shard.rank == 0]
    return Plan(
        *(checkpoint, config, target, load, serve, layout, ranks),
        weights=[rank.weights for rank in ranks],
        kv_bytes_per_token=whole.kv_block(block) / block,
        fit=found,
        one=timed(checkpoint, firsts, target, found),
        many=layout.many,
        layouts=every,
        kept=ways_to_keep(checkpoint, config, target, tp, pp),
        devices_needed=_needed(checkpoint, config, target, load),
    )


def alternative(plan: Plan) -> Plan:
    """The plan itself where it fits, else with the largest weights that do, or on as many devices
    as it takes; itself where nothing helps."""
    if plan.fit.plan is not None:
        return plan
    given = dict(plan.serve.given)
    names = [kept.flags[1] for kept in plan.kept if kept.fits and kept.flags and not kept.note]
    if names := [name for name in names if name != "awq"]:
        found = kept_as(
            kept_plainly(plan.checkpoint), plan.config.model, names[0], plan.target.device
        )
        model = replace(plan.config.model, quantization=names[0])
        serve = replace(plan.serve, given={**given, "-q": names[0], **_pairs(plan.layout.flags)})
        config = replace(plan.config, model=model)
        return make_plan(found, config, plan.target, plan.load, serve)
    if plan.devices_needed is None or plan.devices_needed <= plan.layout.tp:
        return plan
    kept_flags = {name: text for name, text in given.items() if name not in ("-pp", "-dp")}
    count = str(plan.devices_needed)
    serve = replace(plan.serve, given={**kept_flags, "-tp": count})
    config = with_layout(plan.config, plan.devices_needed, 1, 1)
    target = replace(plan.target, count=plan.devices_needed)
    return make_plan(plan.checkpoint, config, target, plan.load, serve)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2]))


def _needed(checkpoint: Checkpoint, config: EngineConfig, target: Target, load: Load) -> int | None:
    if target.device == "cpu":
        return None
    for count in _COUNTS:
        if layout_of(checkpoint, config, target, load, count, 1, 1).fits:
            return count
    return None


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on."""
    found = []
    if plan.checkpoint.from_config:
        found.append("there are no safetensors headers here: weights are counted from config.json")
    if plan.target.device == "cpu":
        return [*found, "octavo's own kernels for CPUs; times are not predicted for CPUs"]
    found.append(
        "activations and graphs are estimated (four starts on an H200 had 0.1 to 0.6 % fewer KV "
        "blocks than planned), and nothing else is on the GPU"
    )
    gpu = plan.target.gpu
    if gpu is None or not gpu.has_rates:
        return [*found, "times: the rates of this GPU are not known (--gpu NAME)"]
    row, used, is_measured = efficiency_of(plan.checkpoint.kept)
    found.append(
        f"{gpu.name}: {gpu.bytes_per_second / 1e12:g} TB/s, {gpu.flops / 1e12:g} TFLOP/s in 16 "
        f"bits, {gpu.link} {gpu.link_bytes / 1e9:g} GB/s one way: its data sheet, not measured"
    )
    own = gpu.name == MEASURED and is_measured
    found.append(
        f"efficiency {used.memory:g} of bandwidth and {used.compute:g} of peak FLOPs: "
        + ("" if own else f"assumed, taken from {row} on an H200, ")
        + f"measured on an H200 with Llama-3.1-8B's shape ({used.source})"
    )
    found.append(
        "fp8, awq and gptq have figures of their own; int8 and compressed-tensors are taken as "
        "fp8, all other formats as gptq"
    )
    if plan.layout.tp > 1:
        found.append(
            f"sums over ranks: a ring at the link's rate and {gpu.link_seconds * 1e6:g} us each, "
            "assumed; NCCL's buffers: 512 MiB a rank, assumed"
        )
    return found


def as_json(plan: Plan, oom: Sequence[Advice], tuning: Sequence[Advice]) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    checkpoint, memory = plan.checkpoint, plan.fit.plan
    return {
        "model": plan.serve.model,
        "architecture": checkpoint.spec.architecture,
        "dtype": checkpoint.dtype,
        "quantization": checkpoint.kept,
        "counted_from": "config.json" if checkpoint.from_config else "headers",
        "device": asdict(plan.target),
        "load": asdict(plan.load),
        "layout": _layout(plan.layout),
        "weight_bytes": sum(plan.weights),
        "weight_bytes_per_rank": plan.weights,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_load_bytes": plan.kv_load_bytes,
        "fits": memory is not None,
        "problem": plan.fit.problem,
        "memory_per_rank": plan.fit.per_rank,
        "plan": None if memory is None else asdict(memory),
        "tokens_in_cache": plan.tokens,
        "concurrency": plan.fit.concurrency,
        "one_request": _times(plan.one),
        "under_load": _times(plan.many),
        "layouts": [_layout(layout) for layout in plan.layouts],
        "weights_kept_as": [{**asdict(kept), "one": _times(kept.one)} for kept in plan.kept],
        "devices_needed": plan.devices_needed,
        "out_of_memory": [asdict(advice) for advice in oom],
        "tuning": [asdict(advice) for advice in tuning],
        "command": plan.serve.command(),
        "assumptions": assumptions(plan),
        "efficiencies": {name: asdict(row) for name, row in EFFICIENCIES.items()},
    }


def _times(found: Times | None) -> dict[str, Any] | None:
    return (
        None if found is None else {**asdict(found), "tokens_per_second": found.tokens_per_second}
    )


def _layout(layout: Layout) -> dict[str, Any]:
    own = {**asdict(layout), "one": _times(layout.one), "many": _times(layout.many)}
    return own | {"tokens_per_second": layout.tokens_per_second}
