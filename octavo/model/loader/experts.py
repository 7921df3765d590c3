"""Experts of a checkpoint: which stored tensors, or parts of such, one of ours comes from, and how
it is put together. Never imports torch at module level."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.model.families.experts import ExpertLayout
from octavo.model.spec import DecoderSpec, MoESpec
from octavo.quant import mxfp4

if TYPE_CHECKING:
    import torch

    from octavo.ops.weights import Weight

_OURS = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Piece:
    """A stored tensor, or of its first axis the element ``index``. ``shape``: of all of it.
    ``packed``: it holds bytes, which are no numbers yet."""

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    packed: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        return self.shape if self.index is None else self.shape[1:]


class StoredExperts:
    """The experts of the checkpoint whose tensors are called ``stored``, in the first of the
    ``layouts`` of which it has something; the first of all where it has nothing of any.
    ``left_out``: what its names lack at their beginning."""

    def __init__(
        self,
        spec: DecoderSpec,
        layouts: Sequence[ExpertLayout],
        stored: Collection[str],
        left_out: str = "",
    ) -> None:
        self._left_out = left_out
        self._counts = {
            index: layer.mlp.router.num_experts
            for index, layer in enumerate(spec.layers)
            if isinstance(layer.mlp, MoESpec)
        }
        first = next(iter(self._counts), 0)
        found = [
            layout
            for layout in layouts
            if any(
                self._filled(name, first, 0) in stored
                for names in layout.names.values()
                for name in names
                if not name.endswith("_bias")  # of several layouts
            )
        ]
        self.layout = (*found, *layouts, ExpertLayout({}))[0]

    def pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """Where our tensor of that name and shape comes from; (): it is of no expert."""
        match = _OURS.fullmatch(name)
        if not match:
            return ()
        layer, expert = int(match[1]), int(match[2])
        names = self.layout.names[match[3]]
        shapes = self._stored_shapes(shape, len(names))
        packed = self.layout.form == "mxfp4" and len(shape) == 2
        pieces = []
        for template, own in zip(names, shapes):
            stored = self._filled(template, layer, expert)
            if "{e}" in template:
                pieces.append(Piece(stored, own, packed=packed))
            else:
                pieces.append(Piece(stored, (self._counts[layer], *own), expert, packed))
        return tuple(pieces)

    def _stored_shapes(self, shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
        """Of the ``count`` stored tensors of one of ours, without the axis of experts."""
        if len(shape) == 2 and self.layout.form == "columns":
            return [shape[::-1]]
        if len(shape) == 2 and self.layout.form == "mxfp4":
            blocks = (shape[0], shape[1] // mxfp4.BLOCK)
            return [(*blocks, mxfp4.BLOCK_BYTES), blocks]
        return [(shape[0] // count, *shape[1:])] * count

    def joined(self, name: str, pieces: Sequence[Weight], dtype: torch.dtype) -> Weight:
        """Our tensor of that name from its pieces."""
        from torch import Tensor

        from octavo.ops.joined import fit_together, joined
        from octavo.ops.weights import dense

        values: Weight
        if len(pieces) == 2 and self.layout.form == "mxfp4":
            values = mxfp4.read(*pieces)  # type: ignore[arg-type]
        elif fit_together(pieces):
            values = joined(pieces)
        else:
            values = joined([dense(piece, dtype) for piece in pieces])
        if isinstance(values, Tensor) and values.dim() == 2 and self.layout.form == "columns":
            values = values.T
        if self.layout.interleaved and ".gate_up." in name:
            values = joined((values[::2], values[1::2]))
        return values.to(dtype).contiguous() if isinstance(values, Tensor) else values

    def _filled(self, template: str, layer: int, expert: int) -> str:
        name = template.replace("{i}", str(layer)).replace("{e}", str(expert))
        return name.removeprefix(self._left_out)
