"""The one forward that runs every family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.model.attention import Attention, geometry_of
from octavo.model.batch import ForwardBatch
from octavo.model.linear import Linear
from octavo.model.mlp import MLP
from octavo.model.norm import Norm
from octavo.model.recorded import RecordedLayers
from octavo.model.rope import Rope
from octavo.model.spec import DecoderSpec, LayerSpec, TensorScaling
from octavo.model.versions import choose_versions
from octavo.ops.attention import AttentionGeometry, PagedAttention
from octavo.ops.native import library as native
from octavo.ops.quantized import QuantizedWeight
from octavo.ops.sampling import most_likely
from octavo.quant.catalogue import format_of
from octavo.quant.format import LinearVersions

CACHE_LINE = 64  # bytes


class Part(Protocol):
    """A piece of the decoder that is loaded at one go."""

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(our tensor name, stored shape) of what it needs from the checkpoint."""

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Takes its tensors, in the model's dtype."""


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        prefix: str,
        spec: LayerSpec,
        hidden_size: int,
        attention: PagedAttention,
        make_linear: Any,
        make_norm: Any,
        take_rows: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.input_norm: Norm = make_norm(f"{prefix}.input_norm", spec.norm, hidden_size)
        self.mixer = Attention(prefix, spec.mixer, hidden_size, attention, make_linear, take_rows)
        self.post_norm: Norm = make_norm(f"{prefix}.post_norm", spec.norm, hidden_size)
        self.mlp = MLP(prefix, spec.mlp, hidden_size, make_linear)
        self._parts: tuple[Part, ...] = (self.input_norm, self.mixer, self.post_norm, self.mlp)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self._parts:
            yield from part.wanted()

    def load(self, tensors: Mapping[str, Any]) -> None:
        for part in self._parts:
            part.load(tensors)

    def linears(self) -> tuple[Linear, ...]:
        return (self.mixer.qkv, self.mixer.out, self.mlp.gate_up, self.mlp.down)

    def __call__(
        self, x: Tensor, cache: Tensor, state: Any, tokens: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden]. ``tokens``: int64 [r], those that are wanted; every token's keys and
        values go into the cache all the same."""
        x = self.mixer(self.input_norm(x), x, cache, state, tokens)
        return self.mlp(self.post_norm(x), x)


class Embedding:
    """Token embedding, and the head, which shares its weight when tied.

    The head may repack its copy for multiplying (on a CPU it does, on a GPU not). Rows of a
    quantized one are read from what has been packed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        operation: Callable[[Tensor, Tensor], Tensor],
        make_linear: Any,
    ) -> None:
        self.spec = spec
        self.operation = operation
        parts = (("head", spec.vocab_size),)
        self.head: Linear = make_linear(parts, spec.hidden_size, epilogue="logits")
        self._look_up: Callable[[Tensor], Tensor]

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed.weight", (self.spec.vocab_size, self.spec.hidden_size)
        if not self.spec.tied_embeddings:
            yield from self.head.wanted()

    def load(self, tensors: Mapping[str, Any]) -> None:
        weight = tensors["embed.weight"]
        head = weight if self.spec.tied_embeddings else tensors["head.weight"]
        self.head.load({"head.weight": head})
        if not isinstance(weight, QuantizedWeight):
            self._look_up = partial(_rows, self.operation, weight)
        elif self.spec.tied_embeddings:
            self._look_up = self.head.apply.rows  # type: ignore[attr-defined]
        else:
            versions = self.head.versions
            packed = versions.quantized([weight], None, "none", versions.dtype)
            self._look_up = packed.rows

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: int64 [T]. Returns [T, hidden]."""
        return self._look_up(ids)


def _rows(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, ids: Tensor) -> Tensor:
    return operation(ids, weight)


class RopeFactors:
    """The checkpoint's own divisors of the rotary frequencies, FP32 [head_dim / 2]."""

    def __init__(self, head_dim: int) -> None:
        self.size = head_dim // 2
        self.factors: Tensor

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "rope_factors.weight", (self.size,)

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.factors = tensors["rope_factors.weight"].float()


class Model:
    """A decoder with its weights (``loader.load.load_model``), for inference only.

    ``device``: "cpu" or "cuda". ``deterministic``: a row's logits are the same, bit for bit, in any
    batch; raises ConfigError where that cannot be had. ``implementations``: operation -> the
    version chosen for it.
    ``quantization``: "int8": linears are rounded while loading, the embedding is not; "gguf": some
    weights come quantized; None: all are dense.
    ``reasons``: why ``dtype`` is what it is. ``weight_bytes``: what the weights take in memory.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: str = "cpu",
        deterministic: bool = False,
        quantization: str | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.reasons: dict[str, str] = {}
        if device == "cpu" and (problem := native.problem()):
            self.reasons["cpu kernels"] = problem
        self.weight_bytes = 0
        chosen = choose_versions(spec, dtype, device, deterministic, quantization)
        self.implementations = {op: version.name for op, version in chosen.items()}
        call = {op: version.call for op, version in chosen.items()}
        versions = LinearVersions(
            call["linear"],
            call.get("quantized_linear", _not_quantized),
            call.get("quantize", _not_quantized),
            dtype,
        )
        make_linear = partial(Linear, format=format_of(quantization), versions=versions)
        make_norm = partial(Norm, operation=chosen["rms_norm"].call)
        self._copy_blocks = chosen["copy_blocks"].call

        self._attention: dict[AttentionGeometry, PagedAttention] = {}
        for layer in spec.layers:
            geometry = geometry_of(layer.mixer)
            if geometry not in self._attention:
                self._attention[geometry] = chosen["paged_attention"].call(geometry)
        self.embedding = Embedding(spec, chosen["embedding"].call, make_linear)
        self.layers = [
            Layer(
                f"layers.{index}",
                layer,
                spec.hidden_size,
                self._attention[geometry_of(layer.mixer)],
                make_linear,
                make_norm,
                chosen["take_rows"].call,
            )
            for index, layer in enumerate(spec.layers)
        ]
        self.norm: Norm = make_norm("norm", spec.norm, spec.hidden_size)
        mixer = spec.layers[0].mixer
        by_tensor = isinstance(mixer.rope.scaling, TensorScaling)
        self._rope_factors = RopeFactors(mixer.head_dim) if by_tensor else None
        self._ropes: dict[AttentionGeometry, Rope] = {}
        self._recorded: RecordedLayers | None = None

    def parts(self) -> list[Part]:
        extra = [self._rope_factors] if self._rope_factors else []
        return [self.embedding, *self.layers, self.norm, *extra]

    def finish(self) -> None:
        """After all parts are loaded."""
        factors = self._rope_factors.factors if self._rope_factors else None
        for layer in self.spec.layers:
            self._ropes[geometry_of(layer.mixer)] = Rope(
                layer.mixer.rope,
                layer.mixer.head_dim,
                self.spec.max_position,
                factors,
                self.device,
            )
        if self._is_recordable():
            self._recorded = RecordedLayers()

    def _is_recordable(self) -> bool:
        """Whether all up to the final norm is kernels that a tape can hold."""
        operations = ("embedding", "rms_norm", "paged_attention", "take_rows")
        linears = (linear for layer in self.layers for linear in layer.linears())
        return all(self.implementations[op] == "native" for op in operations) and all(
            getattr(linear.apply, "recordable", False) for linear in linears
        )

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the first layer's cache; today all layers' are equal."""
        return self.layers[0].mixer.operation.kv_shape(num_blocks, block_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        shapes = (layer.mixer.operation.kv_shape(1, block_size) for layer in self.layers)
        return sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """One tensor per layer. Zeros: masked places are multiplied by 0, so must be finite."""
        shapes = [layer.mixer.operation.kv_shape(num_blocks, block_size) for layer in self.layers]
        if self.device == "cpu":
            return [zeros_on_demand(shape, self.dtype) for shape in shapes]
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]

    @torch.inference_mode()
    def copy_blocks(self, cache: list[Tensor], pairs: Tensor) -> None:
        """pairs: int64 [c, 2] of source and destination blocks, in every layer."""
        self._copy_blocks(cache, pairs)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: list[Tensor]) -> Tensor:
        """Hidden states after the final norm, [T, hidden]; writes the batch's KV into ``cache``."""
        return self._run(batch, cache, None)

    @torch.inference_mode()
    def forward_last(self, batch: ForwardBatch, cache: list[Tensor]) -> Tensor:
        """The same for the tokens ``batch.logit_rows`` alone, [r, hidden]: the last layer spares
        the others all but their keys and values."""
        return self._run(batch, cache, batch.logit_rows)

    def _run(self, batch: ForwardBatch, cache: list[Tensor], tokens: Tensor | None) -> Tensor:
        states = {
            geometry: attention.prepare(batch, self._ropes[geometry], self.dtype)
            for geometry, attention in self._attention.items()
        }
        if self._recorded is None:
            return self._run_now(batch.token_ids, cache, states, tokens)
        return self._recorded(self._run_now, batch.token_ids, cache, states, tokens)

    def _run_now(
        self,
        ids: Tensor,
        cache: list[Tensor],
        states: Mapping[AttentionGeometry, Any],
        tokens: Tensor | None,
    ) -> Tensor:
        x = self.embedding(ids)
        for layer, layer_cache in zip(self.layers, cache):
            wanted = tokens if layer is self.layers[-1] else None
            x = layer(x, layer_cache, states[layer.mixer.operation.geometry], wanted)
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden] rows of ``forward``. Returns FP32 [r, vocab]."""
        return self.embedding.head(hidden)

    @torch.inference_mode()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """hidden: [r, hidden]. The first of each row's largest logits, int64 [r]; where some are no
        numbers, which one is not said."""
        largest = getattr(self.embedding.head.apply, "largest", None)
        return most_likely(self.logits(hidden)) if largest is None else largest(hidden)


def _not_quantized(*arguments: Any) -> Any:
    raise AssertionError("a quantized weight came to a model that was to have none")


@torch.inference_mode()
def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages are taken from the system when first written (NumPy asks calloc,
    torch.zeros writes them all): gigabytes are there at once. They start a cache line, which
    calloc's do not: a kernel's vector should lie in one."""
    size = math.prod(shape) * dtype.itemsize
    found = torch.from_numpy(np.zeros(size + CACHE_LINE, dtype=np.uint8))
    start = -found.data_ptr() % CACHE_LINE
    return found[start : start + size].view(dtype).view(shape)
