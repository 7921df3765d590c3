"""What a checkpoint's ``quantization_config`` says: which projections are quantized, and how each is
stored. Never imports torch.

The config stands in config.json, in older checkpoints beside it (quantize_config.json of AutoGPTQ,
quant_config.json of AutoAWQ).
"""

from __future__ import annotations

from typing import Protocol

from octavo.quant.format import CheckpointFormat


class Scheme(Protocol):
    """``name``: as in ``--quantization``."""

    name: str

    def format_of(self, module: str) -> CheckpointFormat | None:
        """Of the projection whose stored tensors begin with ``module``
        (``model.layers.0.self_attn.q_proj``); None: it is dense. One whose main tensor the
        checkpoint lacks while it has a plain ``weight`` is dense all the same."""
