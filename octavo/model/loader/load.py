"""Opens a checkpoint of any kind, checks it against the model, and fills the model part by part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.checkpoint.gguf import GGUFFile
from octavo.config import GIB, EngineConfig, ModelConfig, available_memory
from octavo.model.decoder import Model
from octavo.model.dtype import choose_dtype
from octavo.model.facts import build_spec, gguf_config, is_gguf, merged, read_config
from octavo.model.families.catalogue import family_of
from octavo.model.loader.dummy import DummySource
from octavo.model.loader.gguf import GGUFSource
from octavo.model.loader.safetensors import SafetensorsSource
from octavo.model.loader.source import WeightSource, check_complete
from octavo.types import ConfigError

Progress = Callable[[str, float], None]


def load_model(
    path: str | Path, config: EngineConfig, progress: Progress, device: str = "cpu"
) -> Model:
    """A model from a checkpoint directory or a GGUF file, for ``device`` ("cpu", "cuda").

    ``progress(phase, fraction)`` is called while weights load. Raises ConfigError, in one line, for
    whatever is wrong with the files, before memory is taken where the headers tell.
    """
    source = open_source(Path(path), config.model)
    dtype, reason = choose_dtype(config.model.dtype)
    computed, kept = str(dtype).removeprefix("torch."), config.cache.kv_cache_dtype
    if kept not in ("auto", computed):
        raise ConfigError(
            f"--kv-cache-dtype {kept}: on a CPU this version keeps the cache in the numbers it "
            f"computes with, {computed}; use auto, or --dtype {kept}"
        )
    model = Model(source.spec, dtype, device)
    model.reasons["dtype"] = reason
    load_weights(model, source, dtype, progress)
    return model


def open_source(path: Path, config: ModelConfig) -> WeightSource:
    """The checkpoint at ``path`` as ``--load-format`` says; only headers are read."""
    file = GGUFFile(path) if is_gguf(path) else None  # a long vocabulary is parsed once
    if file is None:
        values = read_config(path, config.hf_overrides)
    else:
        values = merged(gguf_config(file), config.hf_overrides)
    spec = build_spec(values, path)
    family = family_of(values, str(path))
    kind = config.load_format
    if kind == "auto":
        kind = "gguf" if file else "safetensors"
    if kind == "dummy":
        return DummySource(path, spec, config.seed)
    if (kind == "gguf") != (file is not None):
        raise ConfigError(
            f"--load-format {kind}: {path} is a {'GGUF file' if file else 'directory'}; "
            "use --load-format auto"
        )
    if file is not None:
        return GGUFSource(file, spec, family)
    return SafetensorsSource(path, spec, family)


def load_weights(
    model: Model, source: WeightSource, dtype: torch.dtype, progress: Progress
) -> None:
    """Part by part, so that the peak stays near the final size."""
    parts = model.parts()
    wanted: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, shape in part.wanted():
            if name in wanted:
                raise ValueError(f"two parts want {name}")
            wanted[name] = shape
    check_complete(source, wanted)

    elements = sum(math.prod(shape) for shape in wanted.values())
    if model.spec.tied_embeddings:
        elements += model.spec.vocab_size * model.spec.hidden_size  # the head's repacked copy
    model.weight_bytes = elements * dtype.itemsize
    free = available_memory()
    if model.weight_bytes > free:
        raise ConfigError(
            f"{source.where}: weights need {model.weight_bytes / GIB:.1f} GiB as "
            f"{str(dtype).removeprefix('torch.')}, {free / GIB:.1f} GiB are free: use a smaller "
            "model or free memory"
        )
    for index, part in enumerate(parts):
        progress("loading weights", index / len(parts))
        part.load({name: source.read(name, shape, dtype) for name, shape in part.wanted()})
    model.finish()
    progress("loading weights", 1.0)
