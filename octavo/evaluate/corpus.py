"""The texts that come with octavo: one to score, one to calibrate with. Never imports torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from octavo.types import ConfigError


def read_text(path: str | None, shipped: str) -> tuple[str, str]:
    """The text of a file, or the ``shipped`` one where none is named; and what to call it. Raises
    ConfigError for a file that is no text."""
    if path is None:
        name = f"{shipped}.txt"
        return (files("octavo") / "evaluate" / "texts" / name).read_text("utf-8"), name
    try:
        return Path(path).expanduser().read_text("utf-8"), path
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start:,})") from None


def cut(ids: list[int], chunk: int, most: int | None) -> list[list[int]]:
    """Whole chunks of ``chunk`` ids, of at most ``most`` ids in all, which lie evenly over the
    text. Raises ConfigError where there is not one."""
    count = len(ids) // chunk
    if count == 0:
        raise ConfigError(
            f"the text has {len(ids):,} tokens, a chunk {chunk:,}: use a longer text or a smaller "
            "--chunk"
        )
    wanted = count if most is None else most // chunk
    if wanted == 0:
        raise ConfigError(
            f"--max-tokens {most}: less than one chunk of {chunk:,} tokens; raise it, or lower "
            "--chunk"
        )
    wanted = min(wanted, count)
    starts = [(i * count // wanted) * chunk for i in range(wanted)]
    return [ids[start : start + chunk] for start in starts]
