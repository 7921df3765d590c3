"""The formats by the name of a model's quantization."""

from __future__ import annotations

from octavo.quant.dense import Dense
from octavo.quant.format import Format
from octavo.quant.int8 import Int8

_FORMATS: dict[str | None, type[Format]] = {None: Dense, "gguf": Dense, "int8": Int8}


def format_of(quantization: str | None) -> Format:
    """``quantization``: see ``octavo.model.quantization.choose_quantization``."""
    return _FORMATS[quantization]()
