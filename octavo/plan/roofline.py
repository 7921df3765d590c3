"""How long a prompt and a token take at least by a device's peaks, times a stated efficiency.

A step reads each weight that it multiplies with once, and the keys and values of its rows; it
multiplies each token with each weight. The larger of the two times counts. To them come the sums
over ranks, two a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.model.loader.sizes import group_bytes
from octavo.model.spec import LayerSpec, MLASpec, MoESpec
from octavo.model.structure import Group
from octavo.plan.checkpoint import Checkpoint
from octavo.plan.hardware import Gpu, efficiency_of
from octavo.plan.memory import Rank


@dataclass(frozen=True)
class Times:
    """Seconds. ``first_token``: of a prompt alone; ``token``: between tokens, of ``rows`` requests
    with ``context`` tokens each. ``bound``: what decoding is limited by: "memory", "compute" or
    "link"."""

    prompt: int
    rows: int
    context: int
    first_token: float
    token: float
    bound: str

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.token


@dataclass(frozen=True)
class Work:
    """Of the ranks of one stage, of which each does as much. ``always``, ``experts``: bytes of
    weights that any step reads, and of all experts; ``params``: numbers that a token is multiplied
    with, the head's apart."""

    always: int
    experts: int
    params: int
    head_params: int
    share: float  # of a layer's experts that a token goes to
    layers: tuple[LayerSpec, ...]
    rank: Rank

    def weight_bytes(self, tokens: int) -> float:
        """That a step of so many tokens reads: experts that none of them goes to are spared."""
        return self.always + self.experts * (1 - (1 - self.share) ** tokens)

    def flops(self, tokens: int, rows: int) -> float:
        return 2.0 * (self.params * tokens + self.head_params * rows)

    def attention_flops(self, tokens: int, context: float) -> float:
        """Scores and sums of ``tokens`` queries with ``context`` keys each."""
        return sum(self._per_key(x) * tokens * _seen(x, context) for x in self.layers)

    def kv_bytes(self, context: int, block: int) -> float:
        """Read for one row."""
        each = self.rank.kv_block(block) / block
        seen = sum(_seen(layer, context) for layer in self.layers)
        return each * seen / len(self.layers)

    def _per_key(self, layer: LayerSpec) -> float:
        mixer = layer.mixer
        heads = mixer.num_heads / self.rank.shard.size
        if isinstance(mixer, MLASpec):
            return 2.0 * heads * (2 * mixer.latent_dim + mixer.rope_dim)
        return 4.0 * heads * mixer.head_dim


def _seen(layer: LayerSpec, context: float) -> float:
    window = None if isinstance(layer.mixer, MLASpec) else layer.mixer.window
    return context if window is None else min(context, window)


def work_of(checkpoint: Checkpoint, rank: Rank) -> Work:
    always = experts = params = 0
    share = max((_share(layer) for layer in checkpoint.spec.layers), default=0.0)
    active = 0.0
    head = 0
    for group in rank.structure.groups:
        shapes = group.kept
        size = group_bytes(group, shapes, checkpoint.stored, checkpoint.computing("cuda"))
        numbers = _numbers(group)
        if group.is_expert:
            experts += size * group.count
            active += numbers * group.count * share
        elif "head.weight" in shapes:
            always += size
            head = numbers
        elif "positions.weight" not in shapes:
            always += size
            params += numbers
    stage, tied = rank.stage, checkpoint.spec.embedding.tied
    if stage.is_last and tied and rank.structure.embedding is not None:
        head = math.prod(rank.structure.embedding)
        rounding = rank.structure.head_rounding
        shape = rank.structure.embedding
        always += rounding.bytes_of(*shape) if rounding else head * checkpoint.itemsize
    layers = checkpoint.spec.layers[stage.first_layer : stage.end_layer]
    return Work(always, experts, params + int(active), head, share, layers, rank)


def _share(layer: LayerSpec) -> float:
    mlp = layer.mlp
    return mlp.router.top_k / mlp.router.num_experts if isinstance(mlp, MoESpec) else 0.0


def _numbers(group: Group) -> int:
    return sum(math.prod(shape) for shape in group.kept.values() if len(shape) > 1)


def times(
    checkpoint: Checkpoint,
    ranks: list[Rank],
    gpu: Gpu,
    block: int,
    prompt: int = 8192,
    rows: int = 1,
    context: int = 1024,
) -> Times | None:
    """None for a device whose rates are not known. Stages work one after the other."""
    if not gpu.has_rates:
        return None
    first = token = 0.0
    bounds: dict[str, float] = {}
    for rank in ranks:
        work = work_of(checkpoint, rank)
        first += _step(checkpoint, work, gpu, prompt, 1, prompt / 2, 0.0)[0]
        kv = rows * work.kv_bytes(context, block)
        took, bound = _step(checkpoint, work, gpu, rows, rows, context, kv)
        token += took
        bounds[bound] = bounds.get(bound, 0.0) + took
    limit = max(bounds, key=lambda name: bounds[name])
    return Times(prompt, rows, context, first, token, limit)


def _step(
    checkpoint: Checkpoint,
    work: Work,
    gpu: Gpu,
    tokens: int,
    rows: int,
    context: float,
    kv_bytes: float,
) -> tuple[float, str]:
    """Seconds of a stage, and what they are spent on."""
    _, found, _ = efficiency_of(checkpoint.kept)
    eight_bits = (checkpoint.kept or "").startswith(("fp8", "int8")) and gpu.flops8
    linear = gpu.flops8 if eight_bits else gpu.flops
    assert linear is not None
    by_memory = (work.weight_bytes(tokens) + kv_bytes) / (gpu.bytes_per_second * found.memory)
    by_compute = work.flops(tokens, rows) / linear / found.compute
    by_compute += work.attention_flops(tokens, context) / gpu.flops / found.compute
    link = link_seconds(checkpoint, work.rank, gpu, tokens)
    spent = {"memory": by_memory, "compute": by_compute, "link": link}
    bound = max(spent, key=lambda name: spent[name])
    return max(by_memory, by_compute) + link, bound


def link_seconds(checkpoint: Checkpoint, rank: Rank, gpu: Gpu, tokens: int) -> float:
    """Two sums a layer over the ranks that share it (a ring's traffic), and between stages the
    hidden states."""
    size = rank.shard.size
    hidden = tokens * checkpoint.spec.hidden_size * checkpoint.itemsize
    found = 0.0
    if size > 1:
        one = gpu.link_seconds + 2 * (size - 1) / size * hidden / (gpu.link_bytes or 1.0)
        found += 2 * rank.stage.num_layers * one
    if rank.stage.count > 1 and not rank.stage.is_last:
        found += gpu.link_seconds + hidden / (gpu.link_bytes or 1.0)
    return found
