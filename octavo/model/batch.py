"""ForwardBatch: what one step gives to the decoder. Tensors on the model's device; torch inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class ForwardBatch:
    """A mixed batch of n rows with T tokens in all. Row i brings q_i tokens, whose positions end
    its context: positions seq_lens[i] - q_i .. seq_lens[i] - 1.

    ``decode_rows``: the first so many rows have q_i == 1 (the runner sorts them first); the rest
    bring any number. A kernel may use it as a fast path; nothing else depends on it.
    Host copies (``*_host``) spare CPU kernels a tensor read per layer. They are empty on a GPU,
    where a step is enqueued without knowing what it will find, and rows of padding (no context,
    one token whose slot is -1) fill a captured graph.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T] block * block_size + offset where each token's KV goes
    query_starts_host: list[int]  # n + 1
    seq_lens_host: list[int]  # n, context length with this step's tokens
    query_starts: torch.Tensor  # int32 [n + 1]
    seq_lens: torch.Tensor  # int32 [n]
    block_tables: torch.Tensor  # int32 [n, max blocks of any row]
    block_size: int
    decode_rows: int
    logit_rows: torch.Tensor  # int64 [r] token rows whose logits are wanted
    queries: int = 1  # more: each row brings just so many (then decode_rows is 0)
