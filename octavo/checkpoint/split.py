"""Names of the parts of a GGUF model that llama-gguf-split has cut in several files."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """The part that stands for the model; ``path`` itself where it is no part."""
    name = _PART.fullmatch(path.name)
    return path.with_name(f"{name['stem']}-00001-of-{name['count']}.gguf") if name else path


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that ``path`` is a part of, by their names, whether they exist or not;
    ``[path]`` for any other file."""
    name = _PART.fullmatch(path.name)
    if not name:
        return [path]
    numbers = range(1, int(name["count"]) + 1)
    return [path.with_name(f"{name['stem']}-{n:05}-of-{name['count']}.gguf") for n in numbers]
