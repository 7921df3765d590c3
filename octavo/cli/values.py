"""From text to the value of a flag: human integers, byte counts, JSON. Raises ValueError."""

from __future__ import annotations

import json
import re
from typing import Any

# k = 1000 and K = 1024, as people write context lengths.
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HUMAN_INT = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)\s*([kmgKMG]?)")
_BYTES = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_int(text: str) -> int:
    """``32k`` = 32,000; ``32K`` = 32,768; ``1.5k`` = 1,500; ``1_000`` = 1,000."""
    match = _HUMAN_INT.fullmatch(text.strip())
    if not match:
        raise ValueError("an integer such as 4096, 32k (= 32000) or 32K (= 32768)")
    return _whole(match[1], _SCALES.get(match[2], 1))


def parse_bytes(text: str) -> int:
    """``4GiB`` = ``4Gi`` = ``4G`` = 4 x 2^30; ``4GB`` = ``4g`` = 4 x 10^9; no unit: bytes."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise ValueError("a size such as 4GiB, 512MiB, 4GB or a number of bytes")
    number, unit, binary, byte = match.groups()
    if not unit:
        return _whole(number, 1)
    base = 1024 if binary or (unit.isupper() and not byte) else 1000
    return _whole(number, base ** _POWERS[unit.lower()])


def _whole(number: str, scale: int) -> int:
    if "." not in number:
        return int(number) * scale
    value = float(number) * scale
    if value != int(value):
        raise ValueError("a whole number")
    return int(value)


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def parse_rate(text: str) -> float:
    """A number above 0, or ``inf``."""
    value = parse_float(text)
    if not value > 0:
        raise ValueError("a number above 0, or inf")
    return value


def parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("a JSON object, e.g. '{\"key\": 1}'")
    return value


def parse_scalar(text: str) -> Any:
    """The value behind a dotted key: JSON where it is JSON (1e6, true, [1]), else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_bool(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise ValueError("true or false")
    return known[text.lower()]


def parse_items(text: str) -> list[str]:
    """One item of a list flag, or several as a JSON list."""
    if text.startswith("["):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON list ({error})") from None
        if not all(isinstance(item, (str, int, float)) for item in value):
            raise ValueError("a JSON list of strings")
        return [str(item) for item in value]
    return [text]
