"""octavo: an LLM inference and serving engine. The public names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.llm",
    "SamplingParams": "octavo.types",
    "StructuredOutputsParams": "octavo.types",
    "BeamSearchParams": "octavo.types",
    "BeamSearchOutput": "octavo.types",
    "BeamSearchSequence": "octavo.types",
    "RequestOutput": "octavo.types",
    "CompletionOutput": "octavo.types",
    "EmbeddingRequestOutput": "octavo.types",
    "EmbeddingOutput": "octavo.types",
    "FinishReason": "octavo.types",
    "Logprob": "octavo.types",
    "OctavoError": "octavo.types",
    "ConfigError": "octavo.types",
    "InvalidRequest": "octavo.types",
    "QueueFull": "octavo.types",
    "EngineDead": "octavo.types",
}
__all__ = [*_HOMES]

if TYPE_CHECKING:
    from octavo.llm import LLM, AsyncLLM
    from octavo.types import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        ConfigError,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        EngineDead,
        FinishReason,
        InvalidRequest,
        Logprob,
        OctavoError,
        QueueFull,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
