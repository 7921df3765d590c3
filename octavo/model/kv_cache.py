"""What keys and values are kept in (``--kv-cache-dtype``)."""

from __future__ import annotations

import torch

from octavo.types import ConfigError

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DTYPES = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "int8": INT8}
NAMES = {E4M3: "fp8", E5M2: "fp8_e5m2", INT8: "int8"}
FP8_CAPABILITY = (8, 9)  # of a GPU: what rounds to FP8 in one instruction


def choose_cache_dtype(asked: str, computed: torch.dtype, device: str) -> torch.dtype | None:
    """asked: ``--kv-cache-dtype``; computed: what the model computes in; device: "cpu", "cuda".
    None: keys and values are kept as they are computed. Raises ConfigError for what is not to be
    had."""
    name = str(computed).removeprefix("torch.")
    if asked in ("auto", name):
        return None
    kept = DTYPES.get(asked)
    if kept is None:
        raise ConfigError(
            f"--kv-cache-dtype {asked}: the cache is kept in the numbers that are computed with, "
            f"{name}, or in 8 bits (fp8, fp8_e5m2, int8); use auto, or --dtype {asked}"
        )
    if device == "cuda" and kept != INT8:
        found = torch.cuda.get_device_capability()
        if found < FP8_CAPABILITY:
            raise ConfigError(
                f"--kv-cache-dtype {asked}: needs a GPU of compute capability "
                f"{'.'.join(map(str, FP8_CAPABILITY))}, this one has "
                f"{'.'.join(map(str, found))}; use int8, which takes as much memory, or auto"
            )
    return kept
