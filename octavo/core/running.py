"""Running: the state of requests that hold a slot, in arrays indexed by slot.

A steady decode step touches these arrays as a whole and no request as an object.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.queue import OrderKey
from octavo.core.request import Request, State

Bools = NDArray[np.bool_]
Index = NDArray[np.intp]  # slots or rows to index with: NumPy takes others several times as slowly


class Running:
    """Slots, and the rows of those in use in the order of the queue's key.

    Per slot:

        known      tokens whose ids the host has
        total      known, and those that plans in flight will draw
        computed   tokens whose KV is computed by the plans issued so far;  computed <= total
        limit      most tokens the request may have (prompt + max_tokens); all but the last of them
                   are computed, so it is one more where the prompt's last one is pooled
        capacity   token places in its blocks
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, key: OrderKey) -> None:
        self._key = key
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.known = np.zeros(max_num_seqs, dtype=np.int32)
        self.total = np.zeros(max_num_seqs, dtype=np.int32)
        self.computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.limit = np.zeros(max_num_seqs, dtype=np.int32)
        self.capacity = np.zeros(max_num_seqs, dtype=np.int32)
        self.registered = np.zeros(max_num_seqs, dtype=np.int32)  # tokens in blocks of the index
        self.stop_from = np.zeros(max_num_seqs, dtype=np.int32)  # EOS counts from this length on
        self.handles = np.zeros(max_num_seqs, dtype=np.int64)
        self.epoch = np.zeros(max_num_seqs, dtype=np.int64)  # raised when the slot changes hands
        self.undrawn: set[int] = set()  # slots that have drawn nothing since they were placed
        self.watched: set[int] = set()  # slots with stop ids of their own
        self.silent: set[int] = set()  # slots that draw nothing (max_tokens 0)
        self.pooling: set[int] = set()  # of these, those whose hidden states are wanted
        self.prompt_logprob_slots: set[int] = set()
        self.entered: set[int] = set()  # slots whose open last block others may be waiting for
        self._special_slots = (
            *(self.undrawn, self.watched, self.silent, self.pooling),
            *(self.prompt_logprob_slots, self.entered),
        )
        self.order: Index = np.zeros(0, dtype=np.intp)  # slots in use, first in line first
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def place(self, request: Request, computed: int, block_size: int) -> int:
        """Gives a free slot to a waiting request that holds its blocks. Returns the slot."""
        slot = self._free.pop()
        count = len(request.tokens)
        self.requests[slot] = request
        self.tokens[slot, :count] = request.tokens
        self.known[slot] = self.total[slot] = count
        self.computed[slot] = computed
        self.limit[slot] = request.max_len + (request.pooling is not None)
        self.capacity[slot] = len(request.blocks) * block_size
        self.registered[slot] = request.num_registered * block_size
        never = np.iinfo(np.int32).max
        first = request.prompt_len + request.params.min_tokens + 1
        self.stop_from[slot] = never if request.params.ignore_eos else first
        self.handles[slot] = request.handle
        self.undrawn.add(slot)
        self.entered.add(slot)
        if request.stop_ids:
            self.watched.add(slot)
        if request.max_len == request.prompt_len:
            self.silent.add(slot)
        if request.pooling is not None:
            self.pooling.add(slot)
        if request.params.prompt_logprobs is not None:
            self.prompt_logprob_slots.add(slot)
        request.slot, request.state = slot, State.RUNNING
        self._insert(slot)
        return slot

    def vacate(self, slot: int) -> Request:
        """Takes the slot back; the request gets its tokens. Its blocks are the caller's."""
        request = self.at(slot)
        request.tokens = self.tokens[slot, : self.known[slot]].copy()
        request.slot = -1
        self.requests[slot] = None
        self.epoch[slot] += 1
        for special in self._special_slots:
            special.discard(slot)
        self._free.append(slot)
        self.order = self.order[self.order != slot]
        return request

    def _insert(self, slot: int) -> None:
        key = self._key(self.at(slot))
        order = self.order
        position = len(order)
        while position and self._key(self.at(int(order[position - 1]))) > key:
            position -= 1
        grown = np.empty(len(order) + 1, dtype=np.intp)
        grown[:position] = order[:position]
        grown[position] = slot
        grown[position + 1 :] = order[position:]
        self.order = grown
