"""Which operation multiplies weights of each kind: chosen as a linear is loaded, not in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from octavo.types import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.weights import QuantizedWeight, Selected, Weight


class LinearVersions:
    """The versions of the linear operations on a device, chosen once each.

    ``used``: those that some linear took, by operation. ``rounds_inputs``: inputs are rounded where
    the format says so and the device multiplies them; on a CPU those of weights on an even grid
    whatever it says, of 2 and 3 bits in groups of a multiple of 16 alone.
    """

    def __init__(
        self,
        dense: Callable[..., Any],
        device: str,
        dtype: torch.dtype,
        deterministic: bool = False,
        rounds_inputs: bool = True,
    ) -> None:
        """``dense``: the chosen version of ``linear``."""
        self.dense = dense
        self.device = device
        self.dtype = dtype
        self.used: dict[str, str] = {}
        self._deterministic = deterministic
        self._rounds_inputs = rounds_inputs
        self._chosen: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, op: str) -> Callable[..., Any]:
        """The chosen version of ``op``. Raises ConfigError where ``--deterministic`` has none."""
        if op not in self._chosen:
            from octavo.ops import registry

            found = registry.runnable(op, self.device, self.dtype, self._deterministic)
            if not found:
                raise ConfigError(
                    f"--deterministic: {op}, which this model's quantized weights need, may round "
                    "a row differently in another batch; leave it out"
                )
            self._chosen[op], self.used[op] = found[-1].call, found[-1].name
        return self._chosen[op]

    def operation_of(self, weight: Weight) -> str:
        """What multiplies it: the name of an operation."""
        from octavo.ops.weights import Float8Weight, QuantizedWeight

        if isinstance(weight, QuantizedWeight):
            if self.device == "cpu":
                rounds = self._rounds_inputs and (weight.bits >= 4 or weight.group % 16 == 0)
            else:
                rounds = self._rounds_inputs and not weight.weight_only
                rounds = rounds and self._is_own("quantized_linear") and _is_whole(weight)
            return "quantized_linear" if rounds else "weight_only_linear"
        if isinstance(weight, Float8Weight):
            rounds = self.device != "cpu" and self._rounds_inputs and not weight.weight_only
            return "float8_linear" if rounds and self._is_own("float8_linear") else _WEIGHT_ONLY
        return "linear" if self._is_dense(weight) else _WEIGHT_ONLY

    def _cut(self, weight: Weight) -> Weight:
        """On a CPU inputs are rounded by group, so groups of all inputs are cut: one scale for
        hundreds of them would cost ten times as much quality as the weights do (docs/cpu.md)."""
        from octavo.ops.joined import in_groups
        from octavo.ops.weights import QuantizedWeight

        if self.device != "cpu" or not isinstance(weight, QuantizedWeight):
            return weight
        if not weight.weight_only or weight.group <= WIDEST_GROUP:
            return weight
        fitting = [size for size in CUT_GROUPS if weight.group % size == 0]
        rounds = self.operation_of(weight) == "quantized_linear"
        return in_groups(weight, fitting[0]) if fitting and rounds else weight

    def _is_own(self, op: str) -> bool:
        """Whether the device has more than the definition for it."""
        from octavo.ops import registry

        return len(registry.runnable(op, self.device, self.dtype, self._deterministic)) > 1

    @staticmethod
    def _is_dense(weight: Weight) -> bool:
        import torch

        return isinstance(weight, torch.Tensor)

    def multiplier(
        self, weights: Sequence[Weight | Selected], bias: Tensor | None, epilogue: str
    ) -> Callable[..., Tensor]:
        """What computes ``linear`` (ops/linear.py) on weights whose rows follow one another. A
        ``Selected`` one comes alone."""
        from octavo.ops.weights import Selected

        if isinstance(weights[0], Selected):
            return Gathered(self, weights[0], bias, epilogue)
        plain = [weight for weight in weights if not isinstance(weight, Selected)]
        assert len(plain) == len(weights)
        return self._multiplier(plain, bias, epilogue)

    def _multiplier(
        self, weights: Sequence[Weight], bias: Tensor | None, epilogue: str
    ) -> Callable[..., Tensor]:
        if all(map(self._is_dense, weights)):
            apply: Callable[..., Tensor] = self.dense(weights, bias, epilogue)
            return apply
        weights = [self._cut(weight) for weight in weights]
        operations = {self.operation_of(weight) for weight in weights}
        if len(operations) > 1 or not _fit_together(weights):
            return Separate(self, weights, bias, epilogue)
        apply = self[operations.pop()](weights, bias, epilogue, self.dtype)
        return apply


_WEIGHT_ONLY = "weight_only_linear"
WIDEST_GROUP = 256  # by which a CPU rounds inputs that the format leaves as they are
CUT_GROUPS = (64, 32, 16)


def _is_whole(weight: QuantizedWeight) -> bool:
    """Whether a GPU's INT8 products have it: one scale an output, of codes around ``ZERO``."""
    from octavo.ops.joined import alike
    from octavo.ops.weights import ZERO

    (found,) = alike([weight])
    is_plain = found.zeros is None and found.minimums is None and found.group >= found.shape[1]
    return is_plain and (found.bits, found.zero) == (8, ZERO)


def _fit_together(weights: Sequence[Weight]) -> bool:
    """Whether one packed weight can hold them all."""
    from octavo.ops.joined import fit_together

    return fit_together(weights)


class Gathered:
    """A product with a ``Selected`` weight: inputs are put in its places first."""

    recordable = False  # on a tape of CPU kernels

    def __init__(
        self, versions: LinearVersions, weight: Selected, bias: Tensor | None, epilogue: str
    ) -> None:
        self._taken = weight.taken
        self._apply = versions.multiplier([weight.weight], bias, epilogue)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self._apply(self._taken(x), other)


class Separate:
    """Projections of the same input whose weights cannot be packed as one: multiplied one by one,
    then joined."""

    recordable = False  # on a tape of CPU kernels

    def __init__(
        self,
        versions: LinearVersions,
        weights: Sequence[Weight],
        bias: Tensor | None,
        epilogue: str,
    ) -> None:
        sizes = [weight.shape[0] for weight in weights]
        biases = [None] * len(sizes) if bias is None else list(bias.split(sizes))
        inner = "logits" if epilogue == "logits" else "none"
        self.epilogue = epilogue
        self.parts = [
            versions.multiplier([weight], one, inner) for weight, one in zip(weights, biases)
        ]

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        import torch

        from octavo.ops.linear import silu_mul

        y = torch.cat([part(x) for part in self.parts], dim=1)
        if other is not None:
            return y + other
        return silu_mul(y) if self.epilogue == "silu_mul" else y
