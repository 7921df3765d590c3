"""What a model's files say before any weight is read: config, spec, EOS ids, sampling defaults.

Never imports torch: ``octavo plan``, refusals and the API process answer from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.gguf import GGUFFile
from octavo.checkpoint.json_file import read_object
from octavo.checkpoint.special import gguf_eos_ids
from octavo.model.families.catalogue import family_of
from octavo.model.families.gguf_config import config_from_gguf
from octavo.model.families.reading import ConfigReader
from octavo.model.spec import DecoderSpec
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError

# generation_config.json keys that are sampling parameters of ours, by the same name.
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def is_gguf(path: Path) -> bool:
    """A file, whatever it is called (``checkpoint.locate``), or a name of one where nothing is."""
    return path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a directory, or a GGUF file's metadata in the same words; ``overrides`` are
    merged over it. Raises ConfigError in one line."""
    path = Path(path)
    if is_gguf(path):
        config = gguf_config(GGUFFile(path))
    else:
        config = read_object(path / "config.json")
        if "text_config" in config:
            raise ConfigError(
                f"{path / 'config.json'}: text_config marks a multimodal model; text decoders only"
            )
    return merged(config, overrides or {})


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """An opened GGUF file's metadata in the words of a config.json."""
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}

    def vector(name: str) -> list[float]:
        if (kind := file.tensors[name].type.name) != "F32":
            raise ConfigError(f"{file.path}: {name} is of type {kind}, not F32")
        return [float(value) for value in file.raw(name).view(np.float32)]

    return config_from_gguf(file.metadata, shapes, vector, str(file.path))


def read_spec(path: str | Path, overrides: Mapping[str, Any] | None = None) -> DecoderSpec:
    """The model as data. Raises ConfigError for anything this version cannot run."""
    config = read_config(path, overrides)
    return build_spec(config, path)


def build_spec(config: Mapping[str, Any], path: str | Path) -> DecoderSpec:
    where = str(path) if is_gguf(Path(path)) else str(Path(path) / "config.json")
    family = family_of(config, where)
    reader = ConfigReader(config, where)
    reader.mapping("quantization_config")
    spec = family.build(reader)
    if not is_gguf(Path(path)):
        read_scheme(config, Path(path), where)
    return spec


def eos_ids(path: str | Path, overrides: Mapping[str, Any] | None = None) -> list[int]:
    """Ids that end an output: config ∪ generation_config, in that order. The tokenizer's own EOS
    is the caller's to add. For a GGUF file ``checkpoint.special.gguf_eos_ids``, of which an
    override replaces the eos."""
    path = Path(path)
    if is_gguf(path):
        metadata = dict(GGUFFile(path).metadata)
        override = (overrides or {}).get("eos_token_id")
        if override is not None:
            metadata.pop("tokenizer.ggml.eos_token_id", None)
        values = [override, gguf_eos_ids(metadata, path)]
    else:
        values = [
            source.get("eos_token_id")
            for source in (read_config(path, overrides), _generation_config(path))
        ]
    ids: dict[int, None] = {}
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            if entry is None:
                continue
            if not isinstance(entry, int):
                raise ConfigError(f"{path}: eos_token_id is {entry!r}, not a token id")
            ids[entry] = None
    return list(ids)


def default_sampling(path: str | Path) -> dict[str, Any]:
    """Sampling defaults of generation_config.json, as SamplingParams fields; {} when it has none
    (or says do_sample false, which makes its other values idle)."""
    path = Path(path)
    if is_gguf(path):
        return {}
    config = _generation_config(path)
    if config.get("do_sample") is False:
        return {}
    found = {key: config[key] for key in _SAMPLING_KEYS if config.get(key) is not None}
    if config.get("max_new_tokens") is not None:
        found["max_tokens"] = config["max_new_tokens"]
    return found


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_object(file, missing_ok=True)


def merged(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Objects merge key by key, everything else is replaced."""
    result = dict(config)
    for key, value in overrides.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            value = merged(old, value)
        result[key] = value
    return result
