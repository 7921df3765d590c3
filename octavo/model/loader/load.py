"""Opens a checkpoint of any kind, checks it against the model, and fills the model part by part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
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
from octavo.model.kv_cache import choose_cache_dtype
from octavo.model.layer import Part
from octavo.model.loader.dummy import DummySource
from octavo.model.loader.gguf import GGUFSource
from octavo.model.loader.gguf_kinds import KINDS
from octavo.model.loader.headers import read_safetensors
from octavo.model.loader.kv_scales import settle_cache
from octavo.model.loader.pickled import read_pickled
from octavo.model.loader.safetensors import SafetensorsSource
from octavo.model.loader.shards import Headers
from octavo.model.loader.sizes import Computing, divided, wanted_by, weight_bytes
from octavo.model.loader.source import WHOLE, Share, WeightSource, check_complete
from octavo.model.loader.upload import Uploader
from octavo.model.quantization import choose_quantization
from octavo.model.shard import ALONE, TensorParallel
from octavo.model.structure import structure_of
from octavo.ops.weights import Weight
from octavo.quant.scheme import read_scheme
from octavo.types import ConfigError, Progress

# Weights of later parts that are on their way to a GPU while a part is built.
BYTES_AHEAD = 1 << 30


def load_model(
    path: str | Path,
    config: EngineConfig,
    progress: Progress,
    device: str = "cpu",
    ranks: TensorParallel = ALONE,
    stage: int = 0,
    num_stages: int = 1,
) -> Model:
    """A model from a checkpoint directory or a GGUF file, for ``device`` ("cpu", "cuda"), or this
    rank's share of it: of the layers of pipeline stage ``stage`` of ``num_stages``.

    ``progress`` is told while weights load. Raises ConfigError, in one line, for
    whatever is wrong with the files, before memory is taken where the headers tell, in every stage
    alike.
    """
    with closing(open_source(Path(path), config.model, device)) as source:
        dtype, reason = choose_dtype(config.model.dtype, device, source.dtype)
        cache_dtype = choose_cache_dtype(config.cache.kv_cache_dtype, dtype, device)
        quantization = source.quantization
        name, why = quantization.name, quantization.reason
        if quantization.keeps_groups:
            name, why = _what_groups_there_are(source, config.model.quantization, why)
        make = partial(
            Model,
            source.spec,
            dtype,
            device,
            config.model.deterministic,
            quantization.rounding,
            quantization.rounds_inputs,
            cache_dtype,
        )
        own, shares = None, None
        if num_stages > 1:
            whole = make()
            shares = check_complete(source, wanted_by(whole.parts()))
            structure = structure_of(source.spec, rounding=quantization.rounding)
            own = divided(structure, source, _computing(whole), num_stages)[stage]
        model = make(ranks, own)
        model.quantization = name
        model.reasons["dtype"] = reason
        if name:
            model.reasons["quantization"] = f"{name}: {why}"
        load_weights(model, source, dtype, progress, shares, config.parallel.rank_memory)
        _check_inputs(model, config.model)
        if cache_dtype is not None:
            model.reasons["kv_cache_dtype"] = settle_cache(model, source)
        if quantization.scheme and quantization.scheme.notes:
            model.reasons["checkpoint"] = "; ".join(quantization.scheme.notes)
    return model


def _computing(model: Model) -> Computing:
    packs = model.device == "cpu" and model.implementations["linear"] == "native"
    return Computing(model.dtype.itemsize, model.device, packs)


def _check_inputs(model: Model, config: ModelConfig) -> None:
    """Raises ConfigError where inputs were to be rounded and no linear does it."""
    rounding = {"quantized_linear", "float8_linear"}
    if config.quantized_activations == "always" and not rounding & model.implementations.keys():
        raise ConfigError(
            f"--quantized-activations always: no linear of {config.model} has a version here that "
            "rounds its inputs; leave it out: weights stay quantized all the same"
        )


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
    if kept < matrices:
        why += f"; {matrices - kept} of {matrices} matrices, of other types, are expanded"
    return ("gguf", why) if kept else (None, "")


def open_source(path: Path, config: ModelConfig, device: str = "cpu") -> WeightSource:
    """The checkpoint at ``path`` as ``--load-format`` says, its tensors bound for ``device`` and
    kept as ``--quantization`` says; only headers are read."""
    file = GGUFFile(path) if is_gguf(path) else None  # a long vocabulary is parsed once
    if file is None:
        values = read_config(path, config.hf_overrides)
    else:
        values = merged(gguf_config(file), config.hf_overrides)
    spec = build_spec(values, path)
    family = family_of(values, str(path))
    directory = path if file is None else None
    scheme = None if file is not None else read_scheme(values, directory, str(path))
    quantization = choose_quantization(config, file is not None, device, scheme)
    kind = "auto" if config.load_format == "bitsandbytes" else config.load_format
    if kind == "dummy":
        stated = stated_dtype(values)
        return DummySource(path, spec, config.seed, device, stated, quantization)
    if kind != "auto" and (kind == "gguf") != (file is not None):
        raise ConfigError(
            f"--load-format {kind}: {path} is a {'GGUF file' if file else 'directory'}; "
            "use --load-format auto"
        )
    stored = _stored_tensors(path, kind) if file is None else {}
    uploader = Uploader(device) if device != "cpu" else None
    if file is not None:
        return GGUFSource(file, spec, family, uploader, quantization)
    return SafetensorsSource(path, spec, family, stored, uploader, quantization)


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
    model: Model,
    source: WeightSource,
    dtype: torch.dtype,
    progress: Progress,
    shares: Mapping[str, Share] | None = None,
    most_bytes: int | None = None,
) -> None:
    """Part by part, so that the peak stays near the final size. ``shares``: see ``check_complete``,
    which has been called with what all stages want; None: this is the only one. ``most_bytes``: of
    the memory that is free, this process's part."""
    parts = model.parts()
    wanted = wanted_by(parts)
    if shares is None:
        shares = check_complete(source, wanted)
    structure = structure_of(model.spec, model.ranks.shard, model.stage, model.rounding)
    model.weight_bytes, model.linear_bytes = weight_bytes(structure, source, _computing(model))
    _check_free(model, source, most_bytes)
    ahead = 0 if model.device == "cpu" else BYTES_AHEAD
    if model.rounding:
        ahead //= 8  # of dense weights, beside what becomes of them
    sizes = [
        sum(source.bytes_packed({name: shape}, dtype.itemsize) for name, shape in part.wanted())
        for part in parts
    ]
    total, done = sum(sizes), 0
    for size, (part, tensors) in zip(sizes, _fetched(parts, source, dtype, ahead, shares)):
        progress("loading weights", done / total, total)
        part.load(tensors)
        tensors.clear()  # before the next part's are made
        done += size
    model.finish()
    progress("loading weights", 1.0, total)


def _fetched(
    parts: Sequence[Part],
    source: WeightSource,
    dtype: torch.dtype,
    ahead: int,
    shares: Mapping[str, Share],
) -> Iterator[tuple[Part, dict[str, Weight]]]:
    """Each part with its tensors, in order. Those of later parts, up to so many bytes, are fetched
    meanwhile. ``shares``: see ``check_complete``."""
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
                name: source.fetch(name, shape, kept_dtype(name, dtype), shares.get(name, WHOLE))
                for name, shape in wanted.items()
            }
            coming.append((part, calls, size))
            under_way += size
        if not coming:
            return
        part, calls, size = coming.popleft()
        under_way -= size
        yield part, {name: call() for name, call in calls.items()}


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Divisors of the rotary frequencies stay FP32: rounding turns far positions by radians. So do
    a router's corrections, which differ by less than BF16 tells apart."""
    exact = name.startswith("rope_factors") or name.endswith("router.correction")
    return torch.float32 if exact else dtype


def _check_free(model: Model, source: WeightSource, most_bytes: int | None) -> None:
    if model.device == "cpu":
        free, state = available_memory(), "are free"
        remedy = "use a smaller model or free memory"
        if most_bytes is not None and most_bytes < free:
            free, state = most_bytes, "are this replica's part of the memory"
            remedy = "use a smaller model or --data-parallel-size"
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
