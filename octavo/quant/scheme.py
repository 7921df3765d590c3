"""What a checkpoint's ``quantization_config`` says: which projections are quantized, and how they
are stored. Never imports torch.

The config stands in config.json, in older checkpoints beside it: quantize_config.json of AutoGPTQ,
quant_config.json of AutoAWQ and SqueezeLLM. Of several, config.json's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.json_file import read_object
from octavo.quant import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, squeezellm
from octavo.quant.fields import Fields
from octavo.quant.format import Scheme

__all__ = ["METHODS", "Scheme", "read_scheme"]

# By quant_method.
METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "gptq": gptq.scheme,
    "awq": awq.scheme,
    "fp8": fp8.scheme,
    "compressed-tensors": compressed_tensors.scheme,
    "bitsandbytes": bitsandbytes.scheme,
    "squeezellm": squeezellm.scheme,
    "mxfp4": mxfp4.scheme,
}
_KEYS = ("quantization_config", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json")


def read_scheme(config: Mapping[str, Any], directory: Path | None, where: str) -> Scheme | None:
    """config: a config.json's contents, ``where`` its name in errors; directory: where older files
    are looked for, None for nowhere. None for a dense checkpoint. Raises ConfigError, in one line,
    for what is not supported or makes no sense."""
    fields = _fields(config, directory, where)
    if fields is None:
        return None
    method = fields.values.get("quant_method")
    read = METHODS.get(method.lower()) if isinstance(method, str) else None
    if read is None:
        raise fields.error("quant_method", method, ", ".join(METHODS))
    return read(fields)


def _fields(config: Mapping[str, Any], directory: Path | None, where: str) -> Fields | None:
    for key in _KEYS:
        if values := Fields(config, where).mapping(key):
            return Fields({"quant_method": _default_method(key), **values}, where, f"{key}.")
    for path in [directory / name for name in _FILES] if directory else []:
        if values := read_object(path, missing_ok=True):
            return Fields({"quant_method": _method_of(path.name, values), **values}, str(path))
    return None


def _default_method(key: str) -> str | None:
    return "compressed-tensors" if key == "compression_config" else None


def _method_of(file: str, values: Mapping[str, Any]) -> str | None:
    """Of an older file that does not say it."""
    if file == "quantize_config.json":
        return "gptq"
    if "wbits" in values:
        return "squeezellm"
    return "awq" if "w_bit" in values or "zero_point" in values else None
