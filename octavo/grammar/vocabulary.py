"""What a matcher must know of a tokenizer: each token's bytes, and which ids are special."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Vocabulary(msgspec.Struct, array_like=True):
    """``tokens[i]``: the bytes of id i, b"" where it has none; as many as the model has logits.

    ``special_ids`` never match text, whatever they spell: only a grammar that names them
    (``<|token|>``) allows them. ``eos_ids`` end an output; there may be none.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @classmethod
    def of_model(
        cls, size: int, tokens: list[bytes], special_ids: Iterable[int], eos_ids: list[int]
    ) -> Vocabulary:
        """For a model with ``size`` logits: its tokenizer may know fewer ids, or more."""
        table = tokens[:size] + [b""] * (size - len(tokens))
        return cls(table, sorted(index for index in special_ids if index < size), eos_ids)

    @property
    def words(self) -> int:
        """int32 words of a mask: one bit per id."""
        return -(-len(self.tokens) // 32)
