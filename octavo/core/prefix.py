"""PrefixIndex: how requests find, wait for, and leave behind cached blocks.

A block becomes findable once the plan that completes it has been issued and its ids are known on
the host; its readers come in later plans. A request whose next block is being computed by a running
one waits for it, so identical prompts that arrive together are computed once.
"""

from __future__ import annotations

from octavo.core.block_pool import BlockPool, PrefixMatch, chain_key
from octavo.core.plan import Int32
from octavo.core.request import Request


class PrefixIndex:
    """The pool's index as requests use it: look up, enter, advance, leave."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._computing: dict[bytes, Request] = {}  # key of a block or tail -> who computes it

    def lookup(self, request: Request) -> PrefixMatch:
        """Cached blocks for a waiting request; at least its last token stays to be computed.
        One that wants something of every prompt token reads nothing."""
        request.chain.extend(request.tokens)
        if not request.reads_cache:
            return PrefixMatch([], 0)
        return self.pool.match(request.tokens, request.chain, len(request.tokens) - 1)

    def is_being_computed(self, request: Request, match: PrefixMatch) -> bool:
        """Whether a running request is computing what follows ``match`` in this one."""
        if not self._computing or not request.reads_cache:
            return False
        if match.num_tokens == len(request.tokens) - 1:
            return False  # all that can be found is found
        keys = request.chain.keys
        index = (match.num_tokens - match.partial) // self.pool.block_size
        key = keys[index] if index < len(keys) else self._tail_key(request, request.tokens)
        request.awaited_key = key if key in self._computing else None
        return request.awaited_key is not None

    def must_wait(self, request: Request) -> bool:
        """Whether what the request was found to wait for is still being computed."""
        return request.awaited_key is not None and request.awaited_key in self._computing

    def enter(self, request: Request) -> None:
        """A request begins to run: others may wait for the blocks it will compute."""
        if not self.pool.caching:
            return
        keys = request.chain.keys[request.num_registered :]
        tail = self._tail_key(request, request.tokens)
        for key in [*keys, tail] if tail else keys:
            if self._computing.setdefault(key, request) is request:
                request.pending_keys.append(key)

    def advance(self, request: Request, ids: Int32) -> None:
        """``ids``: all tokens whose KV is in issued plans and whose ids are known. Makes the blocks
        that are now full findable."""
        size = self.pool.block_size
        for index in range(request.num_registered, len(ids) // size):
            self.append(request, ids[index * size : (index + 1) * size].tobytes())

    def append(self, request: Request, block_ids: bytes) -> None:
        """The same for the next full block of the request alone, by its ids (int32)."""
        index, keys = request.num_registered, request.chain.keys
        parent = keys[index - 1] if index else request.chain.root
        if index == len(keys):
            keys.append(chain_key(parent, block_ids))
        key = keys[index]
        self.pool.register(request.blocks[index], parent, block_ids, key)
        request.num_registered = index + 1
        if request.pending_keys and self._computing.get(key) is request:
            del self._computing[key]

    def complete(self, request: Request, ids: Int32) -> None:
        """All that the request began with is computed: its open block is findable, nobody waits."""
        tail = self._tail_key(request, ids)
        if tail is not None and self._computing.get(tail) is request:
            self._register_tail(request, ids)
        self.forget_pending(request)

    def leave(self, request: Request, ids: Int32, keep: bool = True) -> None:
        """A request stops running. Its blocks are released; with ``keep`` their content (``ids``:
        as for ``advance``) stays findable, the open last block included."""
        self.forget_pending(request)
        if keep:
            self.advance(request, ids)
            self._register_tail(request, ids)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_registered = 0

    def forget_pending(self, request: Request) -> None:
        """Nobody shall wait for this request any longer."""
        for key in request.pending_keys:
            if self._computing.get(key) is request:
                del self._computing[key]
        request.pending_keys = []

    def _tail_key(self, request: Request, ids: Int32) -> bytes | None:
        """Key of the tokens after the last full block; None when there are none."""
        full = len(ids) // self.pool.block_size
        tail = ids[full * self.pool.block_size :]
        return chain_key(request.chain.parent(full), tail.tobytes()) if len(tail) else None

    def _register_tail(self, request: Request, ids: Int32) -> None:
        full = len(ids) // self.pool.block_size
        tail = ids[full * self.pool.block_size :]
        if len(tail) and full < len(request.blocks):
            parent = request.chain.parent(full)
            self.pool.register(request.blocks[full], parent, tail.tobytes())

    def check(self, running: set[Request]) -> None:
        """Proves that only running requests are waited for."""
        for key, request in self._computing.items():
            assert request in running, f"{request} is waited for and does not run"
            assert key in request.pending_keys
