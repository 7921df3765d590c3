"""What throughput and latency share: the engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Arguments
from octavo.config import EngineConfig
from octavo.flags import flag_fields

if TYPE_CHECKING:
    from octavo.llm import LLM


def load_llm(arguments: Arguments) -> LLM:
    """An LLM of the engine flags that were given; the demo model when none is named."""
    from octavo.llm import LLM

    known = {name for name, _ in flag_fields(EngineConfig)}
    flags = {name: value for name, value in arguments.values.items() if name in known}
    model = flags.pop("model", "smollm2-135m")
    return LLM(model, **flags)


def as_prompt(prompt: str | list[int]) -> str | dict[str, Any]:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
