"""Quantizes a GGUF file into another one: matrices of the layers, to the nearest, as llama.cpp's
reference does (the ``gguf`` package's own rounding); all metadata is passed on.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.gguf import GGUFFile, GGUFTensor
from octavo.model.facts import is_gguf
from octavo.model.loader.gguf import dequantize
from octavo.quantize import files
from octavo.quantize.outcome import Outcome
from octavo.quantize.recipe import Recipe
from octavo.types import ConfigError, Progress

_DROPPED = {"general.architecture", "general.file_type", "general.quantization_version"}
_IN_LAYERS = re.compile(r"blk\.\d+\..*\.weight")
# Beside norms: what chooses experts, and is never rounded.
_KEPT = re.compile(r"blk\.\d+\.ffn_gate_inp(_shexp)?\.weight")


@dataclass(frozen=True)
class _Planned:
    """A tensor of the new file. ``kind``: its GGML type's name."""

    tensor: GGUFTensor
    kind: str
    num_bytes: int


def quantize_gguf(
    path: Path, output: Path, recipe: Recipe, progress: Progress
) -> tuple[Path, Outcome]:
    """Writes ``output``/model-KIND.gguf. Raises ConfigError, in one line, where the source is no
    GGUF file (a directory has neither its names nor its tokenizer) or the disk is full."""
    kind = recipe.kind.gguf
    assert kind is not None
    if not is_gguf(path):
        raise ConfigError(
            f"--format {recipe.format}: {path} is no GGUF file; convert it with llama.cpp's "
            "convert_hf_to_gguf.py --outtype f16 first, then quantize that file"
        )
    source = GGUFFile(path)
    plan = [_planned(tensor, kind, recipe.head) for tensor in source.tensors.values()]
    if not any(entry.kind == kind for entry in plan):
        raise ConfigError(f"--format {recipe.format}: {path} has no matrix that {kind} can hold")
    files.check_space(output, sum(entry.num_bytes for entry in plan))
    file = output / f"{path.stem}-{kind}.gguf"
    with files.made(output):
        _write(file, source, plan, kind, progress)
    return file, Outcome(
        before=files.weight_bytes(path), after=file.stat().st_size, notes=_notes(plan, kind)
    )


def _planned(tensor: GGUFTensor, kind: str, head: bool) -> _Planned:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    wanted = _IN_LAYERS.fullmatch(tensor.name) and not _KEPT.fullmatch(tensor.name)
    wanted = wanted or (head and tensor.name == "output.weight")
    if not wanted or len(tensor.shape) < 2 or tensor.shape[-1] % block:
        return _Planned(tensor, tensor.type.name, tensor.num_bytes)
    count = int(np.prod(tensor.shape))
    return _Planned(tensor, kind, count // block * size)


def _notes(plan: list[_Planned], kind: str) -> list[str]:
    in_layers = [e for e in plan if _IN_LAYERS.fullmatch(e.tensor.name) and len(e.tensor.shape) > 1]
    kept = [entry.tensor.name for entry in in_layers if entry.kind != kind]
    found = sorted({e.tensor.type.name for e in in_layers} - {"F32", "F16", "BF16"})
    notes = []
    if found:
        notes.append(f"the source's {', '.join(found)} were expanded first: their loss stays")
    if kept:
        notes.append(f"{len(kept)} matrices stay as they are ({kept[0]}, …)")
    return notes


def _write(
    file: Path, source: GGUFFile, plan: list[_Planned], kind: str, progress: Progress
) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(file), source.metadata["general.architecture"])
    for name, value, types in _fields(source.path):
        inner = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for entry in plan:
        raw_type = gguf.GGMLQuantizationType[entry.kind]
        shape = gguf.quant_shape_to_byte_shape(entry.tensor.shape, raw_type)
        kept: np.dtype[Any] = np.dtype(np.uint8)
        if entry.kind in ("F32", "F16"):
            shape, kept = entry.tensor.shape, np.dtype("f4" if entry.kind == "F32" else "f2")
        writer.add_tensor_info(entry.tensor.name, shape, kept, entry.num_bytes, raw_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, entry in enumerate(plan):
            progress(f"quantizing to {kind}", done / len(plan))
            writer.write_tensor_data(_data(source, entry))
    finally:
        writer.close()
    progress(f"quantizing to {kind}", 1.0)


def _fields(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and types of all metadata but what the new file says of itself."""
    import gguf

    reader = gguf.GGUFReader(str(path))
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "split.")) and name not in _DROPPED:
            yield name, field.contents(), field.types


def _data(source: GGUFFile, entry: _Planned) -> np.ndarray:
    import torch
    from gguf import GGMLQuantizationType, quants

    tensor = entry.tensor
    raw = source.copied(tensor.name)
    if entry.kind == tensor.type.name:
        return raw
    where = str(source.path)
    values = dequantize(raw, tensor.type.name, tensor.name, where, torch.float32)
    matrix = values.numpy().reshape(tensor.shape)
    return quants.quantize(matrix, GGMLQuantizationType[entry.kind])
