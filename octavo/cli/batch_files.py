"""The files of ``octavo run-batch``: lines of requests, and answers that survive an interrupt."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from octavo.types import ConfigError, OctavoError

STANDARD = "-"  # as a file: stdin or stdout


class BatchInput:
    """All lines of a file (of stdin or a pipe: kept in a temporary one). Blank ones do not
    count."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError when it cannot be read."""
        check_local("--input-file", path)
        self._file: IO[bytes]
        try:
            if path == STANDARD:
                self._file = _kept_in_a_file(sys.stdin.buffer)
            else:
                self._file = open(Path(path).expanduser(), "rb")  # noqa: SIM115
                if not self._file.seekable():
                    with self._file as pipe:
                        self._file = _kept_in_a_file(pipe)
        except OSError as error:
            raise ConfigError(f"--input-file {path}: {error.strerror}") from None
        digest = hashlib.blake2b(digest_size=16)
        self.num_requests = 0
        for line in self._file:
            digest.update(line)
            self.num_requests += bool(line.strip())
        self.digest = digest.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line)."""
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield number, line

    def close(self) -> None:
        self._file.close()


def _kept_in_a_file(stream: IO[bytes]) -> IO[bytes]:
    """What a stream holds that can be read only once."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    while block := stream.read(1 << 20):
        file.write(block)
    file.seek(0)
    return file


class BatchOutput(Protocol):
    """Where answers go as they come."""

    done: set[int]  # line numbers that an earlier run has answered

    def write(self, number: int, answer: bytes) -> None:
        """``answer``: one line of JSON, without its end, of line ``number`` of the input. Raises
        OctavoError when there is no room for it."""

    def finish(self) -> None:
        """All have been answered."""

    def close(self) -> None: ...


class StandardOutput:
    """Answers on stdout, as they come."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def write(self, number: int, answer: bytes) -> None:
        with _writing("stdout"):
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()
        self.done.add(number)

    def finish(self) -> None: ...

    def close(self) -> None: ...


class _Kept(msgspec.Struct, array_like=True):
    """A line of the partial file."""

    number: int
    answer: msgspec.Raw


_kept = msgspec.json.Decoder(_Kept).decode


class ResumableFile:
    """``PATH.partial`` takes each answer at once; ``finish`` puts them into the order of the input
    and gives the file its name. A run that was interrupted goes on where it ended: the first line
    of the partial file tells what it belongs to."""

    def __init__(self, path: str, run: dict[str, Any]) -> None:
        """``run``: what must be equal for answers to be kept. Raises ConfigError."""
        self.path = Path(path).expanduser()
        self.partial = Path(f"{self.path}.partial")
        self.done: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}  # line number -> (offset, length)
        try:
            if self.path.is_dir():
                raise IsADirectoryError(21, "is a directory")
            self._file = open(self.partial, "a+b")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"--output-file {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{self.partial} is being written by another run") from None
        self._take_up(msgspec.json.encode(run))

    def write(self, number: int, answer: bytes) -> None:
        line = b"[%d,%b]\n" % (number, answer)
        with _writing(self.partial):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        self._keep(number, offset, line)

    def finish(self) -> None:
        with _writing(self.path), self._new_file() as file:
            for number in sorted(self._places):
                offset, length = self._places[number]
                self._file.seek(offset)
                file.write(bytes(_kept(self._file.read(length)).answer) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(file.name, 0o666 & ~mask)  # a temporary file is for its owner alone
            os.replace(file.name, self.path)
            self.partial.unlink()

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[Any]:
        """Beside the output, of which nothing is left if it does not get that name."""
        with tempfile.NamedTemporaryFile(
            dir=self.path.parent, prefix=self.path.name, suffix=".tmp", delete=False
        ) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what there is no room for has been told
            self._file.close()

    def _take_up(self, head: bytes) -> None:
        """Reads what an earlier run left; a last line that was cut off is removed."""
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):  # a new file
            self._file.truncate(0)
            self._file.write(head + b"\n")
            self._file.flush()
            return
        if first.rstrip(b"\n") != head:
            self._file.close()
            raise ConfigError(
                f"{self.partial} holds answers to another input, or of another model or flags: "
                "finish that run, or delete the file"
            )
        offset = len(first)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                number = _kept(line).number
            except (msgspec.DecodeError, RecursionError):
                self._file.close()
                raise ConfigError(
                    f"{self.partial} is damaged at byte {offset:,}: cut it off there (truncate -s "
                    f"{offset}) to keep the answers before, or delete it"
                ) from None
            self._keep(number, offset, line)
            offset += len(line)
        self._file.truncate(offset)

    def _keep(self, number: int, offset: int, line: bytes) -> None:
        self.done.add(number)
        self._places[number] = (offset, len(line))


@contextlib.contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    """Raises OctavoError for what the system refuses."""
    try:
        yield
    except BrokenPipeError:  # who reads has had enough
        raise
    except OSError as error:
        raise OctavoError(f"{path} cannot be written: {error.strerror}") from None


def check_local(flag: str, path: str) -> None:
    """Raises ConfigError for what is no path of this machine."""
    scheme, mark, _ = path.partition("://")
    if mark:
        raise ConfigError(
            f"{flag} {path}: {scheme} addresses are not read or written; fetch the file first, or "
            "pipe it through - (stdin, stdout)"
        )
