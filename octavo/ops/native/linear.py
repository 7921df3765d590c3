"""Linears on weights that are packed once (csrc/linear.h): dense ones, and quantized ones.

One packed copy serves a single row and a prompt alike. A row's bits are the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.ops.joined import alike
from octavo.ops.linear import Epilogue
from octavo.ops.native import calls, memory
from octavo.ops.native.library import Features, Kernels, brief_function, function, preferred
from octavo.ops.quantized import of_codes
from octavo.ops.registry import register
from octavo.ops.weights import QuantizedWeight

HALF = 16  # lanes of the gate and of the up projection in a panel
PANEL = 2 * HALF  # lanes
_EPILOGUES: dict[Epilogue, int] = {"none": 0, "add": 1, "silu_mul": 2, "logits": 3}
_LARGEST = 4
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
DENSE: dict[torch.dtype, Kernels] = {
    torch.float32: (
        (Features.AVX512, "octavo_linear_f32_avx512"),
        (Features.AVX2, "octavo_linear_f32_avx2"),
    ),
    torch.bfloat16: (
        (Features.AMX, "octavo_linear_bf16_amx"),
        (Features.AVX512_BF16, "octavo_linear_bf16_avx512bf16"),
    ),
}
QUANTIZED: Kernels = (
    (Features.AMX, "octavo_linear_quantized_amx"),
    (Features.AVX512_VNNI, "octavo_linear_quantized_avx512vnni"),
    (Features.AVX2, "octavo_linear_quantized_avx2"),
)


class _Linear(Structure):
    """OctavoLinear of csrc/octavo.h."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("inputs", "outputs", "stride", "epilogue", "element")),
        *((name, c_int64) for name in ("bits", "group", "zero", "has_minimums", "wide_scales")),
        ("has_zeros", c_int64),
        ("order", c_void_p),
        *((name, c_int64) for name in ("coding", "scales_sums")),
        *((name, c_void_p) for name in ("table", "lane_scales", "outliers")),
    )


class _Place(Structure):
    """OctavoPlace."""

    _fields_ = tuple((name, c_int64) for name in ("rows", "first", "width", "offset"))


class _Call(Structure):
    """OctavoLinearCall."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("linear", "x", "other", "y", "ids", "scratch", "rows")
    )


class _Quantize(Structure):
    """OctavoQuantize."""

    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("rows", "inputs", "group", "element")),
        *((name, c_void_p) for name in ("codes", "scales")),
    )


class Lookup(Structure):
    """OctavoLookupCall."""

    _fields_ = tuple((name, c_void_p) for name in ("linear", "ids", "y", "rows"))


class Packed:
    """A linear in panels: all but how the weights get there."""

    recordable = True  # on a tape (calls.py)

    def __init__(
        self,
        rows: Sequence[int],
        inputs: int,
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
        kernel: str,
    ) -> None:
        """rows: of each weight. dtype: of x, BF16 or FP32."""
        silu, total = epilogue == "silu_mul", sum(rows)
        self._inputs, self._dtype = inputs, dtype
        self._outputs = total // 2 if silu else total
        self._adds = epilogue == "add"
        self._out_dtype = torch.float32 if epilogue == "logits" else dtype
        self._kernel = kernel
        self._bias = None if bias is None else by_lane(bias, self._outputs, silu)
        self._linear = _Linear(
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=inputs,
            outputs=self._outputs,
            stride=self._outputs,
            epilogue=_EPILOGUES[epilogue],
            element=_ELEMENTS[dtype],
        )
        self._at = addressof(self._linear)
        self._choosing: _Linear | None = None  # the same with another epilogue, for ``largest``
        # Gate and up share panels, half of the lanes each; other weights follow one another.
        firsts = [0, 0] if silu else [sum(rows[:i]) for i in range(len(rows))]
        self._places = [
            _Place(count, first, HALF if silu else PANEL, HALF * index if silu else 0)
            for index, (count, first) in enumerate(zip(rows, firsts))
        ]

    def _allocate(self) -> None:
        """Once ``_linear`` says what the weights are."""
        self._panels = memory.zeros(function("octavo_linear_bytes", c_void_p)(self._at))
        self._linear.weights = self._panels.data_ptr()
        self._scratch = brief_function("octavo_linear_scratch", c_void_p, c_int64)

    def _set_order(self, order: Tensor | None) -> None:
        """order: int64 [in], see ``QuantizedWeight``."""
        if order is not None:
            self._order = order.int().contiguous()
            self._linear.order = self._order.data_ptr()

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """x: [T, in]; other: [T, out], which ``add`` needs and writes over. ``logits`` are in FP32.
        Raises ValueError if they do not fit."""
        count, x = len(x), self._checked(x)
        if self._adds:
            expected = (count, self._outputs)
            if other is None or other.shape != expected or other.dtype != self._dtype:
                raise ValueError(
                    f"the epilogue add needs an operand {_name(self._dtype)} {[*expected]}"
                )
            other = other.contiguous()
        elif other is not None:
            raise ValueError("only the epilogue add takes an operand")
        if other is not None and other is not x:
            y = other
        else:
            y = calls.empty(count, self._outputs, self._out_dtype)
        self._multiply(self._at, x, None if other is None else other.data_ptr(), y.data_ptr())
        return y

    def largest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, in]. Each row's largest logit, FP32 [T], and the first place that has it, int64
        [T]: the others are never written down. Never on a tape. Raises ValueError without the
        epilogue ``logits``."""
        x = self._checked(x)
        if self._linear.epilogue != _EPILOGUES["logits"]:
            raise ValueError("only logits are compared")
        if self._choosing is None:
            self._choosing = _Linear.from_buffer_copy(self._linear)
            self._choosing.epilogue = _LARGEST
        panels = -(-self._outputs // PANEL)
        values = torch.empty(len(x), panels)
        ids = torch.empty(len(x), panels, dtype=torch.int32)
        self._multiply(addressof(self._choosing), x, None, values.data_ptr(), ids.data_ptr())
        panel = torch.from_numpy(values.numpy().argmax(axis=1))[:, None]  # numpy's is the first one
        return values.gather(1, panel)[:, 0], ids.gather(1, panel)[:, 0].long()

    def _checked(self, x: Tensor) -> Tensor:
        if x.shape[1] != self._inputs or x.dtype != self._dtype:
            raise ValueError(
                f"x must be {_name(self._dtype)} [T, {self._inputs}], not {x.dtype} {[*x.shape]}"
            )
        return x.contiguous()

    def _multiply(
        self, linear: int, x: Tensor, other: int | None, y: int, ids: int | None = None
    ) -> None:
        scratch = None
        if size := self._scratch(linear, len(x)):
            scratch = calls.empty(1, size, torch.uint8)
        rows = calls.rows_of(x)
        to = None if scratch is None else scratch.data_ptr()
        arguments = _Call(linear, x.data_ptr(), other, y, ids, to, addressof(rows))
        calls.call(self._kernel, arguments, self, rows)


def _available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and preferred(DENSE.get(dtype, ())) is not None


@register("linear", "native", _available, tolerance=1.0, batch_invariant="yes")
class NativeLinear(Packed):
    """Every output is one sum over ascending inputs, in an order that csrc/octavo.h names.
    ``logits`` are in FP32 from the sums on; ``add`` writes over its operand."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, epilogue: Epilogue) -> None:
        """weights: BF16 or FP32, each [out_i, in]; with ``silu_mul`` the gate's and the up
        projection's, or one whose halves they are. They are copied. Raises ValueError for other
        dtypes."""
        dtype = weights[0].dtype
        kernel = preferred(DENSE.get(dtype, ()))
        if kernel is None or any(weight.dtype != dtype for weight in weights):
            raise ValueError(
                f"the weights must be in BF16 or FP32, not {[w.dtype for w in weights]}"
            )
        if epilogue == "silu_mul" and len(weights) == 1:
            weights = weights[0].chunk(2)
        inputs = weights[0].shape[1]
        super().__init__([len(w) for w in weights], inputs, bias, epilogue, dtype, kernel)
        self._allocate()
        pack = function("octavo_linear_pack", *(c_void_p,) * 3)
        for weight, place in zip(weights, self._places):
            weight = weight.contiguous()
            pack(self._at, weight.data_ptr(), addressof(place))


def _quantized_available(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype in _ELEMENTS and preferred(QUANTIZED) is not None


@register("quantized_linear", "native", _quantized_available, tolerance=4.0, batch_invariant="yes")
class NativeQuantizedLinear(Packed):
    """Sums within a group are exact, those of groups are added in FP32 in ascending order."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        """As the definition. They are copied, in one kind that holds them all. Raises ValueError
        for codes of 2 and 3 bits in groups that are no multiple of 16 inputs."""
        kernel = preferred(QUANTIZED)
        assert kernel is not None, "not available"
        weights = alike(weights)
        if weights[0].bits < 4 and weights[0].group % 16:
            raise ValueError(
                f"codes of {weights[0].bits} bits in groups of {weights[0].group} inputs, which is "
                "no multiple of 16"
            )
        if epilogue == "silu_mul" and len(weights) == 1:
            half = len(weights[0].codes) // 2
            weights = [weights[0][:half], weights[0][half:]]
        first, inputs = weights[0], weights[0].shape[1]
        super().__init__([len(w.codes) for w in weights], inputs, bias, epilogue, dtype, kernel)
        self._linear.bits, self._linear.group = first.bits, first.group
        # Zeros of groups are kept less this one, so that they are small where they are usual.
        self._linear.zero = first.zero if first.zeros is None else 1 << (first.bits - 1)
        self._linear.has_minimums = first.minimums is not None
        self._linear.has_zeros = first.zeros is not None
        self._set_order(first.order)
        self._linear.wide_scales = first.scales.dtype == torch.float32
        self._allocate()
        pack = function("octavo_linear_pack_codes", *(c_void_p,) * 6)
        for weight, place in zip(weights, self._places):
            zeros = weight.zeros
            if zeros is not None:
                zeros = (zeros.short() - self._linear.zero).to(torch.int8)
            parts = (weight.codes, weight.scales, weight.minimums, zeros)
            kept = [None if part is None else part.contiguous() for part in parts]
            addresses = [None if part is None else part.data_ptr() for part in kept]
            pack(self._at, *addresses, addressof(place))

    def rows(self, ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        y, rows = calls.empty(len(ids), self._inputs, self._dtype), calls.rows_of(ids)
        arguments = Lookup(self._at, ids.data_ptr(), y.data_ptr(), addressof(rows))
        calls.call("octavo_linear_lookup", arguments, self)
        return y


@register("quantize", "native", _quantized_available, batch_invariant="yes")
def quantize(weight: Tensor, group: int) -> QuantizedWeight:
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, -(-inputs // group))
    arguments = _Quantize(
        *(weight.data_ptr(), outputs, inputs, group, _ELEMENTS[weight.dtype]),
        *(codes.data_ptr(), scales.data_ptr()),
    )
    function("octavo_quantize", c_void_p)(addressof(arguments))
    return of_codes(codes, scales, group)


def by_lane(bias: Tensor, outputs: int, silu: bool) -> Tensor:
    """FP32 [panels, 32]: the bias in the order of the lanes, zeros where there is no output."""
    parts = bias.float().chunk(2) if silu else (bias.float(),)
    width = PANEL // len(parts)
    panels = -(-outputs // width)
    lanes = torch.zeros(len(parts), panels * width)
    for lane, part in zip(lanes, parts):
        lane[: len(part)] = part
    return lanes.view(len(parts), panels, width).transpose(0, 1).reshape(panels, PANEL)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float32: "FP32"}[dtype]
