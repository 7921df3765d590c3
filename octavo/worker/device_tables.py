"""DeviceTables: what outlives a step, by slot, in the device's memory.

The kernels of a step read and write these at fixed addresses, so that a captured graph serves any
requests. ``Slots`` decides on the host what a request needs; ``pack`` brings that into columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.needs import EDIT_WIDTH, RANDOM, WIDTH, Edit, Float, Int
from octavo.worker.slots import Edits, Slots

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
# Columns of the table of edits that hold addresses.
POINTERS = (Edit.ALLOWED, Edit.BIAS, Edit.STOPS, Edit.WORDS, Edit.SAVED)


@dataclass(slots=True)
class DeviceTables:
    """``seen``: the sign of an entry says that the token is in the slot's prompt, the other bits
    how often it is in its output, at most 32,767 times. Kept for slots with penalties only."""

    history: Tensor  # int32 [max_slots, max_len + 1] token ids
    block_table: Tensor  # int32 [max_slots, max_blocks]
    lengths: Tensor  # int32 [max_slots] known tokens; kept with speculation only
    params_f: Tensor  # float32 [max_slots, WIDTH], columns needs.Float
    params_i: Tensor  # int32 [max_slots, WIDTH], columns needs.Int
    seen: Tensor  # int16 [max_slots, vocab]
    edits: Tensor  # int64 [max_slots, EDIT_WIDTH], columns needs.Edit

    @classmethod
    def allocate(
        cls, max_slots: int, max_len: int, max_blocks: int, vocab: int, device: torch.device | str
    ) -> DeviceTables:
        def zeros(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(max_slots, width, dtype=dtype, device=device)

        return cls(
            history=zeros(max_len + 1),
            block_table=zeros(max_blocks),
            lengths=torch.zeros(max_slots, dtype=torch.int32, device=device),
            params_f=zeros(WIDTH, torch.float32),
            params_i=zeros(WIDTH),
            seen=zeros(vocab, torch.int16),
            edits=zeros(EDIT_WIDTH, torch.int64),
        )

    @staticmethod
    def num_bytes(max_slots: int, max_len: int, max_blocks: int, vocab: int) -> int:
        """What ``allocate`` takes. 1,024 slots of 40,960 tokens and 151,936 ids: 0.46 GiB."""
        words = max_len + 1 + max_blocks + 1 + 2 * WIDTH + 2 * EDIT_WIDTH
        return max_slots * (4 * words + 2 * vocab)


def pack(slots: Slots, chosen: Int32) -> tuple[Float32, Int32]:
    """The parameters of the ``chosen`` slots: float32 and int32 [n, WIDTH]."""
    floats = np.zeros((len(chosen), WIDTH), dtype=np.float32)
    ints = np.zeros((len(chosen), WIDTH), dtype=np.int32)
    random = (slots.needs[chosen] & RANDOM) != 0
    repetition = slots.repetition[chosen]
    with np.errstate(divide="ignore"):  # a temperature or min_p of 0 is read by no kernel
        floats[:, Float.SCALE] = np.where(random, 1.0 / slots.temperature[chosen], 1.0)
        floats[:, Float.GAP] = 0.0 - np.log(slots.min_p[chosen].astype(np.float64))
    floats[:, Float.TOP_P] = slots.top_p[chosen]
    floats[:, Float.REPETITION] = repetition
    floats[:, Float.INVERSE_REPETITION] = 1.0 / repetition
    floats[:, Float.FREQUENCY] = slots.frequency[chosen]
    floats[:, Float.PRESENCE] = slots.presence[chosen]
    ints[:, Int.NEEDS] = slots.needs[chosen]
    ints[:, Int.TOP_K] = np.clip(slots.top_k[chosen], 0, slots.vocab_size)
    ints[:, Int.SEED_LOW] = slots.seed_low[chosen]
    ints[:, Int.SEED_HIGH] = slots.seed_high[chosen]
    ints[:, Int.PROMPT_LEN] = slots.prompt_len[chosen]
    ints[:, Int.MIN_TOKENS] = slots.min_tokens[chosen]
    return floats, ints


def pack_edits(edits: Edits, vocab: int) -> tuple[Int32, Int64]:
    """One slot's edits as an int32 buffer, and its row of the table with offsets into the buffer
    (in bytes, + 1) in place of addresses; 0 where there is nothing."""
    row = np.zeros(EDIT_WIDTH, dtype=np.int64)
    parts: list[Int32] = []
    length = 0

    def add(column: Edit, values: NDArray[np.int32]) -> None:
        nonlocal length
        row[column] = 4 * length + 1
        parts.append(values.reshape(-1))
        length += values.size

    if edits.allowed is not None:
        mask = np.zeros(-(-vocab // 32) * 32, dtype=bool)
        mask[edits.allowed.numpy()] = True
        add(Edit.ALLOWED, np.packbits(mask, bitorder="little").view("<i4"))
    if edits.bias_ids is not None and edits.bias is not None:
        ids = edits.bias_ids.numpy().astype(np.int32)
        add(Edit.BIAS, np.concatenate([ids, edits.bias.numpy().view(np.int32)]))
        row[Edit.NUM_BIAS] = len(ids)
    if edits.min_stop_ids is not None:
        add(Edit.STOPS, edits.min_stop_ids.numpy().astype(np.int32))
        row[Edit.NUM_STOPS] = len(edits.min_stop_ids)
    if edits.word_ends is not None:
        assert edits.word_prefixes is not None and edits.word_lengths is not None
        columns = [edits.word_ends[:, None], edits.word_lengths[:, None], edits.word_prefixes]
        add(Edit.WORDS, torch.cat(columns, dim=1).numpy().astype(np.int32))
        row[Edit.NUM_WORDS] = len(edits.word_ends)
        row[Edit.PREFIX] = edits.word_prefixes.shape[1]
    num_saved = int(row[Edit.NUM_STOPS] + 2 * row[Edit.NUM_WORDS])
    add(Edit.SAVED, np.zeros(num_saved, dtype=np.int32))
    return np.concatenate(parts), row
