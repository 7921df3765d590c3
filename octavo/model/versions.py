"""Which version of each operation a model uses."""

from __future__ import annotations

import torch

from octavo.model.attention import geometry_of
from octavo.model.kv_cache import NAMES
from octavo.model.mla import latent_geometry_of
from octavo.model.spec import (
    BY_LENGTH,
    DecoderSpec,
    FeedForwardSpec,
    GQASpec,
    LayerNormSpec,
    LayerSpec,
    MixerSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
    RMSNormSpec,
)
from octavo.ops import registry
from octavo.ops.attention import AttentionGeometry
from octavo.ops.mla import MLAGeometry
from octavo.ops.registry import Version
from octavo.types import ConfigError

# Linears that round some of their logits to the model's dtype: nothing for a router.
_ROUND_LOGITS = ("onednn",)
# Attention that reads and writes a cache of 8 bits. FlashAttention-3 would want queries in FP8 too.
_EIGHT_BITS = ("native", "triton", "triton-fixed")


def choose_versions(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: str,
    deterministic: bool,
    cache_dtype: torch.dtype | None = None,
) -> dict[str, Version]:
    """Operation -> version, on ``device`` ("cpu", "cuda"). ``cache_dtype``: see
    ``AttentionGeometry``. Raises ConfigError, in one line, where that or ``--deterministic`` is not
    to be had."""
    operations = operations_of(spec)
    found = {op: registry.runnable(op, device, dtype, deterministic) for op in operations}
    if device == "cpu":  # on a GPU definitions cannot stand in: they read lengths on the host
        for op, geometry in {attention_of(layer.mixer, cache_dtype) for layer in spec.layers}:
            found[op] = [version for version in found[op] if _takes(version, geometry)]
    if cache_dtype is not None:
        _check_cache(spec, device, found, NAMES[cache_dtype])
    missing = [op for op in operations if not found[op]]
    if hopeless := [op for op in missing if not _keeps_bits(op, device)]:
        raise ConfigError(
            f"--deterministic: not in this version for models with {', '.join(hopeless)}, which "
            "may round a row differently in another batch; leave it out"
        )
    if missing:
        raise ConfigError(
            f"--deterministic: with {str(dtype).removeprefix('torch.')} on "
            f"{'a CPU' if device == 'cpu' else 'this GPU'}, {', '.join(missing)} may round a row "
            "differently in another batch; it needs Triton, a GPU of compute capability 8.0 to "
            "9.0 and --dtype bfloat16 or float16, or octavo's own kernels on a CPU with --dtype "
            "float32 (or bfloat16, with AVX512_BF16)"
        )
    scalings = [layer.mixer.rope.scaling for layer in spec.layers if layer.mixer.rope]
    if deterministic and any(isinstance(scaling, BY_LENGTH) for scaling in scalings):
        raise ConfigError(
            "--deterministic: this model's rope_scaling (dynamic or longrope) turns a token by the "
            "length its context has in the step that computes it, so results depend on how a "
            "prompt is cut"
        )
    chosen = {op: versions[-1] for op, versions in found.items()}
    if "moe_route" in chosen:
        exact = [version for version in found["linear"] if version.name not in _ROUND_LOGITS]
        chosen["router"] = exact[-1]
    return chosen


def _check_cache(
    spec: DecoderSpec, device: str, found: dict[str, list[Version]], asked: str
) -> None:
    """Leaves the versions that read and write a cache of 8 bits. ``asked``: the cache's dtype."""
    if any(isinstance(layer.mixer, MLASpec) for layer in spec.layers):
        raise ConfigError(
            f"--kv-cache-dtype {asked}: not for latent attention, whose cache is compressed; use "
            "auto"
        )
    found["paged_attention"] = [v for v in found["paged_attention"] if v.name in _EIGHT_BITS]
    if found["paged_attention"]:
        return
    if device == "cpu":
        raise ConfigError(
            f"--kv-cache-dtype {asked}: on a CPU written in octavo's own kernels alone, with "
            "--dtype float32 or bfloat16 (`octavo collect-env` says whether they were built); use "
            "auto"
        )
    raise ConfigError(
        f"--kv-cache-dtype {asked}: on a GPU written in Triton alone, which does not run here, or "
        "not with --deterministic; use auto"
    )


def attention_set_aside(device: str, dtype: torch.dtype) -> list[str]:
    """Versions that run here, faster than what is chosen, but read no cache of 8 bits."""
    names = [version.name for version in registry.runnable("paged_attention", device, dtype, False)]
    last = max((names.index(name) for name in _EIGHT_BITS if name in names), default=-1)
    return names[last + 1 :]


def attention_of(
    mixer: MixerSpec, cache_dtype: torch.dtype | None = None
) -> tuple[str, AttentionGeometry | MLAGeometry]:
    """The operation that a mixer calls, and its geometry."""
    if isinstance(mixer, MLASpec):
        return "paged_latent_attention", latent_geometry_of(mixer)
    return "paged_attention", geometry_of(mixer, cache_dtype)


def _takes(version: Version, geometry: AttentionGeometry | MLAGeometry) -> bool:
    try:
        version.call(geometry)
    except ValueError:
        return False
    return True


def _keeps_bits(op: str, device: str) -> bool:
    """Whether with some dtype, on some card, a row's result is the same bits in any batch."""
    return any(version.batch_invariant != "no" for version in registry.versions(op, device))


def operations_of(spec: DecoderSpec) -> tuple[str, ...]:
    """The operations that the model's layers and its ends are made of."""
    found = ["embedding"]
    norms = {spec.norm, *(norm for layer in spec.layers for norm in _norms_of(layer))}
    if any(isinstance(norm, RMSNormSpec) for norm in norms):
        found.append("rms_norm")
    if any(isinstance(norm, LayerNormSpec) for norm in norms):
        found.append("layer_norm")
    if any(_needs_activation(layer.mlp) for layer in spec.layers):
        found.append("activate")
    around = [one for layer in spec.layers for one in (layer.around_mixer, layer.around_mlp)]
    if any(not one.is_plain for one in around) or spec.embedding.scale is not None:
        found.append("add_scaled")
    if spec.logit_softcap is not None:
        found.append("soft_cap")
    found.append("linear")
    if any(isinstance(layer.mixer, GQASpec) for layer in spec.layers):
        found.append("paged_attention")
    if any(isinstance(layer.mixer, MLASpec) for layer in spec.layers):
        found.append("paged_latent_attention")
    if any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        found += ["moe_route", "moe_experts"]
    return (*found, "take_rows", "copy_blocks")


def _norms_of(layer: LayerSpec) -> tuple[object, ...]:
    around = (layer.around_mixer, layer.around_mlp)
    norms = [norm for one in around for norm in (one.before, one.after, one.outer)]
    mixer = layer.mixer
    return (*norms, mixer.norm if isinstance(mixer, MLASpec) else mixer.qk_norm)


def _needs_activation(mlp: FeedForwardSpec) -> bool:
    """SiLU with a gate is an epilogue of linears; experts have their own."""
    if isinstance(mlp, MoESpec):
        return mlp.shared is not None and _needs_activation(mlp.shared)
    return not (isinstance(mlp, MLPSpec) and mlp.activation == "silu")
