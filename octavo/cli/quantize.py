"""``octavo quantize``: a checkpoint in another format, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import PhaseLine, size
from octavo.cli.quality import show
from octavo.config import EngineConfig, prepare_torch
from octavo.evaluate.corpus import read_text
from octavo.flags import flag, some_flags
from octavo.quantize.recipe import KINDS, Recipe
from octavo.types import ConfigError


@dataclass(frozen=True)
class QuantizeOptions:
    format: str | None = flag(
        None, "what to make", group="quantize", top=True, choices=tuple(KINDS)
    )
    output: str | None = flag(
        None,
        "directory to make (gguf-…: a file in it)",
        "-o",
        group="quantize",
        top=True,
        metavar="DIR",
    )
    bits: int | None = flag(
        None,
        "bits of a weight: gptq 2, 3, 4, 8; squeezellm 3, 4; w4a16 4, 8",
        group="quantize",
        top=True,
    )
    group_size: int | None = flag(
        None,
        "inputs that share a scale; -1: all (default: 128, or 64 or 32 where that divides)",
        group="quantize",
        top=True,
        minimum=-1,
    )
    sym: bool | None = flag(
        None,
        "gptq: one zero for all groups, the middle (the default), or zeros of their own",
        group="quantize",
        top=True,
        kind="bool",
    )
    desc_act: bool = flag(
        False, "gptq: inputs in the order of their weight (act-order)", group="quantize", top=True
    )
    sparse: bool = flag(
        False,
        "squeezellm: keep 0.45 % of the weights apart, as they are",
        group="quantize",
        top=True,
    )
    quantize_head: bool = flag(
        False, "the output head too, where it is no embedding's twin", group="quantize"
    )
    calibration: str | None = flag(
        None,
        "text that gptq, awq, w4a16 and squeezellm learn from (default: one that comes with "
        "octavo)",
        group="quantize",
        top=True,
        metavar="FILE",
    )
    calibration_tokens: int = flag(
        32768, "tokens of it that are used at most", group="quantize", top=True, minimum=1
    )
    eval: bool = flag(
        True, "measure what was lost, on the held-out text, at the end", group="quantize", top=True
    )
    eval_tokens: int | None = flag(
        None, "tokens of the held-out text (default: all)", group="quantize", minimum=1024
    )
    device: str = flag(
        "auto",
        "where to compute; auto: as octavo serve",
        group="quantize",
        choices=("auto", "cpu", "cuda"),
    )


SourceOptions = some_flags(EngineConfig, "model", "dtype", "revision", "tokenizer", "cpu_threads")

COMMAND = Command(
    "quantize",
    "Makes a checkpoint of MODEL, in 16 or 32 bits or a GGUF file, in a quantized format that "
    "octavo loads, laid out as the format's own tools do, and measures what that loses.",
    (QuantizeOptions, SourceOptions),
    examples=(
        "octavo quantize ./model --format gptq --output ./model-gptq",
        "octavo quantize ./model --format squeezellm --bits 3 --sparse -o ./model-squeezed",
        "octavo quantize ./model-f16.gguf --format gguf-q4_0 -o ./model-q4",
    ),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(QuantizeOptions)
    config = arguments.build(EngineConfig)
    if options.format is None:
        raise ConfigError(f"--format is missing: choose from {', '.join(KINDS)}")
    if options.output is None:
        raise ConfigError("--output is missing: name the directory to make")
    recipe = Recipe(
        format=options.format,
        bits=options.bits,
        group=options.group_size,
        symmetric=options.sym,
        act_order=options.desc_act,
        sparse=options.sparse,
        head=options.quantize_head,
    ).checked()
    if options.calibration is not None and not recipe.kind.calibrated:
        raise ConfigError(f"--calibration: --format {options.format} learns from no text; drop it")
    content, name = read_text(options.calibration, "calibration")
    prepare_torch()
    from octavo.quantize.command import quantize
    from octavo.quantize.run import CalibrationText

    progress = PhaseLine()
    output = Path(options.output).expanduser()
    text = CalibrationText(name, content, options.calibration_tokens)
    try:
        made = quantize(config, output, recipe, text, options.device, progress)
    finally:
        progress.end()
    for note in made.notes:
        print(f"  {note}")
    share = made.after / made.before
    print(f"  {made.path}: {size(made.before)} before, {size(made.after)} after ({share:.1%})")
    if options.eval:
        _measure(config, made.path, made.source, options)
    return 0


def _measure(config: EngineConfig, made: Path, source: Path, options: QuantizeOptions) -> None:
    from octavo.evaluate.evaluate import Text, evaluate

    content, name = read_text(None, "heldout")
    against = replace(config, model=replace(config.model, model=str(source)))
    own = replace(config, model=replace(config.model, model=str(made)))
    text = Text(name, content, max_tokens=options.eval_tokens)
    progress = PhaseLine()
    try:
        report = evaluate(own, against, text, progress, options.device)
    finally:
        progress.end()
    show(report)
