"""From a configuration to a running Engine: load, size, warm up, and state the facts found.

Imports the worker, hence torch: only for the engine's own process (or the offline LLM's).
"""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.special import tokenizer_eos_ids
from octavo.config import EngineConfig, reject_unsupported
from octavo.engine.engine import Engine, Executor
from octavo.engine.messages import EngineInfo
from octavo.grammar.grammars import Grammars
from octavo.model.facts import default_sampling, eos_ids, read_spec
from octavo.model.shard import check_divisible
from octavo.plan.refusal import check_fits
from octavo.types import ConfigError, InvalidRequest, Progress, SamplingParams
from octavo.worker.executor import start_executor


def start_engine(
    config: EngineConfig, progress: Progress, directory: Path | None = None
) -> tuple[Engine, Executor]:
    """``config.model.model`` is a local path; ``directory``: for sockets. Raises ConfigError
    with the line to show the user."""
    reject_unsupported(config)
    path = Path(config.model.model)
    parallel = config.parallel
    if (tp := parallel.tensor_parallel_size) * (pp := parallel.pipeline_parallel_size) > 1:
        check_divisible(read_spec(path, config.model.hf_overrides), tp, pp)
    check_fits(config, path)
    sampling = _default_sampling(config, path)
    grammars = Grammars()
    executor, found = start_executor(config, path, progress, grammars, directory)
    info = EngineInfo(
        model=str(path),
        architecture=found.architecture,
        dtype=found.dtype,
        device=found.device,
        threads=found.threads,
        vocab_size=found.vocab_size,
        max_model_len=found.max_model_len,
        eos_ids=_eos_ids(config, path, found.vocab_size),
        block_size=found.block_size,
        num_blocks=found.num_blocks,
        kv_cache_bytes=found.kv_cache_bytes,
        weight_bytes=found.weight_bytes,
        max_num_seqs=found.max_num_seqs,
        max_num_batched_tokens=found.max_num_batched_tokens,
        implementations=found.implementations,
        startup_seconds=found.startup_seconds,
        reasons=found.reasons,
        default_sampling=sampling,
        device_kind=found.device_kind,
        hidden_size=found.hidden_size,
    )
    return Engine(config, info, executor, grammars=grammars), executor


def _eos_ids(config: EngineConfig, path: Path, vocab_size: int) -> list[int]:
    """Raises ConfigError for an id that the model has no logit of: no answer would ever end."""
    stated = eos_ids(path, config.model.hf_overrides)
    by_tokenizer = tokenizer_eos_ids(path)
    for ids, remedy in (
        (stated, "set it with --hf-overrides.eos_token_id, or mend generation_config.json"),
        (by_tokenizer, "use the tokenizer files that belong to this model"),
    ):
        if outside := [index for index in ids if not 0 <= index < vocab_size]:
            raise ConfigError(
                f"{path}: end-of-sequence id {outside[0]} is outside the model's vocabulary of "
                f"{vocab_size:,} tokens; {remedy}"
            )
    return sorted({*stated, *by_tokenizer})


def _default_sampling(config: EngineConfig, path: Path) -> dict[str, object]:
    """Sampling values a request gets when it names none: the checkpoint's, then the operator's.
    Raises ConfigError for those that no request may have."""
    source = config.model.generation_config
    if source not in ("auto", "vllm", "none"):
        raise ConfigError(f"--generation-config {source}: choose from auto, vllm, none")
    found = default_sampling(path) if source == "auto" else {}
    found.update(config.model.override_generation_config)
    if "max_new_tokens" in found:  # its name in generation_config.json
        found["max_tokens"] = found.pop("max_new_tokens")
    try:
        SamplingParams(**found)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError(
            f"sampling defaults (generation_config.json, --override-generation-config): {error}"
        ) from None
    return found
