"""Which tensors a model is made of, from its spec alone. Never imports torch.

What ``decoder.Model`` will want, keep and fuse, before there is one: memory is counted from this
(``loader.sizes``), by the loader as by ``octavo plan``. tests/model/test_structure.py holds it to
the parts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from octavo.model.shard import WHOLE, Cut, Shard
from octavo.model.spec import (
    DecoderSpec,
    FeedForwardSpec,
    GQASpec,
    LayerNormSpec,
    LayerSpec,
    MixerSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    PlainMLPSpec,
    ResidualSpec,
    TensorScaling,
)
from octavo.model.stages import Range, Stage, all_layers
from octavo.quant.rounding import Rounding

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Our tensors that are packed as one weight: what a linear fuses, or one by itself.

    ``shapes``: in the checkpoint, by name; ``cuts``: what of them this rank keeps, where that is
    not all. ``rounding``: what they become while loading, where they are dense. ``is_dense``: they
    are so in memory however they are stored; ``is_expert``: they are of one expert. ``count``: of
    experts alike, of which this is the first (``structure_of``).
    """

    shapes: dict[str, Shape]
    cuts: dict[str, Cut] = field(default_factory=dict)
    rounding: Rounding | None = None
    is_dense: bool = False
    is_expert: bool = False
    count: int = 1

    @property
    def kept(self) -> dict[str, Shape]:
        """The shapes of what this rank keeps."""
        return {
            name: self.cuts[name].shape(shape) if name in self.cuts else shape
            for name, shape in self.shapes.items()
        }


@dataclass(frozen=True)
class Structure:
    """A rank's model. ``groups``: all but the embedding; ``embedding``: its shape here, None where
    this stage has none; ``head_rounding``: of a head that is tied to it."""

    spec: DecoderSpec
    stage: Stage
    groups: tuple[Group, ...]
    embedding: Shape | None
    head_rounding: Rounding | None

    def wanted(self) -> dict[str, Shape]:
        """Our tensors, as the checkpoint has them."""
        found = dict(chain.from_iterable(group.shapes.items() for group in self.groups))
        if self.embedding is not None:
            found["embed.weight"] = (self.spec.vocab_size, self.spec.embedding.width)
        return found

    def kept(self) -> dict[str, Shape]:
        """The shapes of what this rank keeps."""
        found = dict(chain.from_iterable(group.kept.items() for group in self.groups))
        return found if self.embedding is None else found | {"embed.weight": self.embedding}


# Of the experts of a layer (its prefix, their number): those that stand for others which are stored
# as they are, and for how many.
Alike = Callable[[str, int], Sequence[tuple[int, int]]]


def each_apart(prefix: str, count: int) -> Sequence[tuple[int, int]]:
    """Every expert by itself."""
    return [(index, 1) for index in range(count)]


def structure_of(
    spec: DecoderSpec,
    shard: Shard = WHOLE,
    stage: Stage | None = None,
    rounding: Rounding | None = None,
    alike: Alike = each_apart,
) -> Structure:
    """Of the rank that has this share of each layer, and of the layers ``stage`` (None: all).
    ``rounding``: what dense weights become while loading. ``alike``: which experts are named, to
    count thousands of them as a few. Raises ConfigError where the layers cannot be divided among so
    many ranks."""
    stage = stage or all_layers(len(spec.layers))
    own = spec.layers[stage.first_layer : stage.end_layer]
    groups = [*_ends(spec, shard, stage, rounding)]
    for index, layer in enumerate(own, stage.first_layer):
        groups += _Layer(f"layers.{index}", spec.hidden_size, shard, rounding, alike).groups(layer)
    ropes = [(x.mixer.rope, _turned(x.mixer)) for x in own if x.mixer.rope is not None]
    factors = [rope.dim or dim for rope, dim in ropes if isinstance(rope.scaling, TensorScaling)]
    if factors:
        groups.append(Group({"rope_factors.weight": (factors[-1] // 2,)}))
    tied, embedding = spec.embedding.tied, None
    if stage.is_first or (stage.is_last and tied):
        embedding = _embedding_cut(spec, shard).shape((spec.vocab_size, spec.embedding.width))
    head = rounding if rounding is not None and rounding.head else None
    return Structure(spec, stage, tuple(groups), embedding, head)


def _turned(mixer: MixerSpec) -> int:
    """Numbers of a head that a rope may turn."""
    return mixer.rope_dim if isinstance(mixer, MLASpec) else mixer.head_dim


def _embedding_cut(spec: DecoderSpec, shard: Shard) -> Cut:
    return Cut(None if shard.size == 1 else (shard.vocabulary(spec.vocab_size),))


def _ends(
    spec: DecoderSpec, shard: Shard, stage: Stage, rounding: Rounding | None
) -> Iterator[Group]:
    """But the embedding."""
    embedding, width = spec.embedding, spec.embedding.width
    if stage.is_last and not embedding.tied:
        name = "head.weight"
        cuts = {name: _embedding_cut(spec, shard)} if shard.size > 1 else {}
        rounds = rounding if rounding is not None and rounding.head else None
        yield Group({name: (spec.vocab_size, width)}, cuts, rounds)
    if width != spec.hidden_size and stage.is_first:
        yield Group({"embed_in.weight": (spec.hidden_size, width)}, rounding=rounding)
    if width != spec.hidden_size and stage.is_last:
        yield Group({"embed_out.weight": (width, spec.hidden_size)}, rounding=rounding)
    if embedding.positions is not None and stage.is_first:
        yield Group({"positions.weight": (embedding.positions.rows, spec.hidden_size)})
    if spec.norm is not None and stage.is_last:
        yield from _norm("norm", spec.norm, spec.hidden_size)


def _norm(name: str, spec: NormSpec, size: int) -> Iterator[Group]:
    yield Group({f"{name}.weight": (size,)})
    if isinstance(spec, LayerNormSpec):
        yield Group({f"{name}.bias": (size,)})


@dataclass(frozen=True)
class _Layer:
    prefix: str
    hidden: int
    shard: Shard
    rounding: Rounding | None
    alike: Alike

    def groups(self, layer: LayerSpec) -> Iterator[Group]:
        mixer = layer.mixer
        yield from self._latent(mixer) if isinstance(mixer, MLASpec) else self._attention(mixer)
        yield from self._feed_forward(layer.mlp)
        before, after = ("input_norm", "mixer_norm", "mixer_outer_norm"), ("post_norm",)
        yield from self._norms(before, layer.around_mixer)
        yield from self._norms((*after, "mlp_norm", "mlp_outer_norm"), layer.around_mlp)

    def _norms(self, names: tuple[str, ...], around: ResidualSpec) -> Iterator[Group]:
        for name, norm in zip(names, (around.before, around.after, around.outer)):
            if norm is not None:
                yield from _norm(f"{self.prefix}.{name}", norm, self.hidden)

    def _linear(
        self,
        parts: dict[str, int],
        inputs: int,
        bias: bool = False,
        rows: tuple[Range, ...] | None = None,
        columns: Range | None = None,
        exact: bool = False,
    ) -> Iterator[Group]:
        """As ``linear.Linear``, by whose rules it is cut. ``parts``: outputs by name."""
        cuts: dict[str, Cut] = {}
        for index, name in enumerate(parts if self.shard.size > 1 else ()):
            own = None if rows is None else (rows[index],)
            if own is not None or columns is not None:
                cuts[f"{name}.weight"] = Cut(own, columns)
            if own is not None and bias:
                cuts[f"{name}.bias"] = Cut(own)
        weights: dict[str, Shape] = {f"{n}.weight": (size, inputs) for n, size in parts.items()}
        of_weights = {name: cut for name, cut in cuts.items() if name in weights}
        yield Group(weights, of_weights, None if exact else self.rounding, is_dense=exact)
        for name, size in parts.items() if bias else ():
            full = f"{name}.bias"
            yield Group({full: (size,)}, {full: cuts[full]} if full in cuts else {})

    def _attention(self, spec: GQASpec) -> Iterator[Group]:
        prefix, dim = self.prefix, spec.head_dim
        heads = self.shard.heads(spec.num_heads, spec.num_kv_heads)
        width, kv_width = spec.num_heads * dim, spec.num_kv_heads * dim
        queries, keys = ((first * dim, end * dim) for first, end in (heads.queries, heads.keys))
        parts = {f"{prefix}.q": width, f"{prefix}.k": kv_width, f"{prefix}.v": kv_width}
        yield from self._linear(parts, self.hidden, spec.qkv_bias, (queries, keys, keys))
        yield from self._linear({f"{prefix}.o": self.hidden}, width, spec.out_bias, columns=queries)
        if spec.qk_norm is not None:
            by_head = spec.qk_norm_over == "head"
            yield Group({f"{prefix}.q_norm.weight": (dim if by_head else width,)})
            yield Group({f"{prefix}.k_norm.weight": (dim if by_head else kv_width,)})
        if spec.sinks:
            yield Group({f"{prefix}.sinks.weight": (spec.num_heads,)})

    def _latent(self, spec: MLASpec) -> Iterator[Group]:
        prefix = self.prefix
        heads = self.shard.heads(spec.num_heads, spec.num_heads)
        query_dim, cache_dim = spec.nope_dim + spec.rope_dim, spec.latent_dim + spec.rope_dim
        up_dim = spec.nope_dim + spec.value_dim

        def columns(dim: int) -> Range:
            return heads.queries[0] * dim, heads.queries[1] * dim

        first, size, own = f"{prefix}.q", spec.num_heads * query_dim, columns(query_dim)
        if spec.query_rank is not None:
            ups = {f"{prefix}.q_up": size}
            yield from self._linear(ups, spec.query_rank, rows=(own,))
            yield from _norm(f"{prefix}.q_down_norm", spec.norm, spec.query_rank)
            first, size, own = f"{prefix}.q_down", spec.query_rank, (0, spec.query_rank)
        down = {first: size, f"{prefix}.kv_down": cache_dim}
        yield from self._linear(down, self.hidden, rows=(own, (0, cache_dim)))
        yield from _norm(f"{prefix}.kv_down_norm", spec.norm, spec.latent_dim)
        values = spec.num_heads * spec.value_dim
        yield from self._linear(
            {f"{prefix}.o": self.hidden}, values, columns=columns(spec.value_dim)
        )
        name = f"{prefix}.kv_up.weight"
        cuts = {name: Cut((columns(up_dim),))} if self.shard.size > 1 else {}
        shape = (spec.num_heads * up_dim, spec.latent_dim)
        yield Group({name: shape}, cuts, is_dense=True)

    def _feed_forward(self, spec: FeedForwardSpec) -> Iterator[Group]:
        if isinstance(spec, MoESpec):
            yield from self._experts(spec)
        else:
            yield from self._mlp(self.prefix, spec)

    def _mlp(self, prefix: str, spec: MLPSpec | PlainMLPSpec) -> Iterator[Group]:
        size = spec.intermediate_size
        own = self.shard.inner(size, "an MLP's inner size")
        names = ("gate", "up") if isinstance(spec, MLPSpec) else ("up",)
        parts = {f"{prefix}.{name}": size for name in names}
        yield from self._linear(parts, self.hidden, spec.bias, (own,) * len(names))
        yield from self._linear({f"{prefix}.down": self.hidden}, size, spec.bias, columns=own)

    def _experts(self, spec: MoESpec) -> Iterator[Group]:
        prefix, count, inner = self.prefix, spec.router.num_experts, spec.intermediate_size
        router = {f"{prefix}.router": count}
        yield from self._linear(router, self.hidden, spec.router.bias, exact=True)
        if spec.router.corrected:
            yield Group({f"{prefix}.router.correction": (count,)})
        if spec.shared is not None:
            yield from self._mlp(f"{prefix}.shared", spec.shared)
        if spec.shared_gate:
            yield from self._linear({f"{prefix}.shared_gate": 1}, self.hidden, exact=True)
        first, end = self.shard.inner(inner, "the experts' inner size")
        both = Cut(((first, end), (inner + first, inner + end)))  # of the gate, of the other
        shapes: dict[str, tuple[Shape, Cut | None]] = {
            "gate_up.weight": ((2 * inner, self.hidden), both),
            "down.weight": ((self.hidden, inner), Cut(columns=(first, end))),
        }
        if spec.bias:
            shapes |= {"gate_up.bias": ((2 * inner,), both), "down.bias": ((self.hidden,), None)}
        for index, many in self.alike(prefix, count):
            for name, (shape, cut) in shapes.items():
                full = f"{prefix}.experts.{index}.{name}"
                cuts = {full: cut} if cut is not None and self.shard.size > 1 else {}
                rounds = self.rounding if len(shape) == 2 else None
                yield Group({full: shape}, cuts, rounds, is_expert=True, count=many)


TILE, MOST_DIMS = 16, 512  # tokens of a tile, and dimensions, that the kernels of CPUs take
_SCALE_BYTES = 4  # of a head of a token in INT8


def kv_bytes_per_block(
    structure: Structure, shard: Shard, block_size: int, itemsize: int, tiled: bool, rounded: bool
) -> int:
    """Bytes of a block over the layers of a rank. ``itemsize``: of a number that is kept.
    ``tiled``: as octavo's own kernels for CPUs pad it. ``rounded``: to INT8, with a scale for each
    head of a token."""
    stage = structure.stage
    mixers = [layer.mixer for layer in structure.spec.layers[stage.first_layer : stage.end_layer]]
    return sum(_kv_bytes(mixer, shard, block_size, itemsize, tiled, rounded) for mixer in mixers)


def _kv_bytes(
    mixer: MixerSpec, shard: Shard, block_size: int, itemsize: int, tiled: bool, rounded: bool
) -> int:
    if isinstance(mixer, MLASpec):
        return block_size * (mixer.latent_dim + mixer.rope_dim) * itemsize
    heads = shard.heads(mixer.num_heads, mixer.num_kv_heads).num_keys
    tokens, dim = block_size, mixer.head_dim
    scales = _SCALE_BYTES if rounded else 0
    if tiled and dim % 2 == 0 and dim <= MOST_DIMS:
        tokens, dim = -(-tokens // TILE) * TILE, -(-dim // TILE) * TILE
    return 2 * heads * tokens * (dim * itemsize + scales)
