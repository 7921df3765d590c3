"""The one forward that runs every family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.model import caches
from octavo.model.attention import Attention
from octavo.model.batch import ForwardBatch
from octavo.model.embedding import Embedding
from octavo.model.layer import Layer, Part
from octavo.model.linear import Linear
from octavo.model.norm import Norm
from octavo.model.recorded import RecordedLayers
from octavo.model.shard import ALONE, Cut, TensorParallel
from octavo.model.spec import DecoderSpec
from octavo.model.stages import Stage, all_layers
from octavo.model.states import AttentionStates
from octavo.model.versions import choose_versions
from octavo.ops.native import library as native
from octavo.quant.multiply import LinearVersions
from octavo.quant.rounding import Rounding

# Operations that are no call of a step's layers, or of which the linears themselves tell.
_ASIDE = ("copy_blocks", "linear", "soft_cap")


class Model:
    """A decoder with its weights (``loader.load.load_model``), for inference only.

    ``device``: "cpu" or "cuda". ``deterministic``: a row's logits are the same, bit for bit, in any
    batch; raises ConfigError where that cannot be had. ``implementations``: operation -> the
    version chosen for it.
    ``rounding``: what the linears' dense weights become while loading; the embedding's do not, the
    head's where the rounding says so. ``rounds_inputs``: see ``LinearVersions``.
    ``cache_dtype``: what keys and values are kept in, see ``AttentionGeometry``. ``ranks``: that
    share each layer; raises ConfigError where it cannot be divided among so many. ``stage``: which
    of the layers these are, and which ends (``model.stages``); None: all.
    ``quantization``: how the weights are kept, as in ``--quantization``; None: all are dense.
    ``reasons``: why ``dtype`` is what it is. ``weight_bytes``: what the weights take in memory;
    ``linear_bytes``: the layers' matrices of it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: str = "cpu",
        deterministic: bool = False,
        rounding: Rounding | None = None,
        rounds_inputs: bool = True,
        cache_dtype: torch.dtype | None = None,
        ranks: TensorParallel = ALONE,
        stage: Stage | None = None,
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self.stage = stage = stage or all_layers(len(spec.layers))
        self.dtype = dtype
        self.device = device
        self.rounding = rounding
        self.quantization: str | None = None
        self.reasons: dict[str, str] = {}
        if device == "cpu" and (problem := native.problem()):
            self.reasons["cpu kernels"] = problem
        self.weight_bytes = self.linear_bytes = 0
        chosen = choose_versions(spec, dtype, device, deterministic, cache_dtype)
        self.implementations = {op: version.name for op, version in chosen.items()}
        ops = {op: version.call for op, version in chosen.items()}
        self._linears = LinearVersions(ops["linear"], device, dtype, deterministic, rounds_inputs)
        make_linear = partial(Linear, versions=self._linears, rounding=rounding)
        self._copy_blocks = ops["copy_blocks"]
        self.cache_dtype = dtype if cache_dtype is None else cache_dtype
        self._states = AttentionStates(ops, dtype, device, cache_dtype)
        rounds_head = rounding is not None and rounding.head
        self.embedding = Embedding(spec, ops, make_linear, rounds_head, ranks, stage)
        own = list(enumerate(spec.layers))[stage.first_layer : stage.end_layer]
        self.layers = [
            Layer(f"layers.{index}", layer, spec.hidden_size, self._states, make_linear, ops, ranks)
            for index, layer in own
        ]
        self._state_of = [self._states.index(layer.mixer.key) for layer in self.layers]
        norm = spec.norm if stage.is_last else None
        self.norm = Norm("norm", norm, spec.hidden_size, ops) if norm else None
        self._recorded: dict[int, RecordedLayers] | None = None  # by how many layers they are

    def parts(self) -> list[Part]:
        has_end = self.stage.is_first or self.stage.is_last
        extra: list[Part | None] = [self.norm, self._states.factors]
        layers = [part for layer in self.layers for part in layer.parts()]
        return [*([self.embedding] if has_end else []), *layers, *(part for part in extra if part)]

    def cuts(self) -> dict[str, Cut]:
        """What this rank keeps of our tensors of which it does not keep all."""
        of_layers = (cut for layer in self.layers for cut in layer.cuts())
        return dict([*self.embedding.cuts(), *of_layers])

    def finish(self) -> None:
        """After all parts are loaded."""
        self.finish_states()
        recordable = self._is_recordable()
        self.implementations |= self._linears.used
        if recordable:
            self._recorded = defaultdict(RecordedLayers)

    def finish_states(self) -> None:
        """After what is beside the layers is loaded: they can be run one by one then."""
        self._states.finish(self.spec.max_position)

    def layer_states(self, batch: ForwardBatch) -> list[Any]:
        """What each layer shares with others of its kind in a step, to be called with."""
        states = self._states.prepare(batch)
        return [states[state] for state in self._state_of]

    def _is_recordable(self) -> bool:
        """Whether all up to the final norm is kernels that a tape can hold."""
        kernels = {op: name for op, name in self.implementations.items() if op not in _ASIDE}
        linears = (linear for layer in self.layers for linear in layer.linears())
        return (
            (self.ranks.comm is None or self.ranks.comm.recordable)
            and all(name == "native" for name in kernels.values())
            and all(layer.is_plain for layer in self.layers)
            and all(getattr(linear.apply, "recordable", False) for linear in linears)
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        shapes = (layer.mixer.operation.kv_shape(1, block_size) for layer in self.layers)
        return sum(torch.Size(shape).numel() for shape in shapes) * self.cache_dtype.itemsize

    @property
    def plain_kv_bytes(self) -> int:
        """Of a token over all layers, were it kept as it is computed, without padding."""
        numbers = sum(
            2 * layer.mixer.spec.num_kv_heads * layer.mixer.spec.head_dim
            for layer in self.layers
            if isinstance(layer.mixer, Attention)
        )
        return numbers * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """One tensor per layer."""
        shapes = [layer.mixer.operation.kv_shape(num_blocks, block_size) for layer in self.layers]
        return caches.allocate(shapes, self.cache_dtype, self.device)

    @torch.inference_mode()
    def copy_blocks(self, cache: list[Tensor], pairs: Tensor) -> None:
        """pairs: int64 [c, 2] of source and destination blocks, in every layer."""
        for some in caches.alike(cache):
            self._copy_blocks(some, pairs)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: list[Tensor], hidden: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the batch's KV into ``cache``.

        A stage that is not the last gives those after its last layer, for the next one: in the
        model's dtype, of all tokens. One that is not the first takes those as ``hidden``, which may
        be written over; it does not read the batch's ids."""
        return self._run(batch, cache, hidden, None, len(self.layers))

    @torch.inference_mode()
    def forward_last(
        self, batch: ForwardBatch, cache: list[Tensor], hidden: Tensor | None = None
    ) -> Tensor:
        """The same for the tokens ``batch.logit_rows`` alone, [r, hidden]: the last layer spares
        the others all but their keys and values. A stage that is not the last gives all, as
        ``forward`` does."""
        tokens = batch.logit_rows if self.stage.is_last else None
        return self._run(batch, cache, hidden, tokens, len(self.layers))

    @torch.inference_mode()
    def forward_first(self, batch: ForwardBatch, cache: list[Tensor], num_layers: int) -> Tensor:
        """As ``forward_last`` through the first ``num_layers`` layers alone, whose KV is written:
        a rough guess of what all would give. Not for one of several stages."""
        return self._run(batch, cache, None, batch.logit_rows, num_layers)

    def _run(
        self,
        batch: ForwardBatch,
        cache: list[Tensor],
        hidden: Tensor | None,
        tokens: Tensor | None,
        num_layers: int,
    ) -> Tensor:
        if (hidden is None) != self.stage.is_first:
            raise ValueError(
                "hidden states go into a stage that is not the first, and into no other"
            )
        states = self._states.prepare(batch)
        layers = partial(self._run_layers, num_layers)
        recorded = None if self._recorded is None else self._recorded[num_layers]
        if hidden is not None:
            x = hidden
        elif recorded and self.embedding.is_plain:
            layers = partial(self._run_all, num_layers)
            return recorded(layers, batch.token_ids, cache, states, tokens)
        else:
            x = self.embedding(batch.token_ids, batch.positions)
        if recorded:
            return recorded(layers, x, cache, states, tokens)
        # On a GPU rows of padding fill a captured step.
        slots = None if self.device == "cpu" else batch.slot_mapping
        return layers(x, cache, states, tokens, slots)

    def _run_all(
        self,
        num_layers: int,
        ids: Tensor,
        cache: list[Tensor],
        states: Sequence[Any],
        tokens: Tensor | None,
    ) -> Tensor:
        return self._run_layers(num_layers, self.embedding(ids), cache, states, tokens)

    def _run_layers(
        self,
        num_layers: int,
        x: Tensor,
        cache: list[Tensor],
        states: Sequence[Any],
        tokens: Tensor | None,
        slots: Tensor | None = None,
    ) -> Tensor:
        layers = self.layers[:num_layers]
        for layer, layer_cache, state in zip(layers, cache, self._state_of):
            wanted = tokens if layer is layers[-1] else None
            x = layer(x, layer_cache, states[state], wanted, slots)
        return x if self.norm is None else self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden] rows of ``forward``. Returns FP32 [r, vocab]."""
        return self.embedding.logits(hidden)

    @torch.inference_mode()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden]. The first of each row's largest logits, int64 [r]; where some are no
        numbers, which one is not said."""
        return self.embedding.most_likely(hidden)
