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
    "BeamSearchOutput": "octavo.outputs",
    "BeamSearchSequence": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "EmbeddingRequestOutput": "octavo.outputs",
    "EmbeddingOutput": "octavo.outputs",
    "FinishReason": "octavo.types",
    "Logprob": "octavo.outputs",
    "OctavoError": "octavo.types",
    "ConfigError": "octavo.types",
    "InvalidRequest": "octavo.types",
    "QueueFull": "octavo.types",
    "EngineDead": "octavo.types",
}
__all__ = [*_HOMES]

if TYPE_CHECKING:
    from octavo.llm import LLM, AsyncLLM
    from octavo.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from octavo.types import (
        BeamSearchParams,
        ConfigError,
        EngineDead,
        FinishReason,
        InvalidRequest,
        OctavoError,
        QueueFull,
        SamplingParams,
        StructuredOutputsParams,
    )


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
