"""What a checkpoint's ``quantization_config`` says: which projections are quantized, and how each
is stored. Never imports torch.

The config stands in config.json, in older checkpoints beside it (quantize_config.json of AutoGPTQ,
quant_config.json of AutoAWQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octavo.quant.format import CheckpointFormat
from octavo.types import ConfigError


class Scheme(Protocol):
    """``name``: as in ``--quantization``."""

    @property
    def name(self) -> str: ...

    def format_of(self, module: str) -> CheckpointFormat | None:
        """Of the projection whose stored tensors begin with ``module``
        (``model.layers.0.self_attn.q_proj``); None: it is dense. One whose main tensor the
        checkpoint lacks while it has a plain ``weight`` is dense all the same."""


@dataclass(frozen=True)
class _OfExperts:
    """Experts' own layouts say how they are stored; all else is dense."""

    name: str = "mxfp4"

    def format_of(self, module: str) -> CheckpointFormat | None:
        return None


def read_scheme(config: Mapping[str, Any], directory: Path | None, where: str) -> Scheme | None:
    """Of a config.json; None where the weights are not quantized. Raises ConfigError."""
    found = config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method", "unnamed")
    if method != "mxfp4":
        raise ConfigError(f"{where}: quantization_config {method!r}: not in this version")
    return _OfExperts()
