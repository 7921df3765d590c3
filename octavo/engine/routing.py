"""Which replica a request goes to: the one that will have computed its prompt at the least cost.

Work is counted in tokens. Of each replica the router knows two sums: ``outstanding``, what it has
been given and has not done, and ``recent``, what it has computed lately. A request costs
``outstanding`` + the prompt's tokens - ``PREFIX_WORTH`` times those of the prefix that the replica
holds; the replica with the least is taken, of equals the one with the least load (outstanding +
recent). That alone lets one replica keep every conversation that begins with
the same system prompt while it is fast enough, so there is a balance guard: the prefix that a
replica holds does not count while its load is above ``BALANCE`` times the mean load plus the
tokens of that prefix. They are in the bound because what is saved may be worth that much imbalance
and no more: a lone conversation stays where its history is, and a short system prompt draws nobody
to a replica that has clearly done more.

A client may say which requests share a prefix (``hint``). Where no replica holds any of a prompt,
such requests are drawn to one, as if it held ``HINT_TOKENS`` of it: by rendezvous hashing, so that
API processes that know nothing of each other's requests draw to the same one.

Prefixes are known by hashes of blocks of ids, chained over (salt, ids) with blake2b: a hint, kept
per replica in the order of last use and bounded by the size of its KV cache. Nothing is asked of
the replicas. No clock is read: seconds are passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Tokens of a block: coarser than the engines', since a lookup hashes the whole prompt (128 hashes
# for 8,192 tokens), and what is lost is less than one block of a hint.
BLOCK_TOKENS = 64
# Beyond this many tokens a prompt's blocks are the larger ones.
FINE_TOKENS = 8192
LARGE_BLOCK_TOKENS = 1024
# Tokens that a sequence still has to compute after its prompt, when nothing else is known: half of
# the 256 that outputs are taken to have.
SEQUENCE_TOKENS = 128
# A token that need not be computed again is worth two that are waited for: the one keeps everybody
# at that replica waiting, and takes room in a second cache; the other delays this request alone.
PREFIX_WORTH = 2.0
# With two replicas prefixes draw no more than 55 % of the work to one, but for what they are worth.
BALANCE = 1.1
# What a client's word is worth that a prompt shares a prefix with others.
HINT_TOKENS = 256
HALF_LIFE = 60.0  # seconds in which half of what was computed is forgotten


@dataclass(slots=True)
class Load:
    """Tokens, of one replica (see above)."""

    outstanding: float
    recent: float

    @property
    def total(self) -> float:
        return self.outstanding + self.recent


class RecentWork:
    """Tokens computed lately: a running total, faded with a half-life."""

    def __init__(self) -> None:
        self._value = 0.0
        self._total = 0.0
        self._updated = 0.0

    def update(self, total: float, now: float) -> float:
        """``total``: tokens computed ever. Returns those that count now."""
        self._value *= 0.5 ** (max(0.0, now - self._updated) / HALF_LIFE)
        self._value += max(0.0, total - self._total)
        self._total, self._updated = total, now
        return self._value

    def restart(self, value: float, total: float, now: float) -> None:
        """As if ``value`` had been computed up to now: one that (re)joins begins with the mean of
        the others, or it would be sent everything until it has caught up."""
        self._value, self._total, self._updated = value, total, now


class KnownPrefixes:
    """The block keys that one replica should hold, the least recently used first.

    A key is used together with all before it in its chain, and they after it, so whatever a chain
    has lost is at its end: how far one is known can be found by bisection.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.num_tokens = 0
        self._keys: OrderedDict[bytes, int] = OrderedDict()  # -> tokens of the block

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many keys of a chain are known."""
        known, low, high = self._keys, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, keys: Sequence[bytes]) -> None:
        """The replica computes, or has computed, the whole chain."""
        known = self._keys
        for index in range(len(keys) - 1, -1, -1):
            key = keys[index]
            if key in known:
                known.move_to_end(key)
            else:
                known[key] = tokens = block_tokens(index)
                self.num_tokens += tokens
        while self.num_tokens > self.most_tokens:
            self.num_tokens -= known.popitem(last=False)[1]

    def forget(self) -> None:
        self._keys.clear()
        self.num_tokens = 0


class Router:
    """The choice, and what it remembers of each replica. Replicas are numbers."""

    def __init__(self) -> None:
        self._known: dict[int, KnownPrefixes] = {}

    def add(self, replica: int, cache_tokens: int) -> None:
        """A replica whose KV cache holds so many tokens, and nothing yet."""
        self._known[replica] = KnownPrefixes(cache_tokens)

    def forget(self, replica: int) -> None:
        """Its cache is empty, or it is gone."""
        if replica in self._known:
            self._known[replica].forget()

    def choose(
        self, keys: Sequence[bytes], num_tokens: int, loads: Mapping[int, Load], hint: bytes = b""
    ) -> tuple[int, int]:
        """One of the replicas in ``loads`` for a prompt of ``num_tokens`` with these ``keys``, and
        how many of its tokens that one should hold. ``hint``: equal for requests that a client
        says share a prefix."""
        cached = {i: tokens_of(self._known[i].matched(keys)) for i in loads}
        hinted = -1
        if hint and not any(cached.values()):
            hinted = max(loads, key=lambda i: blake2b(hint, key=b"%d" % i, digest_size=8).digest())
        mean = sum(load.total for load in loads.values()) / len(loads)

        def cost(replica: int) -> tuple[float, float, int]:
            load = loads[replica]
            saved = HINT_TOKENS if replica == hinted else cached[replica]
            if load.total > BALANCE * mean + saved:
                saved = 0
            return load.outstanding + num_tokens - PREFIX_WORTH * saved, load.total, replica

        chosen = min(loads, key=cost)
        return chosen, cached[chosen]

    def use(self, replica: int, keys: Sequence[bytes]) -> None:
        """The request with these keys went there."""
        self._known[replica].use(keys)


def chain_keys(salt: bytes, ids: bytes) -> list[bytes]:
    """The key of each full block of ``ids`` (int32), each hashed with the one before it."""
    parent = blake2b(salt, digest_size=16).digest()
    keys, at, length = [], 0, len(ids)
    step, fine = 4 * BLOCK_TOKENS, 4 * FINE_TOKENS
    while at + step <= length:
        parent = blake2b(ids[at : at + step], key=parent, digest_size=16).digest()
        keys.append(parent)
        at += step
        if at == fine:
            step = 4 * LARGE_BLOCK_TOKENS
    return keys


def hint_of(salt: bytes, name: str | None) -> bytes:
    """Of requests that a client calls by one name, within what may share a cache."""
    return blake2b(salt + b"/" + name.encode(), digest_size=16).digest() if name else b""


def block_tokens(index: int) -> int:
    """Tokens of a prompt's block ``index``."""
    return BLOCK_TOKENS if index < FINE_TOKENS // BLOCK_TOKENS else LARGE_BLOCK_TOKENS


def tokens_of(num_blocks: int) -> int:
    """Tokens of a prompt's first blocks."""
    fine = min(num_blocks, FINE_TOKENS // BLOCK_TOKENS)
    return fine * BLOCK_TOKENS + (num_blocks - fine) * LARGE_BLOCK_TOKENS
