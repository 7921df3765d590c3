"""A model as its files' headers describe it: the spec, what is stored, and how it will be kept."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.checkpoint.gguf import GGUFFile
from octavo.config import EngineConfig, ModelConfig
from octavo.model.facts import build_spec, gguf_config, is_gguf, merged, read_config
from octavo.model.families.catalogue import family_of
from octavo.model.families.family import Family
from octavo.model.loader.headers import GGUFHeaders, StoredHeaders, read_safetensors
from octavo.model.loader.sizes import Computing
from octavo.model.quantization import Quantization, how_kept
from octavo.model.spec import DecoderSpec
from octavo.quant.scheme import Scheme, read_scheme
from octavo.types import ConfigError

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ASKED = {"half": "float16", "float": "float32"}
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
CACHE_ITEMSIZES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


@dataclass(frozen=True)
class Checkpoint:
    """``stored``: what the headers say; ``from_config``: there are none, weights would be stored
    as config.json says. ``dtype``: what is computed with; ``quantization``: how weights are
    kept."""

    path: Path
    spec: DecoderSpec
    family: Family
    stored: StoredHeaders | GGUFHeaders
    from_config: bool
    dtype: str
    quantization: Quantization
    config: Mapping[str, Any]
    _alike: dict[str, list[tuple[int, int]]] = field(default_factory=dict, compare=False)

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    def computing(self, device: str) -> Computing:
        packs = device == "cpu" and cpu_packs(self.dtype)
        return Computing(self.itemsize, device, packs)

    def alike(self, prefix: str, count: int) -> list[tuple[int, int]]:
        """Which experts of a layer are stored differently, and how many are as each (see
        ``model.structure.Alike``). Without headers all are taken to be as the first."""
        if self.from_config:
            return [(0, count)]
        if prefix not in self._alike:
            forms: dict[Hashable, list[int]] = {}
            for index in range(count):
                names = (f"{prefix}.experts.{index}.{part}.weight" for part in ("gate_up", "down"))
                form = tuple(self.stored.form_of(name, (2, 32)) for name in names)
                forms.setdefault(form, []).append(index)
            self._alike[prefix] = [(found[0], len(found)) for found in forms.values()]
        return self._alike[prefix]

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.stored, GGUFHeaders)

    @property
    def kept(self) -> str | None:
        """As ``--quantization`` names it; None: dense."""
        return self.quantization.name


def read_checkpoint(path: Path, config: EngineConfig, device: str) -> Checkpoint:
    """Of ``device`` ("cpu", "cuda"). Raises ConfigError, in one line, for files that cannot be
    read, and for flags that do not go with them."""
    file = GGUFFile(path) if is_gguf(path) else None
    asked = config.model
    if file is None:
        values = read_config(path, asked.hf_overrides)
    else:
        values = merged(gguf_config(file), asked.hf_overrides)
    spec, family = build_spec(values, path), family_of(values, str(path))
    if file is not None:
        quantization = how_kept(asked, True, device, problem=no_problem)
        groups = GGUFHeaders(file, spec, family, quantization.keeps_groups)
        dtype = choose_dtype(asked.dtype, device, groups.commonest)
        return Checkpoint(path, spec, family, groups, False, dtype, quantization, values)
    scheme = read_scheme(values, path, str(path))
    quantization = how_kept(asked, False, device, scheme, no_problem)
    headers = {} if asked.load_format == "dummy" else read_safetensors(path)
    stored = StoredHeaders(path, spec, family, headers, scheme)
    commonest = stored.commonest if headers else _stated(values)
    dtype = choose_dtype(asked.dtype, device, commonest)
    return Checkpoint(path, spec, family, stored, not headers, dtype, quantization, values)


def no_problem() -> None:
    """A plan takes octavo's kernels for CPUs to be there."""
    return None


def _stated(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")
    return next((kind for kind, title in _STORED.items() if title == name), None)


def choose_dtype(asked: str, device: str, stored: str | None) -> str:
    """As ``model.dtype.choose_dtype``, of names. ``stored``: a safetensors type."""
    if asked != "auto":
        name = _ASKED.get(asked, asked)
        if device == "cuda" and name == "float32":
            raise ConfigError(
                f"--dtype {asked}: the kernels for GPUs compute with 16-bit numbers; use bfloat16 "
                "or float16"
            )
        return name
    if device == "cuda":
        found = _STORED.get(stored or "", "")
        return found if found in ("bfloat16", "float16") else "bfloat16"
    return "bfloat16" if cpu_has_bf16() else "float32"


def cpu_packs(dtype: str) -> bool:
    """Whether octavo's kernels for this CPU take dense weights of that type: as
    ``ops.native.linear.DENSE`` says, without torch."""
    return dtype == "float32" or (dtype == "bfloat16" and cpu_has_bf16())


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies BF16 in hardware."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return not {"avx512_bf16", "amx_tile"}.isdisjoint(line.split())
    return False


def cache_itemsize(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Bytes of a number of the KV cache, without INT8's scales."""
    return CACHE_ITEMSIZES.get(config.cache.kv_cache_dtype, checkpoint.itemsize)


def kept_as(checkpoint: Checkpoint, config: ModelConfig, name: str, device: str) -> Checkpoint:
    """The same model with its dense weights rounded while loading. Raises ConfigError where they
    are not dense, or ``name`` is no rounding."""
    asked = replace(config, quantization=name, quantize_head=None)
    scheme = read_scheme(checkpoint.config, checkpoint.path, str(checkpoint.path))
    found = how_kept(asked, checkpoint.is_gguf, device, scheme, no_problem)
    return replace(checkpoint, quantization=found)


def stored_as(checkpoint: Checkpoint, scheme: Scheme) -> Checkpoint:
    """The model, had it been quantized into the formats of ``scheme`` beforehand."""
    stored = StoredHeaders(checkpoint.path, checkpoint.spec, checkpoint.family, {}, scheme)
    found = Quantization(scheme.name, "quantized beforehand", scheme=scheme)
    return replace(checkpoint, stored=stored, quantization=found, from_config=True)
