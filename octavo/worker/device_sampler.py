"""DeviceSampler: draws on the device, in launches that wait for nothing.

``draw`` is fit to be captured in a graph: everything it depends on lies in the tables. ``edit`` and
``logprobs`` are for steps in which a row asks for them, outside of graphs. The law is that of
``worker.sampler``; docs/sampling.md says where its floating point may differ.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import sampling
from octavo.ops.needs import PENALTIES
from octavo.ops.triton import edits
from octavo.ops.triton import sampling as kernels
from octavo.ops.triton.sampling_parts import MOST_SEEN
from octavo.worker.device_tables import POINTERS, DeviceTables, pack, pack_edits
from octavo.worker.slots import Slots

Int32 = NDArray[np.int32]
# Log-probabilities are computed for so many bytes of logits at a time.
REPORT_BYTES = 64 << 20
IN_PROMPT = -(1 << 15)


class DeviceSampler:
    """Draws for up to ``max_rows`` rows at a time, by the parameters that ``place`` has put into
    the ``tables``. ``slots``: the host's state of the same requests."""

    def __init__(self, tables: DeviceTables, slots: Slots, max_rows: int) -> None:
        self.tables = tables
        self.slots = slots
        device = tables.history.device
        self.tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.scratch = kernels.Scratch.allocate(max_rows, slots.vocab_size, device)
        self._edits: dict[int, Tensor] = {}  # slot -> the buffer that its row of edits points to

    def place(self, chosen: Int32) -> None:
        """Enqueues the upload of the parameters of slots that ``Slots.apply`` has just filled.
        Their known ids must be in the device's histories before."""
        tables = self.tables
        floats, ints = pack(self.slots, chosen)
        columns = [chosen.astype(np.int32)[:, None], ints, floats.view(np.int32)]
        sent = self._send(np.concatenate(columns, axis=1))
        index, width = sent[:, 0].to(torch.int64), ints.shape[1]
        tables.params_i.index_copy_(0, index, sent[:, 1 : 1 + width])
        tables.params_f.index_copy_(0, index, sent[:, 1 + width :].view(torch.float32))
        for slot in chosen.tolist():
            if self.slots.needs[slot] & PENALTIES:
                self._count(slot, int(self.slots.prompt_len[slot]), int(self.slots.length[slot]))
            self._place_edits(slot)

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor | None = None,
        truncation: bool = True,
    ) -> Tensor:
        """int32 [r] of ``tokens``: one for each row of logits (float32 [r, V], left as they are),
        which also goes into the slot's history and counts.

        slots, positions (of the drawn token): int32 [r] on the device; rows of slot -1 are left
        out. truncation: False saves two launches where no row uses top_k, top_p or min_p.
        """
        tables = self.tables
        if tokens is None:
            tokens = self.tokens[: len(logits)]
        kernels.draw(
            logits,
            slots,
            positions,
            tokens,
            tables.params_f,
            tables.params_i,
            tables.history,
            tables.seen,
            self.scratch,
            truncation,
        )
        return tokens

    def edit(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Allowed ids, bad words, min_tokens and biases, in place, for the rows that ask."""
        tables = self.tables
        edits.edit(logits, slots, positions, tables.params_i, tables.edits, tables.history)

    def draw_edited(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """``edit``, then ``draw``. Log-probabilities must be taken before."""
        self.edit(logits, slots, positions)
        return self.draw(logits, slots, positions, tokens)

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids int32 [q, k + 1], values float32 [q, k + 1] and ranks int32 [q] on the device.

        logits: float32 [q, V], raw, of the rows that ask; tokens: int [q]. Column 0 is the token,
        then come the k most likely (``sampling.top_logprobs``).
        """
        size = max(1, REPORT_BYTES // (4 * logits.shape[-1]))
        parts = [
            sampling.top_logprobs(
                log_softmax(logits[start : start + size]),
                tokens[start : start + size].to(torch.int64),
                k,
            )
            for start in range(0, len(logits), size)
        ]
        ids, values, ranks = zip(*parts)
        return torch.cat(ids), torch.cat(values), torch.cat(ranks)

    def _send(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self.tables.history.device, non_blocking=True)

    def _count(self, slot: int, prompt_len: int, length: int) -> None:
        history, seen = self.tables.history[slot], self.tables.seen[slot]
        counts = torch.zeros(len(seen), dtype=torch.int32, device=seen.device)
        output = history[prompt_len:length]
        counts.index_add_(0, output, torch.ones_like(output))
        seen.copy_(counts.clamp_(max=MOST_SEEN.value))
        in_prompt = torch.zeros_like(seen)
        in_prompt.index_fill_(0, history[:prompt_len].to(torch.int64), IN_PROMPT)
        seen.bitwise_or_(in_prompt)

    def _place_edits(self, slot: int) -> None:
        wanted = self.slots.edits.get(slot)
        if wanted is None:
            self._edits.pop(slot, None)
            return
        values, row = pack_edits(wanted, self.slots.vocab_size)
        buffer = self._edits[slot] = self._send(values)
        held = [column for column in POINTERS if row[column]]
        row[held] += buffer.data_ptr() - 1
        self.tables.edits[slot].copy_(torch.from_numpy(row), non_blocking=True)


def log_softmax(logits: Tensor) -> Tensor:
    """float32 [q, V] -> the same, of rows. All rows start at multiples of 16 bytes: where they do
    not, the kernel of a GPU sums up a row in an order that depends on its place in the batch."""
    vocab = logits.shape[-1]
    if vocab % 4 == 0:
        return logits.log_softmax(-1)
    padded = torch.nn.functional.pad(logits, (0, -vocab % 4), value=float("-inf"))
    return padded.log_softmax(-1)[:, :vocab]
