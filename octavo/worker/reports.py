"""Log-probabilities on their way from the device to a result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Logprobs
from octavo.worker.sampler import as_logprobs

Int32 = NDArray[np.int32]


@dataclass
class Report:
    """Of q tokens; ``wanted[i]`` alternatives of each. To be read when the device has come so far.

    ids: int32 [q, k + 1]; values: float32 [q, k + 1]; ranks: int32 [q], on the host.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    wanted: Int32

    @classmethod
    def fetch(cls, ids: Tensor, values: Tensor, ranks: Tensor, wanted: Int32) -> Report:
        """Enqueues the copies to the host."""
        return cls(fetched(ids), fetched(values), fetched(ranks), wanted)

    def logprobs(self) -> Logprobs:
        return as_logprobs(self.ids, self.values, self.ranks, self.wanted)


def fetched(values: Tensor) -> Tensor:
    """On the host once the device has come so far; pinned memory where that takes time."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)
