"""A model that reads one text after the other: hidden states of all positions, and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from octavo.model.batch import ForwardBatch
from octavo.model.decoder import Model

BLOCK = 64  # what every attention takes
LOGITS_BYTES = 32 << 20  # of FP32 rows that are made at a time; FP64 copies follow
# [r, hidden] -> FP32 [r, vocab]
Logits = Callable[[Tensor], Tensor]


class Reader:
    """Computes contexts of up to ``longest`` tokens, each in one forward, in a paged cache of its
    own."""

    def __init__(self, model: Model, longest: int) -> None:
        self.model = model
        self.blocks = torch.arange(-(-longest // BLOCK), dtype=torch.int32, device=model.device)
        self._cache = model.allocate_cache(len(self.blocks), BLOCK)

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """Hidden states after the final norm, [len(ids), hidden], in memory of their own."""
        return self.model.forward(self.batch(ids), self._cache)

    def batch(self, ids: Sequence[int]) -> ForwardBatch:
        """``ids`` as the one row of a batch, from position 0 on."""
        count, device = len(ids), self.model.device
        positions = torch.arange(count, device=device)
        return ForwardBatch(
            token_ids=torch.tensor(ids, device=device),
            positions=positions,
            slot_mapping=positions,  # the blocks lie in order
            query_starts_host=[0, count],
            seq_lens_host=[count],
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            block_tables=self.blocks[None],
            block_size=BLOCK,
            decode_rows=int(count == 1),
            logit_rows=torch.tensor([count - 1], device=device),
        )


def slices(count: int, vocab: int) -> Iterator[slice]:
    """Of ``count`` rows, so many at a time that their logits take ``LOGITS_BYTES``."""
    step = max(1, LOGITS_BYTES // (4 * vocab))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
