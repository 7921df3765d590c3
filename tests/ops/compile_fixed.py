"""Run by test_triton_compile.py in a process of its own: compiles what --deterministic launches for
Hopper, prints JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

from octavo.ops.attention import AttentionGeometry
from octavo.ops.triton.fixed_attention import FixedPagedAttention
from octavo.ops.triton.fixed_linear import FixedLinear
from tests.fixtures.triton_aot import compile_launch, recorded
from tests.ops.compile_attention import launch, meta

LINEARS = (
    *((4096, 14336, "add"), (6144, 1024, "silu_mul"), (49152, 576, "logits")),
    *((963, 584, "none"), (1, 8, "none")),
)
ROWS = (1, 8, 65, 4096)  # of every way to share them out
GEOMETRIES = (
    AttentionGeometry(32, 8, 128),
    AttentionGeometry(9, 3, 64, qk_norm_eps=1e-6),
    AttentionGeometry(16, 1, 192),
    AttentionGeometry(8, 4, 256, window=511),
)
PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)")


def main() -> None:
    with recorded() as launches:
        for n, k, epilogue in LINEARS:
            linear = FixedLinear([meta(n, k)], meta(n), epilogue)
            for rows in ROWS:
                linear(meta(rows, k), meta(rows, n) if epilogue == "add" else None)
        for geometry in GEOMETRIES:
            launch(geometry, 7, 20, 64, False, FixedPagedAttention)
    for one in launches:
        compiled = compile_launch(one)
        row = asdict(replace(compiled, ptx="")) | {
            "products": sorted(set(PRODUCT.findall(compiled.ptx))),
            "waits": compiled.ptx.count("griddepcontrol.wait"),
            "pdl": one.options.get("launch_pdl", False),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
