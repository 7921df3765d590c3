"""Guessing: speculation on a device, where guesses are made and compared without the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops.triton import guesses
from octavo.ops.triton.step import StepBuffers
from octavo.worker.device_tables import DeviceTables


@dataclass(frozen=True)
class Guessing:
    """``most``: guesses of a row. ``shortest``, ``longest``: ids that an n-gram must, and can,
    match. ``rate``: for measurements with random weights, how often a guess counts as right,
    whatever was drawn; None: when it is what was drawn."""

    most: int
    shortest: int
    longest: int
    rate: float | None = None

    @property
    def widths(self) -> list[int]:
        """Tokens that rows may bring, ascending: each number has its graphs."""
        return sorted({min(width, self.most + 1) for width in (3, self.most + 1)})

    def width(self, num_guesses: int) -> int:
        """The least of them with room for so many guesses and the token before them."""
        return next(width for width in self.widths if width > num_guesses)

    def begin(
        self,
        buffers: StepBuffers,
        num_rows: int,
        queries: int,
        tables: DeviceTables,
        guessed: Tensor,
        block_size: int,
    ) -> None:
        guesses.begin_guesses(
            buffers,
            num_rows,
            queries,
            tables.history,
            tables.block_table,
            tables.lengths,
            guessed,
            block_size,
            self.shortest,
            self.longest,
            self.rate is not None,
        )

    def accept(
        self,
        buffers: StepBuffers,
        num_rows: int,
        queries: int,
        tokens: Tensor,
        guessed: Tensor,
        tables: DeviceTables,
        counts: Tensor,
    ) -> None:
        guesses.accept(
            buffers, num_rows, queries, tokens, guessed, tables.lengths, counts, self.rate
        )
