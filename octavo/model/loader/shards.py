"""Which files hold a checkpoint's tensors, and what their headers say: nothing but headers is read,
so that a fault is told before memory is taken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.types import ConfigError


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's bytes, row-major. ``dtype``: in the names of safetensors (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


Headers = Mapping[str, Stored]

# Bytes of a value, by safetensors' name of its type; types of less than a byte are not among them.
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def check_size(name: str, stored: Stored) -> None:
    """Raises ConfigError where a tensor's bytes are not those of its shape."""
    if stored.dtype not in _SIZES:
        return
    needed = math.prod(stored.shape) * _SIZES[stored.dtype]
    if stored.num_bytes != needed:
        raise ConfigError(
            f"{stored.file}: damaged header: {name} is {stored.dtype} {list(stored.shape)}, which "
            f"is {needed:,} bytes, but {stored.num_bytes:,} are given; download it again"
        )


def read_checkpoint(
    directory: Path, single: str, pattern: str, read: Callable[[Path], Headers]
) -> dict[str, Stored]:
    """Every stored tensor by name: of the shards that ``{single}.index.json`` names, of ``single``,
    or of all files that match ``pattern``. {} where there is none of them. ``read``: a file's
    header.

    The index decides which shard a tensor comes from. Raises ConfigError for an absent shard, a
    tensor that is not where the index says, and one in two files where no index decides.
    """
    index = directory / f"{single}.index.json"
    if index.is_file():
        return _indexed(directory, index, read)
    file = directory / single
    files = [file] if file.is_file() else sorted(directory.glob(pattern))
    return _joined(directory, {file: read(file) for file in files})


def _indexed(directory: Path, index: Path, read: Callable[[Path], Headers]) -> dict[str, Stored]:
    places = _weight_map(index)
    names = sorted(set(places.values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ConfigError(
            f"{directory}: {len(absent)} of {len(names)} shards are absent: "
            + ", ".join(absent[:4])
            + "; download the model again"
        )
    shards = {name: read(directory / name) for name in names}
    misplaced = [name for name, place in places.items() if name not in shards[place]]
    if misplaced:
        name = misplaced[0]
        holders = [place for place, headers in shards.items() if name in headers]
        raise ConfigError(
            f"{index}: {name} is not in {places[name]} as it says, but "
            + (f"in {', '.join(holders)}" if holders else "in no shard")
            + (f" ({len(misplaced)} tensors are not in their place)" if misplaced[1:] else "")
            + "; download the model again"
        )
    # A copy in a shard that the index does not name for it is passed over; what the index does not
    # name at all is told as unused, unless the model wants it.
    extra = {
        directory / place: {name: stored for name, stored in found.items() if name not in places}
        for place, found in shards.items()
    }
    return {
        **{name: shards[place][name] for name, place in places.items()},
        **_joined(directory, extra),
    }


def _weight_map(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(place, str) for place in places.values()):
            raise TypeError("weight_map holds something other than file names")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: not a valid index of shards: {error}") from None
    outside = [place for place in places.values() if Path(place).name != place]
    if outside:
        raise ConfigError(f"{index}: names {outside[0]!r}, which is no file beside it")
    return dict(places)


def _joined(directory: Path, headers: Mapping[Path, Headers]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file, found in headers.items():
        for name, stored in found.items():
            if name in tensors:
                raise ConfigError(
                    f"{directory}: {name} is in both {tensors[name].file.name} and {file.name}; "
                    "keep one"
                )
            tensors[name] = stored
    return tensors
