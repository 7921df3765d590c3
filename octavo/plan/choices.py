"""Ways to spread a model over GPUs, and ways to keep its weights, with what each comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.config import EngineConfig
from octavo.plan.checkpoint import Checkpoint, kept_as, stored_as
from octavo.plan.hardware import Gpu
from octavo.plan.memory import Fit, Rank, fit_cpu, fit_gpu, ranks_of, with_layout
from octavo.plan.roofline import Times, times
from octavo.quant.awq import AWQ
from octavo.quant.format import CheckpointFormat, Scheme
from octavo.types import ConfigError

GROUP = 128  # inputs of a scale, of the 4-bit checkpoints that people publish


@dataclass(frozen=True)
class Target:
    """What is planned for. ``memory_bytes``: of one device; ``name``: for people."""

    device: str  # "cpu" or "cuda"
    gpu: Gpu | None
    memory_bytes: int
    name: str
    count: int = 1


@dataclass(frozen=True)
class Load:
    """What ways to spread are ranked by: ``requests`` at once, over all replicas, of ``tokens``
    each."""

    requests: int = 32
    tokens: int = 2048


@dataclass(frozen=True)
class Layout:
    """A way to spread. ``concurrency``: requests of full length, over all replicas. ``one``,
    ``many``: times of a request alone, and of as many as each replica (each stage of it) has at
    once; None where rates are not known or
    it does not fit."""

    tp: int
    pp: int
    dp: int
    fits: bool
    runs: bool
    why: str
    weights_per_rank: int
    concurrency: float
    one: Times | None
    many: Times | None

    @property
    def tokens_per_second(self) -> float:
        return 0.0 if self.many is None else self.dp * self.pp * self.many.tokens_per_second

    @property
    def flags(self) -> list[str]:
        named = (("-tp", self.tp), ("-pp", self.pp), ("-dp", self.dp))
        return [word for flag, size in named if size > 1 for word in (flag, str(size))]


@dataclass(frozen=True)
class Kept:
    """A way to keep weights. ``flags``: of ``octavo serve``; ``note``: what else it needs."""

    name: str
    weights: int
    fits: bool
    why: str
    concurrency: float
    max_model_len: int
    one: Times | None
    flags: list[str]
    note: str = ""


def fit(config: EngineConfig, ranks: list[Rank], target: Target, checkpoint: Checkpoint) -> Fit:
    if target.device == "cpu":
        return fit_cpu(config, ranks, target.memory_bytes)
    return fit_gpu(config, ranks, target.memory_bytes, checkpoint.itemsize)


def timed(
    checkpoint: Checkpoint,
    ranks: list[Rank],
    target: Target,
    found: Fit,
    rows: int = 1,
    context: int = 1024,
) -> Times | None:
    if target.gpu is None or found.plan is None:
        return None
    longest = found.plan.max_model_len
    block, prompt = found.plan.block_size, min(8192, longest)
    return times(checkpoint, ranks, target.gpu, block, prompt, rows, min(context, longest))


def layouts(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, load: Load
) -> list[Layout]:
    """All that use ``target.count`` devices, the best first: what fits and runs before what does
    not, then by tokens per second under load (where rates are known), then by requests at once, by
    fewer ranks a layer."""
    found = [
        layout_of(checkpoint, config, target, load, tp, pp, target.count // tp // pp)
        for tp, pp in _factors(target.count)
    ]
    return sorted(found, key=_rank, reverse=True)


def _rank(layout: Layout) -> tuple[bool, bool, float, float, int]:
    rate = layout.tokens_per_second
    return layout.fits, layout.runs, rate, layout.concurrency, -layout.tp


def _factors(count: int) -> Iterator[tuple[int, int]]:
    for tp in range(1, count + 1):
        if count % tp == 0:
            for pp in range(1, count // tp + 1):
                if (count // tp) % pp == 0:
                    yield tp, pp


def layout_of(
    checkpoint: Checkpoint,
    config: EngineConfig,
    target: Target,
    load: Load,
    tp: int,
    pp: int,
    dp: int,
) -> Layout:
    runs = not (target.device == "cuda" and pp > 1)
    why = "" if runs else "pipeline stages run on CPUs alone in this version"
    own = with_layout(config, tp, pp, dp)
    try:
        ranks = ranks_of(checkpoint, own, target.device, tp, pp)
    except ConfigError as error:
        return Layout(tp, pp, dp, False, runs, str(error), 0, 0.0, None, None)
    if target.device == "cpu":  # the ranks of a host share its memory
        target = replace(target, memory_bytes=target.memory_bytes // dp)
    found = fit(own, ranks, target, checkpoint)
    held = int(found.concurrency * _longest(found) / load.tokens)
    rows = max(1, min(load.requests // dp, held) // pp)
    return Layout(
        *(tp, pp, dp, found.plan is not None, runs, why or found.problem),
        weights_per_rank=max(rank.weights for rank in ranks),
        concurrency=dp * found.concurrency,
        one=timed(checkpoint, ranks, target, found),
        many=timed(checkpoint, ranks, target, found, rows, load.tokens),
    )


def _longest(found: Fit) -> int:
    return 0 if found.plan is None else found.plan.max_model_len


def ways_to_keep(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, tp: int, pp: int
) -> list[Kept]:
    """As it is asked for, then what else there is for dense weights."""
    found = [_kept(checkpoint, config, target, tp, pp, checkpoint.kept or checkpoint.dtype, "")]
    dense = checkpoint.quantization.scheme is None and not checkpoint.is_gguf
    if checkpoint.is_gguf or not dense:
        return found
    plain = kept_plainly(checkpoint)
    if checkpoint.kept is not None:
        found.append(_kept(plain, config, target, tp, pp, checkpoint.dtype, ""))
    for name in ("fp8", "int8", "bitsandbytes"):
        if name != checkpoint.kept:
            other = kept_as(plain, config.model, name, target.device)
            note = _note(name, target)
            found.append(_kept(other, config, target, tp, pp, name, note, ["-q", name]))
    four = _four_bits(plain)
    note = "from a checkpoint: octavo quantize MODEL --format awq --output DIR, or one of the hub"
    if four is not None:
        found.append(_kept(four, config, target, tp, pp, "awq", note, ["-q", "awq"]))
    return found


def kept_plainly(checkpoint: Checkpoint) -> Checkpoint:
    quantization = replace(checkpoint.quantization, name=None, rounding=None)
    return replace(checkpoint, quantization=quantization)


def _note(name: str, target: Target) -> str:
    if name == "fp8" and target.gpu is not None and target.gpu.flops8 is None:
        return "this GPU does not multiply FP8: memory is saved, time is not"
    return ""


def _four_bits(checkpoint: Checkpoint) -> Checkpoint | None:
    """The model in AWQ; None where groups of ``GROUP`` do not divide its matrices."""
    form: CheckpointFormat = AWQ(GROUP)

    def format_of(module: str) -> CheckpointFormat | None:
        last = module.split(".")[-1]
        dense = last in ("lm_head", "embed_tokens", "gate", "router", "shared_expert_gate")
        return None if dense or "norm" in last else form

    found = stored_as(checkpoint, Scheme("awq", format_of))
    return None if _undivided(found) else found


def _undivided(checkpoint: Checkpoint) -> bool:
    for layer in checkpoint.spec.layers:
        mixer, mlp = layer.mixer, layer.mlp
        width = getattr(mixer, "value_dim", 0) or getattr(mixer, "head_dim", 0)
        sizes = (checkpoint.spec.hidden_size, mlp.intermediate_size, mixer.num_heads * width)
        if any(size % GROUP for size in sizes):
            return True
    return False


def _kept(
    checkpoint: Checkpoint,
    config: EngineConfig,
    target: Target,
    tp: int,
    pp: int,
    name: str,
    note: str,
    flags: list[str] | None = None,
) -> Kept:
    ranks = ranks_of(checkpoint, config, target.device, tp, pp)
    found = fit(config, ranks, target, checkpoint)
    length = 0 if found.plan is None else found.plan.max_model_len
    return Kept(
        name=name,
        weights=max(rank.weights for rank in ranks),
        fits=found.plan is not None,
        why=found.problem,
        concurrency=found.concurrency,
        max_model_len=length,
        one=timed(checkpoint, ranks, target, found),
        flags=flags or [],
        note=note,
    )
