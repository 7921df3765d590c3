"""A KV cache in 8 bits: the scales of FP8 that a checkpoint holds, and what is said at start.

Keys and values are divided by them before they are rounded to E4M3. llm-compressor writes
``self_attn.k_scale`` and ``v_scale`` (of a layer or of each head), ModelOpt
``self_attn.k_proj.k_scale``, Quark ``k_proj.output_scale``; AutoFP8 ``self_attn.kv_scale`` for
both, and, older, ``k_proj.output_scale``; vLLM's own files have ``self_attn.attn.k_scale``.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from octavo.model.attention import Attention
from octavo.model.decoder import Model
from octavo.model.kv_cache import E4M3, NAMES
from octavo.model.loader.safetensors import SafetensorsSource
from octavo.model.loader.source import WeightSource
from octavo.model.versions import attention_set_aside
from octavo.types import ConfigError

logger = logging.getLogger(__name__)
_TOKENS = 64  # of a block that bytes are counted of: a multiple of every kernel's tile


def settle_cache(model: Model, source: WeightSource) -> str:
    """Gives a model whose cache is of 8 bits its scales; says what a token takes, what the scales
    are, and which attention could not be chosen. Raises ConfigError for scales that mean nothing.
    E5M2 needs none: it reaches 57,344."""
    name, plain = NAMES[model.cache_dtype], model.plain_kv_bytes
    size = model.kv_bytes_per_block(_TOKENS) / _TOKENS
    said = [
        f"{name}: {size:,.0f} bytes a token, {size / plain:.2f} of "
        f"{str(model.dtype).removeprefix('torch.')}'s {plain:,}"
    ]
    if model.cache_dtype == E4M3:
        count = load_kv_scales(model, source) if isinstance(source, SafetensorsSource) else 0
        lacking = len(model.layers) - count
        if lacking:
            those = f"{lacking} of {len(model.layers)} layers" if count else "it"
            warning = (
                f"the checkpoint holds no scales for {those}: 1.0, and numbers beyond 448 are cut "
                "off"
            )
            logger.warning("--kv-cache-dtype %s: %s", name, warning)
            said.append(warning)
        else:
            said.append("scales of the checkpoint")
    if names := attention_set_aside(model.device, model.dtype):
        said.append(f"read and written by Triton's attention: {', '.join(names)} cannot")
    return "; ".join(said)


def load_kv_scales(model: Model, source: SafetensorsSource) -> int:
    """Gives the model's attention layers their scales. Returns how many have some; the others keep
    1. Raises ConfigError for scales that mean nothing."""
    found = 0
    for index, layer in enumerate(model.layers, model.stage.first_layer):
        if not isinstance(layer.mixer, Attention):
            continue
        heads = layer.mixer.whole.num_kv_heads
        both = [_scale(source, f"layers.{index}", kind, heads) for kind in "kv"]
        if all(scale is None for scale in both):
            continue
        scales = [torch.ones(heads) if scale is None else scale for scale in both]
        own = slice(*layer.mixer.heads.keys)
        layer.mixer.kv_scales = torch.stack(scales)[:, own].contiguous().to(model.device)
        found += 1
    return found


def _scale(source: SafetensorsSource, layer: str, kind: str, heads: int) -> Tensor | None:
    """``kind``: "k" or "v". FP32 [heads]."""
    projection = source.place(f"{layer}.{kind}.weight").name.removesuffix(".weight")
    attention = projection.rpartition(".")[0]
    names = (
        f"{attention}.{kind}_scale",
        f"{attention}.attn.{kind}_scale",
        f"{projection}.{kind}_scale",
        f"{attention}.kv_scale",
        f"{projection}.output_scale",
    )
    name = next((name for name in names if name in source.shapes), None)
    if name is None:
        return None
    values = source.read(name, torch.float32).flatten()
    if len(values) not in (1, heads) or not (values.isfinite() & (values > 0)).all():
        shown = ", ".join(f"{value:g}" for value in values[:4].tolist())
        raise ConfigError(
            f"{source.where}: {name} holds {len(values)} numbers ({shown}); a scale of the KV "
            f"cache is one positive number, or one for each of {heads} heads"
        )
    return values.expand(heads)
