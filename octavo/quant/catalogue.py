"""The formats by the name that ``--quantization`` gives them."""

from __future__ import annotations

from octavo.quant.dense import Dense
from octavo.quant.format import Format
from octavo.quant.int8 import Int8

# At load, from dense weights.
AT_LOAD: dict[str, type[Format]] = {"int8": Int8}


def format_of(quantization: str | None) -> Format:
    """``quantization``: a key of ``AT_LOAD``; None or gguf: the weights as they are stored."""
    return AT_LOAD[quantization]() if quantization in AT_LOAD else Dense()
