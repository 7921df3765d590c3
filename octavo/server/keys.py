"""API keys: who they belong to, what they may do, and the file they are read from.

Keys are kept as digests only: SHA-256, as ``--api-key-file`` may hold them too, and that under a
secret of this process, so that neither a lookup nor its time reveals anything about a key.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.types import ConfigError

logger = logging.getLogger("octavo")

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = frozenset({INFER, METRICS, ADMIN})
MOST_WEIGHT = 1000.0
MOST_FILE_BYTES = 1 << 20  # some 10,000 keys; it is read while streams wait
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_COMMENT = re.compile(r"(^|\s)#.*")
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class ApiKey:
    """``name`` is the tenant, who owns cached blocks and a share of the queue. Several keys of one
    name are one tenant, so that a key can be replaced without losing either."""

    name: str
    digest: bytes
    scopes: frozenset[str]
    weight: float = 1.0


class Keys:
    """The keys of --api-key (or the environment) and of --api-key-file.

    Raises ConfigError for a file that cannot be read or understood.
    """

    def __init__(self, given: Iterable[str] = (), file: str | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._given = [_given_key(text) for text in given]
        self._file = Path(file).expanduser() if file else None
        self._version: object = None
        self._by_digest: dict[bytes, ApiKey] = {}
        if self._file is not None:
            self._version = _version(self._file)
        self._use(read_key_file(self._file) if self._file else [])

    @property
    def needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._by_digest) or self._file is not None

    @property
    def several_tenants(self) -> bool:
        """Whether there may be more than one: what a file holds can change."""
        return self._file is not None or len({k.name for k in self._by_digest.values()}) > 1

    def find(self, sent: bytes) -> ApiKey | None:
        """The key that was sent, or None if it is not one of ours."""
        kept = self._kept(hashlib.sha256(sent).digest())
        key = self._by_digest.get(kept)
        if not sent or key is None or not hmac.compare_digest(kept, self._kept(key.digest)):
            return None
        return key

    def reload(self) -> None:
        """Reads the file again if it has changed. One that cannot be used leaves the keys as they
        are, with an error in the log."""
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version
        try:
            keys = read_key_file(self._file)
            self._use(keys)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("--api-key-file %s: %d keys", self._file, len(keys))

    def _use(self, from_file: Sequence[ApiKey]) -> None:
        self._by_digest = {self._kept(key.digest): key for key in [*self._given, *from_file]}

    def _kept(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def read_key_file(path: Path) -> list[ApiKey]:
    """Lines of ``NAME KEY SCOPES [weight=W]``; a # that begins a word begins a comment.

    KEY: the key, or ``sha256:`` and the hex digest of it. SCOPES: infer, metrics, admin, joined by
    commas, or all. Raises ConfigError naming the line, never the key.
    """
    try:
        raw, mode = _contents(path)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file {path}: cannot be read ({reason})") from None
    if len(raw) > MOST_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: is longer than {MOST_FILE_BYTES:,} bytes")
    if mode & stat.S_IROTH:
        logger.warning("--api-key-file %s can be read by every user: chmod 600 it", path)
    keys: list[ApiKey] = []
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        try:
            key = _key_of(words)
            if key.digest in lines:
                raise ValueError(f"the key is that of line {lines[key.digest]}")
        except ValueError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error}") from None
        lines[key.digest] = number
        keys.append(key)
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key")
    return keys


def _contents(path: Path) -> tuple[bytes, int]:
    """At most one byte more than may be, and the mode. Raises OSError, also for what is no plain
    file: a pipe or a device might keep the reader for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(MOST_FILE_BYTES + 1), mode
    finally:
        os.close(handle)


def _key_of(words: list[str]) -> ApiKey:
    """Raises ValueError saying what is wrong, without the key."""
    if not 3 <= len(words) <= 4:
        raise ValueError(f"has {len(words)} words; NAME KEY SCOPES [weight=W] are wanted")
    name, key, scopes, *more = words
    if not _NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 letters, digits and . _ @ -")
    weight = 1.0
    if more:
        label, _, value = more[0].partition("=")
        try:
            weight = float(value) if label == "weight" else 0.0
        except ValueError:
            weight = 0.0
        if not 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(f"the fourth word is weight=W, from 0.001 to {MOST_WEIGHT:g}")
    if key.startswith("sha256:"):
        found = _SHA256.fullmatch(key)
        if not found:
            raise ValueError("sha256: is followed by 64 hexadecimal digits")
        digest = bytes.fromhex(found[1])
    else:
        digest = hashlib.sha256(key.encode()).digest()
    return ApiKey(name, digest, _scopes(scopes.split(",")), weight)


def _scopes(words: Iterable[str]) -> frozenset[str]:
    found = frozenset(words)
    if found == {"all"}:
        return SCOPES
    unknown = sorted(found - SCOPES)
    if unknown or not found:
        shown = ", ".join(map(repr, unknown))
        raise ValueError(f"unknown scopes {shown}; there are infer, metrics, admin, and all")
    return found


def _given_key(text: str) -> ApiKey:
    """``KEY``, which may do all, or ``KEY=SCOPE+SCOPE``. Its name is made from it."""
    key, _, ending = text.rpartition("=")
    scopes = frozenset(ending.split("+"))
    if not key or not scopes <= SCOPES:
        key, scopes = text, SCOPES
    digest = hashlib.sha256(key.encode()).digest()
    return ApiKey(hashlib.sha256(b"name" + digest).hexdigest()[:16], digest, scopes)


def _version(path: Path) -> object:
    """Changes when the file does; None when it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
