"""Plans written by hand, and a model small enough to check by eye."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import PROMPT_LOGPROBS, SAMPLE, NewRequest, StepPlan
from octavo.model.batch import ForwardBatch
from octavo.types import SamplingParams


@dataclass
class Row:
    """``draw``: the row ends at its request's last token. ``blocks`` go to ``block_start`` on."""

    slot: int
    start: int
    count: int
    draw: bool = False
    blocks: list[int] = field(default_factory=list)
    block_start: int = 0
    score: bool = False


@dataclass
class New:
    slot: int
    ids: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    prompt_len: int | None = None
    min_stop_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)


def int32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plan(
    *rows: Row,
    new: tuple[New, ...] = (),
    freed: tuple[int, ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
    step: int = 0,
) -> StepPlan:
    flags = [SAMPLE * r.draw + PROMPT_LOGPROBS * r.score for r in rows]
    return StepPlan(
        step=step,
        slots=int32([r.slot for r in rows]),
        num_tokens=int32([r.count for r in rows]),
        starts=int32([r.start for r in rows]),
        flags=np.array(flags, dtype=np.uint8),
        block_starts=int32([r.block_start for r in rows]),
        block_indptr=int32(np.cumsum([0, *(len(r.blocks) for r in rows)])),
        block_ids=int32([b for r in rows for b in r.blocks]),
        freed_slots=int32(freed),
        copies=int32(copies).reshape(-1, 2),
        new_requests=[
            NewRequest(
                n.slot,
                len(n.ids) if n.prompt_len is None else n.prompt_len,
                n.params,
                n.seed,
                n.min_stop_ids,
                n.bad_words,
            )
            for n in new
        ],
        new_indptr=int32(np.cumsum([0, *(len(n.ids) for n in new)])),
        new_token_ids=int32([i for n in new for i in n.ids]),
    )


class SumModel:
    """Its hidden state is the sum over the context, read through the block table from the cache,
    of (position + 1) x a vector of small integers per token: exact in float32, so that any
    chunking gives the same logits, and wrong blocks, positions or ids give others."""

    vocab, width = 97, 8

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.embedding = torch.tensor(random.integers(-8, 9, (self.vocab, self.width))).float()
        self.head = torch.tensor(random.integers(-8, 9, (self.width, self.vocab))).float()
        self.spec = SimpleNamespace(
            architecture="sum", vocab_size=self.vocab, max_position=256, hidden_size=self.width
        )
        self.dtype = torch.float32
        self.weight_bytes = 4 * self.embedding.numel()
        self.implementations = {"attention": "sum"}
        self.reasons = {"dtype": "the only one"}
        self.fail = False

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 4 * block_size * self.width

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        return [torch.zeros(1, num_blocks, block_size, self.width)]

    def copy_blocks(self, cache: list[Tensor], pairs: Tensor) -> None:
        cache[0][0, pairs[:, 1]] = cache[0][0, pairs[:, 0]]

    def forward(self, batch: ForwardBatch, cache: list[Tensor], hidden: None = None) -> Tensor:
        if self.fail:
            raise RuntimeError("no such kernel")
        flat = cache[0].view(-1, self.width)
        values = self.embedding[batch.token_ids] * (batch.positions[:, None] + 1)
        kept = batch.slot_mapping >= 0
        flat[batch.slot_mapping[kept]] = values[kept]
        hidden = torch.zeros(len(batch.token_ids), self.width)
        starts = batch.query_starts.tolist()
        for row, length in enumerate(batch.seq_lens.tolist()):
            begin, end = starts[row : row + 2]
            if not length:
                continue  # padding
            blocks = batch.block_tables[row, : -(-length // batch.block_size)].long()
            context = cache[0][0, blocks].view(-1, self.width)[:length].cumsum(0)
            hidden[begin:end] = context[length - (end - begin) :]
        return hidden

    def forward_last(self, batch: ForwardBatch, cache: list[Tensor], hidden: None = None) -> Tensor:
        return self.forward(batch, cache)[batch.logit_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head / 64

    def most_likely(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)

    def expected(self, ids: list[int]) -> Tensor:
        """Logits after ``ids``, computed without any of the above."""
        places = torch.arange(1, len(ids) + 1).float()[:, None]
        return (self.embedding[torch.tensor(ids)] * places).sum(0) @ self.head / 64
