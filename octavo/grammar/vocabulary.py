"""What a matcher must know of a tokenizer: each token's bytes, and which ids are special."""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, array_like=True):
    """``tokens[i]``: the bytes of id i, b"" where it has none; as many as the model has logits.

    ``special_ids`` never match text, whatever they spell: only a grammar that names them
    (``<|token|>``) allows them. ``eos_ids`` end an output; there may be none.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @property
    def words(self) -> int:
        """int32 words of a mask: one bit per id."""
        return -(-len(self.tokens) // 32)
