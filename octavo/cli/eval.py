"""``octavo eval``: perplexity of a model on a text, and its divergence from another model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import PhaseLine
from octavo.cli.quality import show
from octavo.config import EngineConfig, prepare_torch
from octavo.flags import flag, some_flags
from octavo.types import ConfigError


@dataclass(frozen=True)
class EvalOptions:
    against: str | None = flag(
        None,
        "another model with the same tokenizer, as MODEL is given; MODEL is compared with it",
        group="eval",
        top=True,
        metavar="OTHER",
    )
    text: str | None = flag(
        None,
        "file of the text (default: one of 36,000 tokens that comes with octavo)",
        group="eval",
        top=True,
        metavar="FILE",
    )
    chunk: int = flag(
        1024, "tokens of a context; all but its first are scored", group="eval", top=True, minimum=2
    )
    max_tokens: int | None = flag(
        None,
        "use no more of the text: whole chunks, evenly taken from it",
        group="eval",
        top=True,
        minimum=2,
    )
    json: bool = flag(False, "print JSON instead of a table", group="eval", top=True)
    device: str = flag(
        "auto",
        "where to compute; auto: as octavo serve",
        group="eval",
        choices=("auto", "cpu", "cuda"),
    )
    against_dtype: str | None = flag(
        None, "--dtype of the other model (default: MODEL's flag)", group="eval"
    )
    against_quantization: str | None = flag(
        None, "--quantization of the other model (default: as it is stored)", group="eval", top=True
    )
    against_kv_cache_dtype: str = flag("auto", "--kv-cache-dtype of the other model", group="eval")
    against_revision: str | None = flag(None, "--revision of the other model", group="eval")


# Flags of the engine that change what is computed here.
ModelOptions = some_flags(
    EngineConfig,
    *("model", "dtype", "quantization", "kv_cache_dtype", "tokenizer", "load_format", "revision"),
    *("quantize_head", "quantized_activations", "hf_overrides", "deterministic", "cpu_threads"),
)
# Those that both models get.
_SHARED = ("dtype", "tokenizer", "deterministic", "cpu_threads")

COMMAND = Command(
    "eval",
    "Scores MODEL on a text. With --against, compares it token by token with another model, or "
    "with itself kept in another way: KL divergence, agreement, perplexities and sizes.",
    (EvalOptions, ModelOptions),
    examples=(
        "octavo eval smollm2-135m --max-tokens 8k",
        "octavo eval ./quantized --against ./original",
        "octavo eval ./original -q int8 --against ./original --json",
    ),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(EvalOptions)
    config = arguments.build(EngineConfig)
    others = _others(arguments, options)
    if others and options.against is None:
        raise ConfigError(f"{others[0]}: there is no other model; name it with --against")
    prepare_torch()
    from octavo.evaluate.corpus import read_text
    from octavo.evaluate.evaluate import Text, evaluate

    content, name = read_text(options.text, "heldout")
    text = Text(name, content, options.chunk, options.max_tokens)
    progress = PhaseLine()
    try:
        report = evaluate(config, _against(arguments, options), text, progress, options.device)
    finally:
        progress.end()
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        show(report)
    return 0


def _others(arguments: Arguments, options: EvalOptions) -> list[str]:
    """The flags given for the other model."""
    given = [name for name in arguments.values if name.startswith("against_")]
    return ["--" + name.replace("_", "-") for name in given]


def _against(arguments: Arguments, options: EvalOptions) -> EngineConfig | None:
    if options.against is None:
        return None
    values = {name: v for name, v in arguments.values.items() if name in _SHARED}
    values["model"] = options.against
    own = {
        "dtype": options.against_dtype,
        "quantization": options.against_quantization,
        "kv_cache_dtype": options.against_kv_cache_dtype,
        "revision": options.against_revision,
    }
    values |= {name: value for name, value in own.items() if value is not None}
    try:
        return Arguments(values).build(EngineConfig)
    except ConfigError as error:  # of its own flags: MODEL's were found right before
        raise ConfigError(f"--against {options.against}: {error}") from None
