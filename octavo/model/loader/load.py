"""Opens a checkpoint of any kind, checks it against the model, and fills the model part by part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.gguf import GGUFFile
from octavo.config import GIB, EngineConfig, ModelConfig
from octavo.machine import available_memory
from octavo.model.decoder import Model
from octavo.model.dtype import choose_dtype
from octavo.model.facts import build_spec, gguf_config, is_gguf, merged, read_config
from octavo.model.families.catalogue import family_of
from octavo.model.layer import Part
from octavo.model.linear import Weight
from octavo.model.loader.dummy import DummySource
from octavo.model.loader.gguf import GGUFSource
from octavo.model.loader.gguf_groups import KINDS
from octavo.model.loader.pickled import read_pickled
from octavo.model.loader.safetensors import SafetensorsSource, read_safetensors
from octavo.model.loader.shards import Headers
from octavo.model.loader.source import WeightSource, check_complete
from octavo.model.loader.upload import Uploader
from octavo.model.quantization import choose_quantization
from octavo.model.spec import DecoderSpec, MoESpec
from octavo.quant.int8 import BYTES_PER_WEIGHT
from octavo.types import ConfigError, Progress

# Weights of later parts that are on their way to a GPU while a part is built.
BYTES_AHEAD = 1 << 30


def load_model(
    path: str | Path, config: EngineConfig, progress: Progress, device: str = "cpu"
) -> Model:
    """A model from a checkpoint directory or a GGUF file, for ``device`` ("cpu", "cuda").

    ``progress`` is told while weights load. Raises ConfigError, in one line, for
    whatever is wrong with the files, before memory is taken where the headers tell.
    """
    quantization, why = choose_quantization(config.model, is_gguf(Path(path)), device)
    with closing(open_source(Path(path), config.model, device, quantization)) as source:
        dtype, reason = choose_dtype(config.model.dtype, device, source.dtype)
        computed, kept = str(dtype).removeprefix("torch."), config.cache.kv_cache_dtype
        if kept not in ("auto", computed, "int8"):
            raise ConfigError(
                f"--kv-cache-dtype {kept}: this version keeps the cache in the numbers it computes "
                f"with, {computed}, or in int8; use auto, or --dtype {kept}"
            )
        if quantization == "int8" and _has_experts(source.spec):
            raise ConfigError(
                f"--quantization int8: {source.spec.architecture} has experts, which this version "
                "does not quantize; leave it out"
            )
        if quantization == "gguf":
            quantization, why = _what_groups_there_are(source, config.model.quantization, why)
        deterministic, rounded = config.model.deterministic, kept == "int8"
        model = Model(source.spec, dtype, device, deterministic, quantization, rounded)
        model.reasons["dtype"] = reason
        if quantization:
            model.reasons["quantization"] = f"{quantization}: {why}"
        load_weights(model, source, dtype, progress)
    return model


def _has_experts(spec: DecoderSpec) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)


def _what_groups_there_are(
    source: WeightSource, asked: str | None, why: str
) -> tuple[str | None, str]:
    """ "gguf" and why, or None where the file has no matrix whose groups could be kept. Raises
    ConfigError if they were asked for."""
    kept, matrices = source.count_groups()
    if kept == 0 and asked:
        raise ConfigError(
            f"{source.where}: --quantization {asked}: holds no type whose groups can be kept "
            f"({', '.join(KINDS)}); leave it out, or use int8"
        )
    if _has_experts(source.spec):
        why += "; experts are expanded"
    if kept < matrices:
        why += f"; {matrices - kept} of {matrices} matrices, of other types, are expanded"
    return ("gguf", why) if kept else (None, "")


def open_source(
    path: Path, config: ModelConfig, device: str = "cpu", quantization: str | None = None
) -> WeightSource:
    """The checkpoint at ``path`` as ``--load-format`` says, its tensors bound for ``device``; only
    headers are read. ``quantization``: "gguf" keeps a file's groups."""
    file = GGUFFile(path) if is_gguf(path) else None  # a long vocabulary is parsed once
    if file is None:
        values = read_config(path, config.hf_overrides)
    else:
        values = merged(gguf_config(file), config.hf_overrides)
    spec = build_spec(values, path)
    family = family_of(values, str(path))
    kind = config.load_format
    if kind == "dummy":
        return DummySource(path, spec, config.seed, device, stated_dtype(values))
    if kind != "auto" and (kind == "gguf") != (file is not None):
        raise ConfigError(
            f"--load-format {kind}: {path} is a {'GGUF file' if file else 'directory'}; "
            "use --load-format auto"
        )
    stored = _stored_tensors(path, kind) if file is None else {}
    uploader = Uploader(device) if device != "cpu" else None
    if file is not None:
        return GGUFSource(file, spec, family, uploader, quantization == "gguf")
    return SafetensorsSource(path, spec, family, stored, uploader)


def _stored_tensors(directory: Path, kind: str) -> Headers:
    """Of safetensors, else of torch's files, as ``--load-format`` allows."""
    found: Headers = read_safetensors(directory) if kind != "pt" else {}
    if not found and kind != "safetensors":
        found = read_pickled(directory)
    if not found:
        wanted = {"safetensors": "*.safetensors file", "pt": "pytorch_model*.bin file"}
        files = wanted.get(kind, "*.safetensors file, and no pytorch_model*.bin either")
        raise ConfigError(
            f"{directory}: no {files}; download the weights again, or use --load-format dummy for "
            "random ones"
        )
    return found


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
    firsts = check_complete(source, wanted)

    model.weight_bytes, model.linear_bytes = _weight_bytes(model, source, wanted, dtype)
    _check_free(model, source)
    ahead = 0 if model.device == "cpu" else BYTES_AHEAD
    sizes = [
        sum(source.bytes_packed({name: shape}, dtype) for name, shape in part.wanted())
        for part in parts
    ]
    total, done = sum(sizes), 0
    for size, (part, tensors) in zip(sizes, _fetched(parts, source, dtype, ahead, firsts)):
        progress("loading weights", done / total, total)
        part.load(tensors)
        tensors.clear()  # before the next part's are made
        done += size
    model.finish()
    progress("loading weights", 1.0, total)


def _weight_bytes(
    model: Model, source: WeightSource, wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[int, int]:
    """What the weights take in memory once they are packed: all, and the layers' matrices."""
    linears = [*(x for layer in model.layers for x in layer.linears()), *model.embedding.linears()]
    fused = [[f"{name}.weight" for name, _ in linear.parts] for linear in linears]
    alone = set(wanted).difference(*fused)
    size = of_layers = 0
    for names in (*fused, *([name] for name in sorted(alone))):
        shapes = {name: wanted[name] for name in names}
        if model.quantization == "int8" and names in fused:
            taken = int(sum(map(math.prod, shapes.values())) * BYTES_PER_WEIGHT)
        else:
            taken = source.bytes_packed(shapes, dtype)
        size += taken
        if names[0].startswith("layers.") and len(wanted[names[0]]) > 1:
            of_layers += taken
    shared = source.keeps_groups("embed.weight")  # rows are read from the head's packed copy
    if model.spec.embedding.tied and model.device == "cpu" and not shared:
        elements = math.prod(wanted["embed.weight"])
        is_int8 = model.quantization == "int8"
        size += int(elements * (BYTES_PER_WEIGHT if is_int8 else dtype.itemsize))
    return size, of_layers


def _fetched(
    parts: Sequence[Part],
    source: WeightSource,
    dtype: torch.dtype,
    ahead: int,
    firsts: Mapping[str, int],
) -> Iterator[tuple[Part, dict[str, Weight]]]:
    """Each part with its tensors, in order. Those of later parts, up to so many bytes, are fetched
    meanwhile. ``firsts``: see ``check_complete``."""
    coming: deque[tuple[Part, dict[str, Callable[[], Weight]], int]] = deque()
    under_way = 0
    left = iter(parts)
    while True:
        while not coming or under_way < ahead:
            if (part := next(left, None)) is None:
                break
            wanted = dict(part.wanted())
            size = sum(map(math.prod, wanted.values())) * dtype.itemsize
            calls = {
                name: source.fetch(name, shape, _kept(name, dtype), firsts.get(name, 0))
                for name, shape in wanted.items()
            }
            coming.append((part, calls, size))
            under_way += size
        if not coming:
            return
        part, calls, size = coming.popleft()
        under_way -= size
        yield part, {name: call() for name, call in calls.items()}


def _kept(name: str, dtype: torch.dtype) -> torch.dtype:
    """Divisors of the rotary frequencies stay FP32: rounding turns far positions by radians. So do
    a router's corrections, which differ by less than BF16 tells apart."""
    exact = name.startswith("rope_factors") or name.endswith("router.correction")
    return torch.float32 if exact else dtype


def _check_free(model: Model, source: WeightSource) -> None:
    if model.device == "cpu":
        free, state = available_memory(), "are free"
        remedy = "use a smaller model or free memory"
    else:
        free, total = torch.cuda.mem_get_info()
        state = f"of the GPU's {total / GIB:.1f} are free"
        remedy = (
            "use a smaller model, end what else holds its memory, or hide the GPU with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if model.weight_bytes > free:
        raise ConfigError(
            f"{source.where}: weights need {model.weight_bytes / GIB:.1f} GiB as "
            f"{str(model.dtype).removeprefix('torch.')}, {free / GIB:.1f} GiB {state}: {remedy}"
        )


def stated_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """What a config.json says its weights are in (``dtype``, older: ``torch_dtype``)."""
    name = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None
