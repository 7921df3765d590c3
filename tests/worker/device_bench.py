"""Slots with requests in them, drawn for by the host's sampler and by a device's."""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.needs import EDITS, PENALTIES
from octavo.ops.triton.sampling import Scratch
from octavo.types import SamplingParams
from octavo.worker.device_sampler import DeviceSampler
from octavo.worker.device_tables import DeviceTables
from octavo.worker.sampler import Sampler
from octavo.worker.slots import Slots
from tests.worker.plans import New, Row, int32, plan

BLOCK = 16


class DeviceBench:
    """``draw`` draws the next tokens of slots on the device, ``expected`` on the host; a token
    counts when it is passed to ``append``. The device's histories and counts are its own."""

    def __init__(
        self,
        vocab: int,
        device: str = "cpu",
        max_slots: int = 16,
        max_len: int = 96,
        scratch: Scratch | None = None,
    ) -> None:
        self.device = device
        self.slots = Slots(max_slots, max_len, BLOCK, vocab)
        self.sampler = Sampler(self.slots)
        self.tables = DeviceTables.allocate(
            max_slots, max_len, self.slots.max_blocks, vocab, device
        )
        self.device_sampler = DeviceSampler(self.tables, self.slots, max_slots)
        if scratch is not None:
            self.device_sampler.scratch = scratch

    def place(self, *new: New) -> None:
        rows = [
            Row(n.slot, 0, len(n.ids), draw=True, blocks=[0] * (-(-len(n.ids) // BLOCK)))
            for n in new
        ]
        self.slots.apply(plan(*rows, new=new))
        for n in new:
            ids = torch.tensor(n.ids, dtype=torch.int32)
            self.tables.history[n.slot, : len(ids)] = ids.to(self.device)
        self.device_sampler.place(int32([n.slot for n in new]))

    def columns(self, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and positions of their next tokens on the device; -1 is padding."""
        positions = [int(self.slots.length[slot]) if slot >= 0 else 0 for slot in slots]
        return (
            torch.tensor(slots, dtype=torch.int32, device=self.device),
            torch.tensor(positions, dtype=torch.int32, device=self.device),
        )

    def draw(self, logits: torch.Tensor, slots: list[int], edited: bool = False) -> list[int]:
        logits = logits.to(self.device, copy=True)
        draw = self.device_sampler.draw_edited if edited else self.device_sampler.draw
        return draw(logits, *self.columns(slots)).tolist()

    def expected(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        drawn = self.sampler.sample(logits.clone(), int32(slots), self.slots.length[slots])
        return drawn.tokens.tolist()

    def append(self, slots: list[int], tokens: list[int]) -> None:
        """On the host; the device has done so while it drew."""
        positions = self.slots.length[slots]
        self.slots.append(int32(slots), positions, torch.tensor(tokens))

    def edited(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """The logits as the host edits them."""
        logits = logits.clone()
        for row, slot in enumerate(slots):
            if slot >= 0 and self.slots.needs[slot] & EDITS:
                part, position = logits[row : row + 1], self.slots.length[[slot]]
                self.sampler._edit(part, int32([slot]), position, np.zeros(1, dtype=np.int64))
        return logits

    def adopt(self, slots: list[int]) -> None:
        """Gives the device the host's histories and counts, also where its draws were others."""
        for slot in slots:
            counts, prompt = self.slots.output_counts[slot], self.slots.prompt_mask[slot]
            self.tables.history[slot].copy_(self.slots.history[slot])
            if self.slots.needs[slot] & PENALTIES:
                seen = counts.to(torch.int16) | (prompt.to(torch.int16) * -(1 << 15))
                self.tables.seen[slot].copy_(seen)

    def check(self, slots: list[int]) -> None:
        """Histories of the slots, and counts where there are penalties, agree."""
        for slot in slots:
            length = int(self.slots.length[slot])
            known = self.slots.history[slot, :length]
            assert self.tables.history[slot, :length].tolist() == known.tolist()
            if self.slots.needs[slot] & PENALTIES:
                seen = self.tables.seen[slot].cpu().int()
                assert torch.equal(seen & 0x7FFF, self.slots.output_counts[slot])
                assert torch.equal(seen < 0, self.slots.prompt_mask[slot])


def random_params(random: np.random.Generator) -> SamplingParams:
    """Any mixture of the common parameters, greedy included."""
    chosen: dict[str, float] = {}
    if random.random() < 0.5:
        chosen["top_p"] = float(random.choice([0.05, 0.5, 0.8, 0.9, 0.95, 0.99, 0.9999]))
    if random.random() < 0.5:
        chosen["top_k"] = int(random.choice([1, 2, 5, 20, 50, 200, 1000]))
    if random.random() < 0.3:
        chosen["min_p"] = float(random.choice([0.001, 0.02, 0.1, 1.0]))
    if random.random() < 0.3:
        chosen["repetition_penalty"] = float(random.choice([0.8, 1.1, 1.5]))
    if random.random() < 0.2:
        chosen["frequency_penalty"] = float(random.choice([-0.7, 0.3, 2.0]))
    if random.random() < 0.2:
        chosen["presence_penalty"] = float(random.choice([-0.7, 0.3, 2.0]))
    temperature = float(random.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 2.0]))
    return SamplingParams(temperature=temperature, **chosen)  # type: ignore[arg-type]


def random_edits(random: np.random.Generator, slot: int, vocab: int) -> New:
    """A request with any mixture of edits; bans of all that is allowed are among them."""

    def ids(count: int) -> list[int]:
        return random.choice(vocab, count, replace=False).tolist()

    chosen: dict[str, object] = {"temperature": float(random.choice([0.0, 1.0]))}
    if random.random() < 0.4:
        chosen["allowed_token_ids"] = ids(int(random.choice([1, 2, 40])))
    if random.random() < 0.4:
        chosen["logit_bias"] = {i: float(random.normal() * 5) for i in ids(150)}
    new = New(slot, random.integers(0, 8, 6).tolist(), prompt_len=int(random.integers(1, 6)))
    if random.random() < 0.5:
        chosen["min_tokens"] = 3
        new.min_stop_ids = ids(4) + chosen.get("allowed_token_ids", [])[:2]
    if random.random() < 0.6:
        words = [random.integers(0, 8, int(random.integers(1, 5))).tolist() for _ in range(140)]
        new.bad_words = words[: int(random.choice([1, 12, 140]))]
    new.params = SamplingParams(max_tokens=99, **chosen)  # type: ignore[arg-type]
    return new
