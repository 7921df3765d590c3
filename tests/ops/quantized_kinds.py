"""Random weights of all kinds, for tests."""

from __future__ import annotations

from typing import Any

import torch

from octavo.ops.weights import Float8Weight, Outliers, Quantized, QuantizedWeight, TableWeight


class Kinds:
    """Weights [n, k] of any kind, from one generator."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    def codes(self, bits: int, *size: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, size, dtype=torch.uint8, generator=self.generator)

    def scales(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, generator=self.generator) / 20 + 0.02

    def even(
        self, n: int, k: int, bits: int, group: int, shift: str = "", order: bool = False,
        zero: int | None = None, dtype: torch.dtype = torch.float16,
    ) -> QuantizedWeight:  # fmt: skip
        """shift: "", "zeros" or "minimums"; zero: in the middle if None."""
        groups = -(-k // group)
        zero = 1 << (bits - 1) if zero is None else zero
        return QuantizedWeight(
            self.codes(bits, n, k),
            (self.scales(n, groups) * (8 / (1 << bits))).to(dtype),
            (self.normal(n, groups) / 9).to(dtype) if shift == "minimums" else None,
            bits,
            group,
            0 if shift == "zeros" else zero,
            self.codes(bits, n, groups) if shift == "zeros" else None,
            torch.randperm(k, generator=self.generator) if order else None,
        )

    def table(
        self, n: int, k: int, bits: int, group: int = 0, of_rows: bool = False, outliers: int = 0
    ) -> TableWeight:
        """outliers: of each row but the first, which has none."""
        table = self.normal(n, 1 << bits) if of_rows else self.normal(1 << bits)
        scales = self.scales(n, -(-k // group)) * 20 if group else None
        extra = None
        if outliers:
            starts = (torch.arange(n + 1) - 1).clamp_min(0) * outliers
            columns = torch.stack([self._columns(k, outliers) for _ in range(n - 1)]).flatten()
            extra = Outliers(starts.int(), columns.int(), self.normal((n - 1) * outliers) * 3)
        return TableWeight(self.codes(bits, n, k), table, scales, bits, group, extra)

    def _columns(self, k: int, count: int) -> torch.Tensor:
        return torch.randperm(k, generator=self.generator)[:count].sort().values

    def float8(
        self, n: int, k: int, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn,
        **fields: Any,
    ) -> Float8Weight:  # fmt: skip
        spans = [-(-size // (span or size)) for size, span in zip((n, k), block)]
        values = (self.normal(n, k) * 20).to(dtype)
        return Float8Weight(values, self.scales(*spans), block, **fields)

    def every(self, n: int, k: int) -> dict[str, Quantized]:
        """One of each kind that kernels tell apart."""
        found: dict[str, Quantized] = {}
        for bits in (2, 3, 4, 8):
            for shift in ("", "zeros", "minimums"):
                found[f"{bits}-bit-{shift or 'plain'}"] = self.even(n, k, bits, 64, shift)
            found[f"{bits}-bit-channel"] = self.even(n, k, bits, 65_536, zero=1)
        found["4-bit-channel-zeros"] = self.even(n, k, 4, 65_536, "zeros")
        found["4-bit-order"] = self.even(n, k, 4, 32, "zeros", order=True)
        found["4-bit-odd-group"] = self.even(n, k, 4, 20, "minimums", dtype=torch.float32)
        found["3-bit-48-group"] = self.even(n, k, 3, 48, order=True)
        found["2-bit-wide-group"] = self.even(n, k, 2, 256)
        for bits in (2, 3, 4):
            found[f"table-{bits}"] = self.table(n, k, bits, 64)
        found["table-rows-outliers"] = self.table(n, k, 4, of_rows=True, outliers=40)
        found["table-3-rows-odd"] = self.table(n, k, 3, 20, of_rows=True, outliers=3)
        for block in ((0, 0), (1, 0), (32, 64), (1, 20)):
            found[f"float8-{block[0]}-{block[1]}"] = self.float8(n, k, block)
        found["float8-e5m2"] = self.float8(n, k, (1, 0), torch.float8_e5m2)
        return found
