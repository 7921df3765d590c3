"""The kernels as they are launched on Hopper, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from octavo.ops.triton.plans import SHARED_MEMORY

pytest.importorskip("triton")


@pytest.mark.slow
def test_launches_compile_for_hopper_without_spills(tmp_path):
    script = [sys.executable, "-m", "tests.ops.compile_linear"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["name"] for row in rows} == {
        *("gemv_kernel", "skinny_kernel", "silu_mul_kernel"),
        *("rms_norm_kernel", "embedding_kernel", "copy_blocks_kernel"),
    }
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= SHARED_MEMORY, row
        # A kernel waits for its predecessor exactly where it is launched to overlap with it.
        assert row["waits"] == row["pdl"], row
        if row["name"] == "skinny_kernel":
            assert row["wgmma"] > 0 or not row["fixed"]["SWAP"], row
        if row["name"] in ("gemv_kernel", "skinny_kernel"):
            assert row["wide_loads"] > 0, row
