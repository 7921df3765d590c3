"""What one of the ranks that share each layer holds (tensor parallelism). Never imports torch.

Heads, the inner size of MLPs and experts, and the vocabulary are divided; what they do not divide
evenly goes to the first ranks. Everything else each rank has whole. All follows from sizes, so
that what a rank needs is known before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.model.spec import DecoderSpec, MoESpec
from octavo.model.stages import Range, check_stages
from octavo.types import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.parallel import Comm

# Of inner sizes and vocabularies: kernels' tiles and quantization groups should not be cut.
_UNITS = (128, 64, 32, 16, 8, 4, 2)
_MOST_UNEVEN = 1.125  # largest share over the even one for which a unit is kept


@dataclass(frozen=True)
class Cut:
    """Of a tensor [out, ...]: the outputs in ``rows`` (ranges, in order), of a matrix the inputs in
    ``columns``; None: all."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is left of a tensor."""
        first, *rest = shape
        if self.rows is not None:
            first = sum(end - begin for begin, end in self.rows)
        if self.columns is not None:
            rest[0] = self.columns[1] - self.columns[0]
        return (first, *rest)


@dataclass(frozen=True)
class Heads:
    """Those of one rank, of queries and of keys and values. ``copies``: how many ranks have its
    head of keys, which each of them computes."""

    queries: Range
    keys: Range
    copies: int = 1

    @property
    def num_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        return self.keys[1] - self.keys[0]


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """Whole groups of query heads with their head of keys; where there are fewer of those than
        ranks, the query heads of one are divided among several. Raises ConfigError for more ranks
        than query heads."""
        if self.size > num_heads:
            raise ConfigError(
                f"--tensor-parallel-size {self.size}: the model has {num_heads} attention heads, "
                f"and a rank needs one at least; use 1 to {num_heads}"
            )
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            first, end = _share(num_kv_heads, self.rank, self.size)
            return Heads((first * group, end * group), (first, end))
        # Ranks of each head of keys, then query heads of each of them.
        for key in range(num_kv_heads):
            low, high = _share(self.size, key, num_kv_heads)
            if low <= self.rank < high:
                if high - low > group:
                    allowed = _listed(
                        n for n in range(1, num_heads + 1) if _fits(n, num_kv_heads, group)
                    )
                    raise ConfigError(
                        f"--tensor-parallel-size {self.size}: {high - low} ranks would divide the "
                        f"{group} query heads of one of {num_kv_heads} KV heads; use {allowed}"
                    )
                first, end = _share(group, self.rank - low, high - low)
                return Heads((key * group + first, key * group + end), (key, key + 1), high - low)
        raise AssertionError("a rank without heads")

    def inner(self, size: int, what: str) -> Range:
        """Of an MLP's or an expert's inner size. ``what``: for the error where there are more ranks
        than numbers."""
        if self.size > size:
            raise ConfigError(
                f"--tensor-parallel-size {self.size}: {what} is {size}, and a rank needs one of it "
                f"at least; use 1 to {size}"
            )
        unit = next((unit for unit in _UNITS if self._is_even(size, unit)), 1)
        first, end = _share(size // unit, self.rank, self.size)
        return first * unit, end * unit

    def vocabulary(self, size: int) -> Range:
        return self.inner(size, "the vocabulary")

    def vocabulary_sizes(self, size: int) -> list[int]:
        """Of all ranks."""
        ranges = [Shard(rank, self.size).vocabulary(size) for rank in range(self.size)]
        return [end - first for first, end in ranges]

    def _is_even(self, size: int, unit: int) -> bool:
        largest = -(-(size // unit) // self.size) * unit
        return (
            size % unit == 0
            and size // unit >= self.size
            and (largest <= _MOST_UNEVEN * size / self.size)
        )


WHOLE = Shard()


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share each layer, seen from one of them. ``comm``: None where it is alone."""

    shard: Shard = WHOLE
    comm: Comm | None = None

    @classmethod
    def of(cls, comm: Comm) -> TensorParallel:
        return cls(Shard(comm.rank, comm.size), comm if comm.size > 1 else None)

    @property
    def leads(self) -> bool:
        """Whether this rank adds what is to be added once: residuals, biases of sums."""
        return self.shard.rank == 0

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which is written over."""
        return x if self.comm is None else self.comm.all_reduce(x)

    def agreed(self, x: Tensor) -> Tensor:
        """What the rank that ``leads`` has in x, in x."""
        return x if self.comm is None else self.comm.broadcast(x)

    def joined(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x: [T, sizes[rank]]. All ranks' side by side, [T, sum of sizes]."""
        return x if self.comm is None else self.comm.all_gather(x, sizes)


ALONE = TensorParallel()


def check_divisible(spec: DecoderSpec, tensor_size: int, pipeline_size: int) -> None:
    """Raises ConfigError, naming what cannot be divided and the sizes that can, where a model
    cannot be spread over so many ranks."""
    check_stages(len(spec.layers), pipeline_size)
    shard = Shard(0, tensor_size)
    shard.vocabulary(spec.vocab_size)
    for layer in spec.layers:
        mixer, mlp = layer.mixer, layer.mlp
        shard.heads(mixer.num_heads, getattr(mixer, "num_kv_heads", mixer.num_heads))
        shard.inner(mlp.intermediate_size, "the inner size of an MLP or expert")
        if isinstance(mlp, MoESpec) and mlp.shared:
            shard.inner(mlp.shared.intermediate_size, "the shared expert's inner size")


def _share(count: int, rank: int, size: int) -> Range:
    """Of ``count`` things; the first ranks have one more where it does not go out even."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def _fits(size: int, num_kv_heads: int, group: int) -> bool:
    return size <= num_kv_heads or -(-size // num_kv_heads) <= group


def _listed(numbers: Iterator[int]) -> str:
    found = list(numbers)
    if found == list(range(1, len(found) + 1)):
        return f"1 to {found[-1]}" if len(found) > 1 else "1"
    return ", ".join(map(str, found))
