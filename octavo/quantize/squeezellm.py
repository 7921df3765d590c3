"""SqueezeLLM: each output has a table of numbers of its own, placed by weighted k-means, and a few
weights are kept apart (dense and sparse).

Kim et al. 2023, https://arxiv.org/abs/2306.07629. The paper weighs the square of a weight's error
by the diagonal of the Fisher information, the mean of (dL/dw)^2. Here no gradient is computed: of a
linear dL/dw_oi = g_o x_i, so that with g and x taken as independent the weight is
E[g_o^2] E[x_i^2], of which the first factor is the same for a whole table and does not matter. So
errors are weighed by the inputs' second moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.weights import Outliers, TableWeight

LARGEST_SHARE, SENSITIVE_SHARE = (
    0.004,
    0.0005,
)  # of the weights that are kept apart, as in the paper
ROUNDS = 30
_WEIGHTS_AT_A_TIME = 1 << 22


def squeezellm(weight: Tensor, moments: Tensor, bits: int, sparse: bool = False) -> TableWeight:
    """weight: [out, in]. moments: E[x_i^2] of its inputs, [in]. ``sparse``: the weights that are
    largest, and those whose rounding to 0 would cost the most, are kept apart: 0.45 %."""
    wide, importance = weight.float(), moments.float()
    apart = outliers_of(wide, importance) if sparse else None
    codes, tables = [], []
    step = max(1, _WEIGHTS_AT_A_TIME // wide.shape[1])
    for start in range(0, len(wide), step):
        rows = wide[start : start + step]
        shares = importance.expand_as(rows)
        seen = rows
        if apart is not None:
            mine = apart[start : start + step]
            seen, shares = rows.masked_fill(mine, 0), shares.masked_fill(mine, 0)
        table = weighted_k_means(seen, shares, 1 << bits)
        codes.append(nearest(rows, table).to(torch.uint8))
        tables.append(table)
    found = TableWeight(torch.cat(codes), torch.cat(tables), None, bits)
    if apart is None:
        return found
    return TableWeight(found.codes, found.table, None, bits, outliers=_sparse(wide, found, apart))


def outliers_of(weight: Tensor, importance: Tensor) -> Tensor:
    """Which weights are kept apart: bool [out, in]."""
    flat = weight.flatten()
    apart = torch.zeros_like(flat, dtype=torch.bool)
    apart[flat.abs().topk(int(LARGEST_SHARE * len(flat))).indices] = True
    cost = (weight.square() * importance).flatten().masked_fill_(apart, 0)
    apart[cost.topk(int(SENSITIVE_SHARE * len(flat))).indices] = True
    return apart.view_as(weight)


def _sparse(weight: Tensor, found: TableWeight, apart: Tensor) -> Outliers:
    """What is missing where the table's number stands: the sums are exact but for rounding."""
    rows, columns = apart.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weight))
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    return Outliers(starts, columns.int(), weight[apart] - found.dense()[apart])


def weighted_k_means(values: Tensor, shares: Tensor, count: int) -> Tensor:
    """values, shares: FP32 [n, m], shares not negative. Of each row ``count`` centres, ascending,
    FP32 [n, count], near the least sum of share * (value - nearest centre)^2: Lloyd's rounds, from
    centres that split the row's shares^(1/3) evenly (what is best for many centres, Panter and Dite
    1951)."""
    order = values.argsort(dim=1)
    values, shares = values.gather(1, order), shares.gather(1, order)
    centres = _start(values, shares, count)
    sums = torch.zeros_like(centres)
    weighted = values * shares
    for _ in range(ROUNDS):
        codes = nearest(values, centres)
        total = sums.scatter_add(1, codes, shares)
        mean = sums.scatter_add(1, codes, weighted) / total
        moved = torch.where(total > 0, mean, centres)
        if torch.equal(moved, centres):
            break
        centres = moved.sort(dim=1).values
    return centres


def _start(values: Tensor, shares: Tensor, count: int) -> Tensor:
    """values: ascending in each row."""
    density = (shares + shares.mean(dim=1, keepdim=True) * 1e-6 + 1e-30).pow(1 / 3)
    gaps = torch.diff(values, dim=1, prepend=values[:, :1])
    ends = (density * gaps.pow(2 / 3) + density * 1e-6).cumsum(1)  # a cell of one value: its gap
    places = (torch.arange(count, device=values.device) + 0.5) / count * ends[:, -1:]
    return values.gather(1, torch.searchsorted(ends, places).clamp_(max=values.shape[1] - 1))


def nearest(values: Tensor, centres: Tensor) -> Tensor:
    """Which of its row's ascending centres each value is nearest to: int64 [n, m]."""
    middles = (centres[:, 1:] + centres[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), values.contiguous())
