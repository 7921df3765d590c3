"""The quantized projections of a checkpoint: which stored tensors hold each, and the weight they
mean. Never imports torch at module level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.model.loader.shards import Headers, Stored
from octavo.quant.format import CheckpointFormat
from octavo.quant.scheme import Scheme
from octavo.types import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.model.loader.source import StoredAs
    from octavo.ops.weights import Quantized

WEIGHT = ".weight"


class StoredProjections:
    """Of the checkpoint ``where`` whose tensors are ``stored``. ``left_out``: what their names lack
    at their beginning, which the scheme's have."""

    def __init__(
        self, scheme: Scheme | None, stored: Headers, where: str, left_out: str = ""
    ) -> None:
        self._scheme = scheme
        self._stored = stored
        self._where = where
        self._left_out = left_out
        self._found: dict[str, CheckpointFormat | None] = {}

    def format_of(self, name: str) -> CheckpointFormat | None:
        """Of the projection whose weight would be stored as ``name``; None: it is dense."""
        if name not in self._found:
            self._found[name] = self._format_of(name)
        return self._found[name]

    def _format_of(self, name: str) -> CheckpointFormat | None:
        if self._scheme is None or not name.endswith(WEIGHT):
            return None
        module = name.removesuffix(WEIGHT)
        found = self._scheme.format_of(self._left_out + module)
        if found is None:
            return None
        main = found.tensors()[0]
        stored = self._stored.get(f"{module}.{main.suffix}")
        if stored is not None and stored.dtype in main.kinds:
            return found
        return None if name in self._stored else found

    def stored_as(self, name: str, shape: tuple[int, ...]) -> StoredAs:
        """See ``WeightSource``."""
        found = self.format_of(name)
        if found is None:
            return {name: (shape,)}
        module = name.removesuffix(WEIGHT)
        if len(shape) != 2:
            raise ConfigError(f"{self._where}: {module} is in {found.name}, but is no matrix")
        self._clause(module, found.check, *shape)
        stored_as: dict[str, tuple[tuple[int, ...], ...]] = {}
        for tensor in found.tensors():
            full = f"{module}.{tensor.suffix}"
            if full in self._stored:
                self._check_kind(full, tensor.kinds)
            elif tensor.optional:
                continue
            stored_as[full] = tensor.shapes(*shape)
        return stored_as

    def tensors_of(self, name: str) -> Mapping[str, Stored]:
        """By suffix: what holds the projection whose weight would be stored as ``name``."""
        found, module = self.format_of(name), name.removesuffix(WEIGHT)
        assert found is not None
        names = {tensor.suffix: f"{module}.{tensor.suffix}" for tensor in found.tensors()}
        return {s: self._stored[full] for s, full in names.items() if full in self._stored}

    def weight(
        self,
        name: str,
        tensors: Mapping[str, Callable[[], Tensor]],
        shape: tuple[int, ...],
        parts: Sequence[int] = (),
    ) -> Quantized:
        """What these tensors mean. ``parts``: see ``CheckpointFormat.read``. Raises ConfigError
        where they mean nothing."""
        found, module = self.format_of(name), name.removesuffix(WEIGHT)
        assert found is not None
        values = {suffix: call() for suffix, call in tensors.items()}
        weight: Quantized = self._clause(module, found.read, values, *shape, parts)
        return weight

    def is_spare(self, name: str) -> bool:
        """Whether the stored tensor ``name`` lies beside a quantized projection's, and may mean
        nothing: if it is zero."""
        module, _, suffix = name.rpartition(".")
        if self._scheme is None or suffix not in self._scheme.spare_suffixes:
            return False
        return self.format_of(module + WEIGHT) is not None

    def bytes_of(self, name: str, shape: tuple[int, ...]) -> int:
        """What the projection takes once it is packed."""
        found = self.format_of(name)
        assert found is not None
        return found.bytes_of(*shape)

    def _check_kind(self, name: str, kinds: tuple[str, ...]) -> None:
        stored = self._stored[name]
        if stored.dtype not in kinds:
            raise ConfigError(
                f"{stored.file}: {name} is {stored.dtype}, where {' or '.join(kinds)} belongs"
            )

    def _clause(self, module: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except ValueError as error:
            raise ConfigError(f"{self._where}: {module}: {error}") from None
