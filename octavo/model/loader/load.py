"""Opens a checkpoint of any kind, checks it against the model, and fills the model part by part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.checkpoint.gguf import GGUFFile
from octavo.config import GIB, ModelConfig, available_memory
from octavo.model.facts import build_spec, gguf_config, is_gguf, merged, read_config
from octavo.model.families.catalogue import family_of
from octavo.model.loader.dummy import DummySource
from octavo.model.loader.gguf import GGUFSource
from octavo.model.loader.safetensors import SafetensorsSource
from octavo.model.loader.source import WeightSource, check_complete
from octavo.types import ConfigError

if TYPE_CHECKING:
    from octavo.model.decoder import Model


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
    model: Model, source: WeightSource, dtype: torch.dtype, progress: Callable[[str, float], None]
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
