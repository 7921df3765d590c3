"""Scales of an FP8 KV cache that a checkpoint holds.

Keys and values are divided by them before they are rounded to E4M3. llm-compressor writes
``self_attn.k_scale`` and ``v_scale`` (of a layer or of each head), ModelOpt
``self_attn.k_proj.k_scale``, Quark ``k_proj.output_scale``; AutoFP8 ``self_attn.kv_scale`` for
both, and, older, ``k_proj.output_scale``; vLLM's own files have ``self_attn.attn.k_scale``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.model.attention import Attention
from octavo.model.decoder import Model
from octavo.model.loader.safetensors import SafetensorsSource
from octavo.types import ConfigError


def load_kv_scales(model: Model, source: SafetensorsSource) -> int:
    """Gives the model's attention layers their scales. Returns how many have some; the others keep
    1. Raises ConfigError for scales that mean nothing."""
    found = 0
    for index, layer in enumerate(model.layers):
        if not isinstance(layer.mixer, Attention):
            continue
        heads = layer.mixer.spec.num_kv_heads
        both = [_scale(source, f"layers.{index}", kind, heads) for kind in "kv"]
        if all(scale is None for scale in both):
            continue
        scales = [torch.ones(heads) if scale is None else scale for scale in both]
        layer.mixer.kv_scales = torch.stack(scales).to(model.device)
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
