"""Checkpoints of llm-compressor: groups of modules, each quantized and stored in a way of its own.

Description: https://github.com/vllm-project/compressed-tensors (quantization/quant_args.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from octavo.quant.compressed_weights import NAME, Int8Stored, Packed
from octavo.quant.fields import Fields, named_by
from octavo.quant.format import CheckpointFormat, Scheme
from octavo.quant.fp8 import FP8, block_size

FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")


def config(
    format: Packed | Int8Stored | FP8, skipped: Sequence[str] = ("lm_head",)
) -> dict[str, Any]:
    """What a config.json says of such a checkpoint; ``skipped``: modules that are dense. FP8 scales
    are taken to be of each output, or of the format's blocks."""
    group: dict[str, Any] = {"targets": ["Linear"], "output_activations": None}
    if isinstance(format, FP8):
        layout, weights, inputs = "float-quantized", _arguments(8, "float"), _inputs("float")
        weights["strategy"] = "block" if format.block[0] else "channel"
        weights["block_structure"] = list(format.block) if format.block[0] else None
        if format.block[0]:
            inputs |= {"strategy": "group", "group_size": format.block[1]}
        if format.static:
            inputs |= {"strategy": "tensor", "dynamic": False}
        if format.weight_only:
            inputs = {}
    else:
        bits = format.bits if isinstance(format, Packed) else 8
        weights = _arguments(bits, "int", format.symmetric, format.group)
        layout = "pack-quantized" if isinstance(format, Packed) else "int-quantized"
        rounds = isinstance(format, Int8Stored) and not format.weight_only
        inputs = _inputs("int") if rounds else {}
    return {
        "quant_method": NAME,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {**group, "weights": weights, "input_activations": inputs or None}
        },
        "ignore": list(skipped),
        "kv_cache_scheme": None,
    }


def _arguments(bits: int, kind: str, symmetric: bool = True, group: int = 0) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }


def _inputs(kind: str) -> dict[str, Any]:
    """Each token's own scale."""
    return {**_arguments(8, kind), "strategy": "token", "dynamic": True}


Strategy = Literal["tensor", "channel", "group", "block"]


def scheme(fields: Fields) -> Scheme:
    """Raises ConfigError for what is not supported."""
    _check_plain(fields)
    groups = fields.inner("config_groups")
    if not groups.values:
        raise fields.error("config_groups", None, "groups of modules with their weights")
    notes: dict[str, None] = {}
    by_name, by_class = [], []
    for name in groups.values:
        group = groups.inner(name)
        format = _format(group, fields.values.get("format"), fields, notes)
        targets = group.names("targets")
        if not targets:
            raise group.error("targets", None, "names of modules or Linear")
        by_name.append((named_by([t for t in targets if t != "Linear"], group, "targets"), format))
        if "Linear" in targets:
            by_class.append(format)
    is_ignored = named_by(fields.names("ignore"), fields, "ignore")

    def format_of(module: str) -> CheckpointFormat | None:
        if is_ignored(module):
            return None
        named = [format for is_named, format in by_name if is_named(module)]
        return next(iter(named + by_class), None)

    return Scheme(
        NAME,
        format_of,
        # Which early versions of the package store for symmetric weights and inputs too.
        spare_suffixes=("weight_zero_point", "input_zero_point"),
        notes=notes,
    )


def _check_plain(fields: Fields) -> None:
    """What would change the numbers besides quantization is refused."""
    fields.choice("quantization_status", allowed=("compressed",), default="compressed")
    sparsity = fields.inner("sparsity_config")
    if sparsity.values:
        sparsity.choice("format", allowed=("dense",), default="dense")
    if fields.inner("transform_config").mapping("config_groups"):
        raise fields.error("transform_config", "rotations of inputs", "none")


def _format(
    group: Fields, common: object, fields: Fields, notes: dict[str, None]
) -> CheckpointFormat:
    """Of one config group; ``common``: the format of all groups that name none."""
    named = group if group.values.get("format") is not None else fields
    layout = named.choice("format", allowed=FORMATS)
    if (output := group.values.get("output_activations")) is not None:
        raise group.error("output_activations", output, "null")
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    kind = weights.choice("type", allowed=("int", "float"), default="int")
    if weights.values.get("dynamic"):
        raise weights.error("dynamic", weights.values["dynamic"], "false")
    if layout == "pack-quantized":
        return _packed(weights, kind, bool(inputs.values), notes)
    needed = {"float-quantized": "float", "int-quantized": "int"}.get(layout, kind)
    if kind != needed:
        raise weights.error("type", kind, f"{needed}, with the format {layout}")
    weights.choice("num_bits", allowed=(8,), default=8)
    if kind == "int":
        group_size, _ = _group_of(weights, ("tensor", "channel", "group"))
        symmetric = weights.boolean("symmetric") is not False
        return Int8Stored(group_size, symmetric, weight_only=not inputs.values)
    return _float8(weights, inputs)


def _packed(weights: Fields, kind: str, rounds: bool, notes: dict[str, None]) -> Packed:
    if kind != "int":
        raise weights.error("type", kind, "int, with the format pack-quantized")
    bits = weights.choice("num_bits", allowed=(4, 8), default=8)
    group, _ = _group_of(weights, ("channel", "group"))
    if rounds:
        notes[f"input_activations: inputs of weights of {bits} bits stay as they are"] = None
    return Packed(bits, group, weights.boolean("symmetric") is not False)


def _float8(weights: Fields, inputs: Fields) -> FP8:
    _, strategy = _group_of(weights, ("tensor", "channel", "block"))
    block = block_size(weights, "block_structure") if strategy == "block" else (0, 0)
    if strategy == "block" and not block[0]:
        raise weights.error("block_structure", None, "two numbers, as [128, 128]")
    if not inputs.values:
        return FP8(block, weight_only=True, name=NAME)
    inputs.choice("num_bits", allowed=(8,), default=8)
    inputs.choice("type", allowed=("float",), default="int")
    dynamic = inputs.boolean("dynamic") is True
    inputs.choice("strategy", allowed=("token", "group", "tensor") if dynamic else ("tensor",))
    return FP8(block, static=not dynamic, name=NAME)


def _group_of(weights: Fields, allowed: Sequence[Strategy]) -> tuple[int, Strategy]:
    """The group (0: all inputs) and the strategy, which follows from it where it is not told."""
    size = weights.values.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", allowed=allowed, default=implied)
    return (weights.group_size("group_size") if strategy == "group" else 0), strategy
