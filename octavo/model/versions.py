"""Which version of each operation a model uses."""

from __future__ import annotations

import torch

from octavo.model.spec import DecoderSpec, DynamicScaling
from octavo.ops import registry
from octavo.ops.registry import Version
from octavo.types import ConfigError

OPERATIONS = ("embedding", "rms_norm", "linear", "paged_attention", "take_rows", "copy_blocks")

_OF_QUANTIZATION: dict[str | None, tuple[str, ...]] = {
    "gguf": ("quantized_linear",),
    "int8": ("quantized_linear", "quantize"),
}


def choose_versions(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: str,
    deterministic: bool,
    quantization: str | None = None,
) -> dict[str, Version]:
    """Operation -> version, on ``device`` ("cpu", "cuda"). ``quantization``: of the model. Raises
    ConfigError, in one line, where ``--deterministic`` cannot be kept."""
    operations = (*OPERATIONS, *_OF_QUANTIZATION.get(quantization, ()))
    found = {op: registry.runnable(op, device, dtype, deterministic) for op in operations}
    if missing := [op for op in operations if not found[op]]:
        raise ConfigError(
            f"--deterministic: with {str(dtype).removeprefix('torch.')} on "
            f"{'a CPU' if device == 'cpu' else 'this GPU'}, {', '.join(missing)} may round a row "
            "differently in another batch; it needs Triton, a GPU of compute capability 8.0 to "
            "9.0 and --dtype bfloat16 or float16, or octavo's own kernels on a CPU with --dtype "
            "float32 (or bfloat16, with AVX512_BF16)"
        )
    scalings = [layer.mixer.rope.scaling for layer in spec.layers]
    if deterministic and any(isinstance(scaling, DynamicScaling) for scaling in scalings):
        raise ConfigError(
            "--deterministic: this model's rope_scaling, dynamic, turns a token by the length its "
            "context has in the step that computes it, so results depend on how a prompt is cut"
        )
    return {op: versions[-1] for op, versions in found.items()}
