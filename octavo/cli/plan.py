"""``octavo plan``: what a model needs and what a machine would make of it, before there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Arguments, Command, spelling_of
from octavo.cli.console import size, table
from octavo.config import EngineConfig
from octavo.flags import flag, flag_fields, some_flags
from octavo.types import ConfigError

if TYPE_CHECKING:
    from octavo.plan.choices import Target
    from octavo.plan.plan import Advice, Plan
    from octavo.plan.roofline import Times


@dataclass(frozen=True)
class PlanOptions:
    gpu: str | None = flag(
        None,
        "the GPU to plan for (default: this machine's, else its CPU)",
        group="plan",
        top=True,
        choices=("h200", "h100", "a100", "l4", "l40s", "4090"),
    )
    memory: int | None = flag(
        None,
        "memory of each GPU, e.g. 24GiB, as CUDA shows it (default: of --gpu)",
        group="plan",
        kind="bytes",
        top=True,
        minimum=1,
    )
    num_gpus: int | None = flag(
        None, "how many of them (default: -tp x -pp x -dp)", group="plan", top=True, minimum=1
    )
    requests: int = flag(
        32, "requests at once, by which layouts are ranked", group="plan", top=True, minimum=1
    )
    tokens: int = flag(2048, "tokens of each of them", group="plan", top=True, minimum=1)
    json: bool = flag(False, "print everything as JSON", group="plan", top=True)


# Flags of the engine that change sizes.
EngineOptions = some_flags(
    EngineConfig,
    *("model", "dtype", "quantization", "quantize_head", "kv_cache_dtype", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "enforce_eager"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("enable_chunked_prefill", "load_format", "revision", "hf_overrides"),
)
COMMAND = Command(
    "plan",
    "Says what MODEL takes, whether and how it fits, how fast it can be at best, and answers the "
    "guide's out-of-memory and tuning lists with commands. Reads headers alone.",
    (PlanOptions, EngineOptions),
    examples=(
        "octavo plan ./my-model --gpu h200                 one GPU",
        "octavo plan org/name --gpu a100 --num-gpus 8      ways to spread it over eight",
        "octavo plan model.gguf --memory 24GiB --json      any GPU of 24 GiB",
    ),
)
_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}


def run(arguments: Arguments) -> int:
    options = arguments.build(PlanOptions)
    config = arguments.build(EngineConfig)
    from octavo.checkpoint.locate import locate
    from octavo.plan.advice import out_of_memory, tuning
    from octavo.plan.checkpoint import read_checkpoint
    from octavo.plan.choices import Load
    from octavo.plan.plan import Serve, alternative, as_json, make_plan

    asked = config.model
    target = target_of(options, config)
    files = locate(asked.model, asked.revision, weights=False)
    checkpoint = read_checkpoint(files.path, config, target.device)
    load = Load(options.requests, options.tokens)
    plan = make_plan(checkpoint, config, target, load, Serve(asked.model, given(arguments)))
    running = alternative(plan)
    oom, tuned = out_of_memory(plan, running), tuning(plan, running)
    if options.json:
        print(json.dumps(as_json(plan, oom, tuned), indent=1))
    else:
        show(plan, oom, tuned)
    return 0


def given(arguments: Arguments) -> dict[str, str]:
    """The flags of ``octavo serve`` among those given: spelling -> text, "" for a switch."""
    own = {name for name, _ in flag_fields(EngineOptions)} - {"model"}
    found: dict[str, str] = {}
    for name, value in arguments.values.items():
        if name not in own:
            continue
        spelling = _SHORT.get(name, spelling_of(name))
        if isinstance(value, bool):
            found[spelling if value else "--no-" + spelling[2:]] = ""
        elif isinstance(value, dict):
            found[spelling] = json.dumps(value)
        else:
            found[spelling] = "auto" if value is None else str(value)
    return found


def target_of(options: PlanOptions, config: EngineConfig) -> Target:
    """What is planned for. Raises ConfigError for fewer GPUs than the layout takes."""
    from octavo.plan.choices import Target
    from octavo.plan.hardware import GPUS
    from octavo.plan.local import this_machine

    parallel = config.parallel
    needed = parallel.world_size * parallel.data_parallel_size
    count = options.num_gpus or needed
    if needed > count:
        raise ConfigError(
            f"--num-gpus {count}: -tp {parallel.tensor_parallel_size} x -pp "
            f"{parallel.pipeline_parallel_size} x -dp {parallel.data_parallel_size} take {needed}; "
            f"use --num-gpus {needed} or lower them"
        )
    if options.gpu is not None:
        gpu = GPUS[options.gpu]
        memory = options.memory or gpu.memory_bytes
        return Target("cuda", gpu, memory, gpu.name.upper(), count)
    if options.memory is not None:
        return Target("cuda", None, options.memory, "a GPU of this memory", count)
    return replace(this_machine(), count=count)


def show(plan: Plan, oom: list[Advice], tuned: list[Advice]) -> None:
    for title, rows in _sections(plan):
        print(f"{title}\n{table(rows)}\n")
    for title, advices in (("Out of memory, line by line", oom), ("Tuning, line by line", tuned)):
        print(title)
        for advice in advices:
            print(
                f"  {advice.line}\n    {advice.number}\n    {advice.reason}\n    {advice.command}"
            )
        print()
    from octavo.plan.plan import assumptions

    print("What this rests on")
    for line in assumptions(plan):
        print(f"  {line}")


def _sections(plan: Plan) -> list[tuple[str, list[tuple[str, ...]]]]:
    checkpoint, layout = plan.checkpoint, plan.layout
    how = checkpoint.kept or checkpoint.dtype
    title = f"{plan.serve.model} on {plan.target.count} x {plan.target.name}"
    load = plan.load
    rows: list[tuple[str, ...]] = [
        (
            "model",
            f"{checkpoint.spec.architecture}, weights in {how}, computed in {checkpoint.dtype}",
        ),
        ("weights", f"{size(sum(plan.weights))} ({sum(plan.weights):,} bytes)"),
        ("layout", f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"),
        ("weights of each rank", ", ".join(size(one) for one in plan.weights)),
        ("KV cache of a token", f"{plan.kv_bytes_per_token:,.0f} bytes"),
        (
            f"of {load.requests} requests of {load.tokens}",
            f"{size(plan.kv_load_bytes)} ({plan.kv_load_bytes / 1e9:.1f} GB)",
        ),
    ]
    return [
        (title, rows),
        (f"One device of {size(plan.target.memory_bytes)}", _fit_rows(plan)),
        *_time_sections(plan),
        ("Layouts, best first", _layout_rows(plan)),
        ("Weights kept as", _kept_rows(plan)),
    ]


def _fit_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), size(taken)) for name, taken in plan.fit.per_rank.items()
    ]
    memory = plan.fit.plan
    if memory is None:
        return [*rows, ("does not fit", plan.fit.problem)]
    return [
        *rows,
        ("blocks", f"{memory.num_blocks:,} of {memory.block_size} tokens: {plan.tokens:,} tokens"),
        ("longest request", f"{memory.max_model_len:,} tokens"),
        ("requests of that length at once", f"{plan.fit.concurrency:.1f}"),
        ("rows, tokens of a step", f"{memory.max_num_seqs}, {memory.max_num_batched_tokens}"),
    ]


def _time_sections(plan: Plan) -> list[tuple[str, list[tuple[str, ...]]]]:
    if plan.one is None:
        return []
    rows: list[tuple[str, ...]] = [("one request", *_times(plan.one))]
    if plan.many is not None:
        rows.append((f"{plan.many.rows} at once", *_times(plan.many)))
    return [("Predicted times", rows)]


def _times(found: Times) -> tuple[str, ...]:
    return (
        f"first token of {found.prompt}: {found.first_token * 1e3:.0f} ms",
        f"a token at {found.context}: {found.token * 1e3:.2f} ms ({found.bound}), "
        f"{found.tokens_per_second:,.0f} tokens/s",
    )


def _layout_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in plan.layouts:
        state = "fits" if one.fits and one.runs else one.why
        rate = f"{one.tokens_per_second:,.0f} tokens/s" if one.many else ""
        spread = f"tp {one.tp} x pp {one.pp} x dp {one.dp}"
        each = f"{size(one.weights_per_rank)} a device"
        rows.append((spread, each, f"{one.concurrency:.1f} full-length", rate, state))
    return rows


def _kept_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kept in plan.kept:
        state: Any = kept.note or ("fits" if kept.fits else kept.why)
        token = f"{kept.one.token * 1e3:.2f} ms a token" if kept.one else ""
        many = f"{kept.concurrency:.1f} full-length"
        rows.append((kept.name, f"{size(kept.weights)} a device", many, token, state))
    return rows
