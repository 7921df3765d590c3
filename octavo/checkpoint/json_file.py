"""JSON files of a checkpoint: an object, or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.types import ConfigError


def read_object(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The object a JSON file holds; {} for a file that is not there, where ``missing_ok``.

    Raises ConfigError when it cannot be read, is not JSON, or holds something else.
    """
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value
