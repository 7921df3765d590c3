"""Which parsers there are, and which one a chat template asks for."""

from __future__ import annotations

from octavo.server.tools.deepseek_v3 import DeepSeekV3
from octavo.server.tools.format import Format
from octavo.server.tools.generic import Json
from octavo.server.tools.granite import Granite
from octavo.server.tools.hermes import Hermes
from octavo.server.tools.llama3_json import Llama3Json
from octavo.server.tools.mistral import Mistral
from octavo.server.tools.openai import OpenAI
from octavo.server.tools.pythonic import Pythonic
from octavo.server.tools.qwen3_coder import Qwen3Coder
from octavo.server.tools.reasoning import DeepSeekR1, GraniteReasons, Qwen3, Reasons

FORMATS: dict[str, type[Format]] = {
    kind.name: kind
    for kind in (
        *(Hermes, Llama3Json, Mistral, Pythonic, Qwen3Coder, DeepSeekV3, Granite, OpenAI, Json),
    )
}
FORMATS |= {
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "qwen3_xml": Qwen3Coder,
    "deepseek_v31": DeepSeekV3,
    "granite4": Hermes,
}
REASONING: dict[str, type[Reasons]] = {
    kind.name: kind for kind in (DeepSeekR1, Qwen3, GraniteReasons)
}
REASONING["deepseek_v3"] = Qwen3

# What a chat template that teaches a format holds, the most telling first.
_TOLD_BY: tuple[tuple[str, type[Format]], ...] = (
    ("<|channel|>", OpenAI),
    ("<｜tool▁call▁begin｜>", DeepSeekV3),
    ("[TOOL_CALLS]", Mistral),
    ("<function=", Qwen3Coder),
    ("<|tool_call|>", Granite),
    ("<tool_call>", Hermes),
    ("<|python_start|>", Pythonic),
    ("func_name1(params_name1=", Pythonic),
    ('"parameters": ', Llama3Json),
    ("<|python_tag|>", Llama3Json),
)


def detected(template: str | None) -> type[Format]:
    """The format of calls that a chat template shows; ``json`` where it shows none."""
    for mark, kind in _TOLD_BY if template else ():
        if mark in (template or ""):
            return kind
    return Json
