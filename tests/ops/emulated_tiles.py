"""The kernels for AMX in the form that runs without it (csrc/tiles_emulated.h)."""

from octavo.ops.native.library import Features

_NEEDED = Features.AVX512_BF16 | Features.AVX512_VNNI
EMULATED_DENSE = (_NEEDED, "octavo_linear_bf16_amx_emulated")
EMULATED_QUANTIZED = (_NEEDED, "octavo_linear_quantized_amx_emulated")
EMULATED_EXPANDED = (_NEEDED, "octavo_linear_expanded_bf16_amx_emulated")
EMULATED_ATTENTION = (_NEEDED, "octavo_attention_bf16_amx_emulated")
