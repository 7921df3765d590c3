"""How llm-compressor's checkpoints hold weights of integers: (code - zero) * scale, both signed.
Packed ones are stored plus 2^(bits - 1).

Description: https://github.com/vllm-project/compressed-tensors (compressors/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from octavo.quant.format import Axes, StoredTensor, numbers
from octavo.quant.grid import check_group, common_zero, even_grid, input_order, stored_scales
from octavo.quant.packing import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops.weights import QuantizedWeight

NAME = "compressed-tensors"
_ZERO = 128


@dataclass(frozen=True)
class Packed:
    """W4A16 and W8A16: codes packed along the inputs. ``group``: 0 stands for all inputs."""

    bits: int
    group: int
    symmetric: bool = True
    name = NAME

    def tensors(self) -> tuple[StoredTensor, ...]:
        packed = Fraction(32, self.bits)
        zeros = StoredTensor(
            "weight_zero_point", (("out", packed), ("in", self.group)), kinds=("I32",)
        )
        return (
            StoredTensor("weight_packed", (("out", 1), ("in", packed)), kinds=("I32",)),
            StoredTensor("weight_scale", (("out", 1), ("in", self.group))),
            StoredTensor("weight_shape", (("free", 1),), kinds=("I64", "I32"), optional=True),
            StoredTensor("weight_g_idx", (("in", 1),), kinds=("I32",), optional=True),
            *(() if self.symmetric else (zeros,)),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_group(self.group, in_features)

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> QuantizedWeight:
        from octavo.ops.weights import QuantizedWeight

        self._check_shape(tensors.get("weight_shape"), (out_features, in_features))
        group = self.group or in_features
        codes = unpack(tensors["weight_packed"], self.bits, in_features)
        order = self._order(tensors.get("weight_g_idx"), group)
        codes = codes if order is None else codes[:, order]
        zero, zeros = 1 << (self.bits - 1), None
        if not self.symmetric:
            stored = unpack(tensors["weight_zero_point"].T, self.bits, out_features)
            zero, zeros = common_zero(stored.T)
        scales = stored_scales(tensors["weight_scale"]).contiguous()
        return QuantizedWeight(codes, scales, None, self.bits, group, zero, zeros, order)

    def _order(self, g_idx: Tensor | None, group: int) -> Tensor | None:
        """-1 throughout stands for no order."""
        if g_idx is None or bool((g_idx == -1).all()):
            return None
        return input_order(g_idx, group)

    def _check_shape(self, stored: Tensor | None, shape: tuple[int, int]) -> None:
        if stored is not None and tuple(stored.tolist()) != shape:
            raise ValueError(f"weight_shape is {stored.tolist()}, not {list(shape)}")

    def bytes_of(self, out_features: int, in_features: int) -> int:
        groups = in_features // (self.group or in_features)
        return out_features * (in_features * self.bits // 8 + groups * (2 + (not self.symmetric)))

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The inverse of ``read``. Raises ValueError for a weight that the format cannot hold."""
        import torch

        outputs, inputs = weight.shape
        group = self.group or inputs
        codes, scales, zeros = even_grid(weight, self.bits, group)
        device = codes.device
        tensors = {"weight_scale": scales}
        if weight.order is not None:
            inverse = weight.order.argsort()
            codes = codes[:, inverse]
            tensors["weight_g_idx"] = (torch.arange(inputs, device=device) // group)[inverse].int()
        if not self.symmetric:
            tensors["weight_zero_point"] = pack(zeros.T, self.bits).T.contiguous()
        elif not bool((zeros == 1 << (self.bits - 1)).all()):
            raise ValueError(f"a symmetric format has only the zero {1 << (self.bits - 1)}")
        tensors["weight_packed"] = pack(codes, self.bits)
        tensors["weight_shape"] = torch.tensor([outputs, inputs], device=device)
        return tensors


@dataclass(frozen=True)
class Int8Stored:
    """W8A8-INT8: signed codes of 8 bits as they are, a scale for each output, group or matrix.
    ``group``: 0 stands for all inputs. Scales of inputs, where they are stored, are not used: a
    token's own are finer. ``weight_only``: inputs are not rounded (W8A16)."""

    group: int = 0
    symmetric: bool = True
    weight_only: bool = False
    name = NAME

    def tensors(self) -> tuple[StoredTensor, ...]:
        groups: Axes = (("out", 1), ("in", self.group))
        zeros = numbers("weight_zero_point", groups, kinds=("I8",))
        return (
            numbers("weight_scale", groups),
            StoredTensor("weight", (("out", 1), ("in", 1)), kinds=("I8",)),
            numbers("input_scale", optional=True),
            numbers("input_zero_point", kinds=("I8",), optional=True),
            *(() if self.symmetric else (zeros,)),
        )

    def check(self, out_features: int, in_features: int) -> None:
        check_group(self.group, in_features)

    def read(
        self,
        tensors: Mapping[str, Any],
        out_features: int,
        in_features: int,
        parts: Sequence[int] = (),
    ) -> QuantizedWeight:
        from octavo.ops.weights import QuantizedWeight

        group = self.group or in_features
        shape = (out_features, in_features // group)
        scales = self._spread(stored_scales(tensors["weight_scale"]), shape, parts)
        zero, zeros = _ZERO, None
        if not self.symmetric:
            stored = self._spread(tensors["weight_zero_point"], shape, parts)
            zero, zeros = common_zero(_unsigned(stored))
        codes = _unsigned(tensors["weight"])
        return QuantizedWeight(
            codes, scales, None, 8, group, zero, zeros, weight_only=self.weight_only
        )

    def _spread(self, stored: Tensor, shape: tuple[int, int], parts: Sequence[int]) -> Tensor:
        """[out, groups]; ``stored`` holds so many, one for each output or part, or one."""
        import torch

        flat = stored.flatten()
        if len(flat) == len(parts) > 1:
            flat = flat.repeat_interleave(torch.tensor(parts, device=flat.device))
        if len(flat) == shape[0] * shape[1]:
            return flat.reshape(shape)
        if len(flat) not in (1, shape[0]):
            raise ValueError(f"weight_scale has {len(flat)} numbers for {shape[0]} outputs")
        return flat[:, None].expand(shape).contiguous()

    def bytes_of(self, out_features: int, in_features: int) -> int:
        return out_features * (in_features + 4 * (in_features // (self.group or in_features)))

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The inverse of ``read``; scales stay FP32 where they are. Raises ValueError for a weight
        that the format cannot hold."""
        import torch

        if weight.minimums is not None or weight.order is not None or weight.bits != 8:
            raise ValueError("only codes of 8 bits without minimums and act-order can be written")
        if weight.group < weight.shape[1] and weight.group != self.group:
            raise ValueError(f"groups of {weight.group} inputs, not {self.group or 'all'}")
        tensors = {"weight": _signed(weight.codes), "weight_scale": weight.scales}
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full_like(weight.scales, weight.zero, dtype=torch.uint8)
        if not self.symmetric:
            tensors["weight_zero_point"] = _signed(zeros)
        elif not bool((zeros == _ZERO).all()):
            raise ValueError(f"a symmetric format has only the zero {_ZERO}")
        return tensors


def _unsigned(codes: Tensor) -> Tensor:
    """int8 -> uint8, plus 128."""
    import torch

    return codes.contiguous().view(torch.uint8) ^ _ZERO


def _signed(codes: Tensor) -> Tensor:
    import torch

    return (codes ^ _ZERO).view(torch.int8)
