"""BlockPool: which KV blocks exist, who holds them, and which tokens each one caches.

A block is in one of three states:

    held     reference count > 0        in the tables of that many requests
    cached   count 0, content known     in the free list; revived in O(1) by a hit
    empty    count 0, no content        in the free list, at its head

Content is known by a chain of keys: ``key(block) = blake2b(key(parent) + ids of the block)``, the
root being the tenant's salt. Only full blocks have a key. A block whose first few places alone are
known (the tail of a prompt or of a finished answer) is *open*: it is found through its parent and
copied (``fork``) by whoever continues it, for a shared block is never written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from octavo.core.plan import Int32

# Most siblings compared when looking for the longest common prefix of a partial block.
MAX_CANDIDATES = 64


def chain_key(parent: bytes, ids: bytes) -> bytes:
    """Key of a block with these int32 ids behind the block (or root) ``parent``."""
    return blake2b(parent + ids, digest_size=16).digest()


def root_key(*facts: bytes | str) -> bytes:
    """Root of the chains of one tenant of one model."""
    digest = blake2b(digest_size=16)
    for fact in facts:
        raw = fact.encode() if isinstance(fact, str) else fact
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


class PrefixKeys:
    """The key chain of one token sequence, extended as the sequence grows. Never recomputed."""

    __slots__ = ("block_size", "keys", "root")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self.keys: list[bytes] = []

    def extend(self, ids: Int32) -> None:
        """Brings the chain up to all full blocks of ``ids`` (int32, the whole sequence)."""
        size, keys = self.block_size, self.keys
        begin, end = len(keys), len(ids) // size
        if begin >= end:
            return
        raw, step = ids[begin * size : end * size].tobytes(), 4 * size
        parent = self.parent(begin)
        for at in range(0, len(raw), step):
            parent = chain_key(parent, raw[at : at + step])
            keys.append(parent)

    def parent(self, index: int) -> bytes:
        """Key of what stands before block ``index``."""
        return self.keys[index - 1] if index else self.root


@dataclass(slots=True)
class PrefixMatch:
    """Cached blocks for the first ``num_tokens`` tokens; the last block counts ``partial`` places
    (0: all blocks are full ones)."""

    blocks: list[int]
    num_tokens: int
    partial: int = 0


class BlockPool:
    """Reference counts, the ordered free list and the prefix index of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.num_cached = 0  # free blocks with known content
        self._references = [0] * num_blocks
        # Known content per block: parent key, ids of its first places (int32 bytes), key if full.
        self._parent: list[bytes | None] = [None] * num_blocks
        self._ids: list[bytes] = [b""] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._freed_in_plan: set[int] = set()
        self._pinned: list[int] = []

    # ---- counts ----

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: empty and cached ones."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    # ---- holding ----

    def take(self, count: int) -> list[int]:
        """``count`` blocks from the head of the free list, evicting what they cache.

        The caller has checked ``num_free``; KeyError otherwise.
        """
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            if self._parent[block] is not None:
                self._forget_free(block)
            self._references[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each; revives those that are free."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
                if self._parent[block] is not None:
                    self.num_cached -= 1
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drops a reference of each block of a table, last block first, so that eviction takes the
        ends of sequences before their beginnings. Blocks without content go to the head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._freed_in_plan.add(block)
            self._free[block] = None
            if self._parent[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of these are free now: a hit on them takes that many from ``num_free``."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def fork(self, block: int) -> int | None:
        """Copy-on-write: a fresh block for a writer that shares ``block``.

        The writer's reference to ``block`` becomes a pin that ``end_plan`` drops, so the source
        survives until the copy is issued. The destination is never a block freed in this plan;
        None if there is no other.
        """
        for candidate in self._free:
            if candidate not in self._freed_in_plan:
                break
        else:
            return None
        del self._free[candidate]
        if self._parent[candidate] is not None:
            self._forget_free(candidate)
        self._references[candidate] = 1
        self._pinned.append(block)
        return candidate

    def end_plan(self) -> None:
        """The plan is issued: sources of its copies are unpinned."""
        pinned, self._pinned = self._pinned, []
        self.release(pinned)
        self._freed_in_plan.clear()

    # ---- the prefix index ----

    def register(self, block: int, parent: bytes, ids: bytes, key: bytes | None = None) -> None:
        """Makes the content of a held block findable: ``ids`` (int32 bytes) of its first places,
        and its ``key`` if that is the whole block. The first block with some content keeps it."""
        if not self.caching:
            return
        if self._parent[block] is not None:
            self._forget(block)
        if key is not None:
            if key in self._by_key:
                return
            self._by_key[key] = block
        self._key[block] = key
        self._parent[block] = parent
        self._ids[block] = ids
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = {block: None}
        else:
            siblings[block] = None

    def match(self, ids: Int32, chain: PrefixKeys, limit: int) -> PrefixMatch:
        """The longest cached prefix of ``ids`` within ``limit`` tokens. Takes no reference."""
        size = self.block_size
        blocks: list[int] = []
        if not self.caching:
            return PrefixMatch(blocks, 0)
        raw, step, parent = ids.tobytes(), 4 * size, chain.root
        for index, key in enumerate(chain.keys[: limit // size]):
            block = self._by_key.get(key)
            if block is None or not self._holds(
                block, parent, raw[index * step : (index + 1) * step]
            ):
                break
            blocks.append(block)
            parent = key
        done = len(blocks) * size
        block, common = self._longest_child(chain.parent(len(blocks)), ids[done:limit])
        if common:
            blocks.append(block)
        return PrefixMatch(blocks, done + common, common)

    def _holds(self, block: int, parent: bytes, ids: bytes) -> bool:
        """Whether the block's ids are really these: keys may collide, ids do not."""
        return self._parent[block] == parent and self._ids[block] == ids

    def _longest_child(self, parent: bytes, ids: Int32) -> tuple[int, int]:
        """(block, tokens) of the child of ``parent`` that shares the most first tokens with ids."""
        best, best_common = -1, 0
        raw = ids[: self.block_size].tobytes()
        better = raw[:4]  # what a child must begin with to share more than the best so far
        for count, block in enumerate(reversed(self._children.get(parent, {}))):
            if count == MAX_CANDIDATES or 4 * best_common == len(raw):
                break
            if self._ids[block].startswith(better):
                known = np.frombuffer(self._ids[block], dtype=np.int32)[: len(ids)]
                differs = np.nonzero(known != ids[: len(known)])[0]
                best, best_common = block, int(differs[0]) if len(differs) else len(known)
                better = raw[: 4 * (best_common + 1)]
        return best, best_common

    def forget_all(self) -> None:
        """Drops all content (reset of the prefix cache, or after a failed step)."""
        for block in range(self.num_blocks):
            if self._parent[block] is not None:
                self._forget(block)
        self.num_cached = 0

    def _forget_free(self, block: int) -> None:
        """A cached block is taken for something else."""
        self.num_cached -= 1
        self._forget(block)

    def _forget(self, block: int) -> None:
        parent, key = self._parent[block], self._key[block]
        assert parent is not None, f"block {block} has no content to forget"
        siblings = self._children[parent]
        del siblings[block]
        if not siblings:
            del self._children[parent]
        if key is not None:
            del self._by_key[key]
        self._parent[block], self._key[block], self._ids[block] = None, None, b""

    # ---- proof ----

    def check(self, tables: Iterable[list[int]]) -> None:
        """Proves the invariants against the tables of all requests. AssertionError if one fails."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counts[block] += 1
        for block in self._pinned:
            counts[block] += 1
        assert counts == self._references, "reference counts differ from the tables"
        free = {block for block, count in enumerate(counts) if count == 0}
        assert free == set(self._free), "the free list is not the set of unreferenced blocks"
        cached = {block for block in free if self._parent[block] is not None}
        assert len(cached) == self.num_cached, "the count of cached blocks is wrong"
        for block in range(self.num_blocks):
            parent, key, ids = self._parent[block], self._key[block], self._ids[block]
            assert (parent is None) == (not ids), f"block {block}: content without parent"
            if parent is None:
                assert key is None, f"block {block}: key without content"
                continue
            assert block in self._children[parent], f"block {block} is not its parent's child"
            assert len(ids) <= 4 * self.block_size, f"block {block}: too many ids"
            if key is not None:
                assert self._by_key[key] == block, f"block {block}: its key leads elsewhere"
                assert key == chain_key(parent, ids), f"block {block}: wrong key"
        assert sum(map(len, self._children.values())) == sum(p is not None for p in self._parent)
        assert len(self._by_key) == sum(key is not None for key in self._key)
