"""PyTorch's ``.bin`` checkpoints: where each tensor's bytes lie, from torch's weights-only reader.

A ``.bin`` is a pickle in a zip archive. The restricted unpickler builds tensors and containers and
nothing else; run on fake tensors it reads no data but tells at which byte of the file each begins
(PyTorch's notes on serialization, ``_checkpoint_offset``). The bytes are then read as those of a
safetensors file are.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from octavo.model.loader.shards import Stored, read_checkpoint
from octavo.types import ConfigError

SINGLE = "pytorch_model.bin"
_PATTERN = "pytorch_model*.bin"
_SQUEEZELLM = "sq-*.pt"  # as its authors publish them
_COUNTS = "sparse_threshold."  # beside its tensors: how many outliers a module has
_ZIP = b"PK\x03\x04"
# What safetensors calls torch's types.
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def read_pickled(directory: Path) -> dict[str, Stored]:
    """Every tensor of ``pytorch_model.bin``, its shards (with an index or without), or SqueezeLLM's
    file. {} where there are none. Raises ConfigError, in one line, for a file that is anything but
    tensors by name."""
    found = read_checkpoint(directory, SINGLE, _PATTERN, _read_file)
    return found or read_checkpoint(directory, SINGLE, _SQUEEZELLM, _read_file)


def _read_file(file: Path) -> dict[str, Stored]:
    _check_kind(file)
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{file}: holds more than weights ({_cause(error)}), which could run code; it is not "
            "loaded. Convert the model to safetensors where you trust it"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"{file}: damaged or truncated ({_cause(error)}); download it again"
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: holds a {type(content).__name__}, not tensors by name")
    size = file.stat().st_size
    tensors = {
        name: value
        for name, value in content.items()
        if not (str(name).startswith(_COUNTS) and isinstance(value, int))
    }
    return {str(name): _stored(file, size, name, value) for name, value in tensors.items()}


def _check_kind(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_ZIP))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    if start != _ZIP:
        raise ConfigError(
            f"{file}: not a file as torch.save writes it since torch 1.6 (it begins with "
            f"{start!r}); save it again with a newer torch, or convert it to safetensors"
        )


def _stored(file: Path, size: int, name: object, value: object) -> Stored:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"{file}: {name!r} is a {type(value).__name__}, not a tensor: a checkpoint of weights "
            "holds tensors by name (a training checkpoint must be converted first)"
        )
    if value.is_neg() or value.is_conj():
        raise ConfigError(
            f"{file}: {name} is stored as a view that negates or conjugates what lies there; save "
            "it resolved, or convert it to safetensors"
        )
    if not value.is_contiguous():
        raise ConfigError(
            f"{file}: {name} {list(value.shape)} is stored with strides {list(value.stride())}; "
            "save it contiguous, or convert it to safetensors"
        )
    begin = value.untyped_storage()._checkpoint_offset
    if begin is None:
        raise ConfigError(
            f"{file}: torch does not say where {name} lies; convert it to safetensors"
        )
    offset = int(begin + value.storage_offset() * value.element_size())
    num_bytes = math.prod(value.shape) * value.element_size()
    if offset + num_bytes > size:
        raise ConfigError(
            f"{file}: truncated: {name} ends at byte {offset + num_bytes:,}, the file has "
            f"{size:,}; download it again"
        )
    kind = _NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return Stored(file, kind, tuple(value.shape), offset, num_bytes)


def _cause(error: Exception) -> str:
    """The sentence that says what is wrong; torch's messages go on for a page."""
    paragraphs = [part.strip() for part in str(error).split("\n\n") if part.strip()]
    if len(paragraphs) > 1 and paragraphs[0].startswith("Weights only load failed"):
        del paragraphs[0]
    sentence = paragraphs[0].partition("\n")[0].partition(". ")[0] if paragraphs else ""
    return sentence.rstrip(".")[:200] or type(error).__name__
