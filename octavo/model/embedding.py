"""Both ends of a decoder: what a token becomes, and the logits of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.model.linear import Linear
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import DecoderSpec
from octavo.model.stages import Stage, all_layers
from octavo.ops.cut import outputs_of
from octavo.ops.sampling import most_likely
from octavo.ops.weights import dense


class Embedding:
    """Token embedding, and the head, which shares its weight when tied.

    The head may repack its copy for multiplying (on a CPU it does, on a GPU not). Rows of a
    quantized one are read from what has been packed, on a GPU from an expanded copy. Ranks that
    share layers divide the vocabulary: what a token becomes and the logits are whole on each.
    Of several pipeline stages the first has the one end and the last the other; a tied weight is
    loaded by both.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Mapping[str, Callable[..., Any]],
        make_linear: Any,
        rounds_head: bool = False,
        ranks: TensorParallel = ALONE,
        stage: Stage | None = None,
    ) -> None:
        """``ops``: the chosen versions by name. ``rounds_head``: the head is rounded while loading
        as other linears are. ``stage``: whose ends these are; None: there is one."""
        self.spec = spec
        self.stage = stage or all_layers(len(spec.layers))
        self.operation = ops["embedding"]
        self._add_scaled = ops.get("add_scaled")
        self._soft_cap = ops.get("soft_cap", _no_cap)
        width, shard = spec.embedding.width, ranks.shard
        self.ranks = ranks
        self.own = shard.vocabulary(spec.vocab_size) if shard.size > 1 else None
        self.sizes = shard.vocabulary_sizes(spec.vocab_size)
        head = make_linear(
            (("head", spec.vocab_size),),
            width,
            epilogue="logits",
            rows=None if self.own is None else (self.own,),
        )
        if not rounds_head:
            head.rounding = None
        self.head: Linear = head
        self.project: tuple[Linear, Linear] | None = None  # to the hidden size and back
        if width != spec.hidden_size:
            self.project = (
                make_linear((("embed_in", spec.hidden_size),), width),
                make_linear((("embed_out", width),), spec.hidden_size),
            )
        self._scale: float | None = None
        self._positions: Tensor | None = None
        self._look_up: Callable[[Tensor], Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether it calls operations and nothing else of torch between them."""
        alone = self.own is None
        return alone and self.project is None and self.spec.embedding.positions is None

    def linears(self) -> tuple[Linear, ...]:
        """Those with weights of their own."""
        found = [self.head] if self.stage.is_last and not self.spec.embedding.tied else []
        if self.project and self.stage.is_first:
            found.append(self.project[0])
        if self.project and self.stage.is_last:
            found.append(self.project[1])
        return tuple(found)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        spec = self.spec.embedding
        if self.stage.is_first or (self.stage.is_last and spec.tied):
            yield "embed.weight", (self.spec.vocab_size, spec.width)
        for linear in self.linears():
            yield from linear.wanted()
        if spec.positions is not None and self.stage.is_first:
            yield "positions.weight", (spec.positions.rows, self.spec.hidden_size)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        if self.own is not None:
            yield "embed.weight", Cut((self.own,))
            yield "head.weight", Cut((self.own,))

    def load(self, tensors: Mapping[str, Any]) -> None:
        if self.stage.is_last:
            name = "embed.weight" if self.spec.embedding.tied else "head.weight"
            self.head.load({"head.weight": tensors[name]})
        if self.stage.is_first:
            self._load_rows(tensors)
        for linear in self.linears():
            if linear is not self.head:
                linear.load(tensors)

    def _load_rows(self, tensors: Mapping[str, Any]) -> None:
        """What a token becomes, but for a projection; after the head, if it is here."""
        spec, dtype = self.spec.embedding, self.head.versions.dtype
        weight = tensors["embed.weight"]
        if self.own is not None:
            weight = outputs_of(weight, (self.own,))
        if isinstance(weight, Tensor) or self.head.versions.device != "cpu":
            self._look_up = partial(_rows, self.operation, dense(weight, dtype))
        elif spec.tied and self.stage.is_last:
            self._look_up = self.head.apply.rows  # type: ignore[attr-defined]
        else:
            packed = self.head.versions.multiplier([weight], None, "none")
            self._look_up = packed.rows  # type: ignore[attr-defined]
        if spec.positions is not None:
            self._positions = dense(tensors["positions.weight"], dtype)
        if spec.scale is not None:
            self._scale = float(torch.tensor(spec.scale, dtype=dtype))

    def __call__(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """ids: int64 [T]; positions: int64 [T], which ``is_plain`` does without. [T, hidden]."""
        x = self._look_up(ids) if self.own is None else self._look_up_shared(ids, *self.own)
        if self._scale is not None:
            assert self._add_scaled is not None
            x = self._add_scaled(None, x, self._scale)
        if self.project:
            x = self.project[0](x)
        if self._positions is not None and self.spec.embedding.positions is not None:
            assert positions is not None
            x = x + self.operation(
                positions + self.spec.embedding.positions.offset, self._positions
            )
        return x

    def _look_up_shared(self, ids: Tensor, first: int, end: int) -> Tensor:
        """Each rank has the rows of its own ids, zeros for others."""
        local = ids - first
        is_own = (local >= 0) & (local < end - first)
        x = self._look_up(local.where(is_own, 0))
        return self.ranks.summed(x.masked_fill(~is_own[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden]. Returns FP32 [r, vocab]."""
        if self.project:
            hidden = self.project[1](hidden)
        logits = self.head(hidden)
        if self.own is not None:
            logits = self.ranks.joined(logits, self.sizes)
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits if cap is None else self._soft_cap(logits, cap)

    def most_likely(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden]. The first of each row's largest logits, int64 [r]; where some are no
        numbers, which one is not said."""
        changed = self.spec.logit_softcap is not None or self.spec.logit_scale != 1.0
        if self.project or changed:
            return most_likely(self.logits(hidden))
        values, ids = self._largest(hidden)
        if self.own is None:
            return ids
        # Both are whole in FP64, so one exchange of 16 bytes a row tells all.
        own = torch.stack((values.double(), (ids + self.own[0]).double()), dim=1)
        found = self.ranks.joined(own, [2] * self.ranks.shard.size).view(len(own), -1, 2)
        best = most_likely(found[:, :, 0])  # the first rank of equals has the first ids
        return found[:, :, 1].gather(1, best[:, None])[:, 0].long()

    def _largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the head's own logits: each row's largest, [r], and its first place, int64 [r]."""
        if (largest := getattr(self.head.apply, "largest", None)) is not None:
            found: tuple[Tensor, Tensor] = largest(hidden)
            return found
        logits = self.head(hidden)
        ids = most_likely(logits)
        return logits.gather(1, ids[:, None])[:, 0], ids


def _no_cap(logits: Tensor, cap: float) -> Tensor:
    raise AssertionError("a model without a soft cap was asked to cap")


def _rows(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, ids: Tensor) -> Tensor:
    return operation(ids, weight)
