"""Which files hold a checkpoint's tensors, and what their headers say: nothing but headers is read,
so that a fault is told before memory is taken."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.checkpoint.json_file import read_object
from octavo.types import ConfigError


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's bytes, row-major. ``dtype``: in the names of safetensors (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


_PIECE = 16 << 20
Headers = Mapping[str, Stored]

# Bytes of a value, by safetensors' name of its type; types of less than a byte are not among them.
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def check_place(file: Path, name: str, kind: object, shape: object, offsets: Any) -> None:
    """Raises ConfigError where a header's entry is not a type's name, a shape and two offsets."""
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    are_offsets = isinstance(offsets, list) and [type(n) for n in offsets] == [int, int]
    if isinstance(kind, str) and is_shape and are_offsets and 0 <= offsets[0] <= offsets[1]:
        return
    raise ConfigError(
        f"{file}: damaged header: {name} has dtype {kind!r}, shape {shape!r}, data_offsets "
        f"{offsets!r}; download it again"
    )


def check_apart(file: Path, tensors: Headers) -> None:
    """Raises ConfigError where two tensors of a file share bytes."""
    placed = sorted(tensors.items(), key=lambda entry: (entry[1].offset, entry[1].num_bytes))
    for (name, stored), (following, other) in pairwise(placed):
        end = stored.offset + stored.num_bytes
        if end > other.offset:
            raise ConfigError(
                f"{file}: damaged header: {name} ends at byte {end:,}, {following} begins at "
                f"{other.offset:,}; download it again"
            )


def same_bytes(one: Stored, other: Stored) -> bool:
    """Whether two tensors of one type and shape hold the same; reads both."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        sizes = (min(_PIECE, one.num_bytes - at) for at in range(0, one.num_bytes, _PIECE))
        return all(first.read(size) == second.read(size) for size in sizes)


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
    for found in files:
        if not found.is_file():  # to read a pipe is to wait for ever
            raise ConfigError(f"{found}: cannot be read: not a file, or a link to none")
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
        places = read_object(index)["weight_map"]
        if not all(isinstance(place, str) for place in places.values()):
            raise TypeError("weight_map holds something other than file names")
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: not a valid index of shards: {error}") from None
    outside = [place for place in places.values() if not _is_file_name(place)]
    if outside:
        raise ConfigError(f"{index}: names {outside[0][:80]!r}, which is no file beside it")
    return dict(places)


def _is_file_name(place: str) -> bool:
    is_name = Path(place).name == place and place not in ("", "..")
    return is_name and "\0" not in place and len(os.fsencode(place)) <= 255


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
