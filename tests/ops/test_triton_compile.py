"""The kernels as they are launched on Hopper, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.ops.triton.plans import SHARED_MEMORY

pytest.importorskip("triton")


def compiled(module: str, cache: Path) -> list[dict[str, Any]]:
    """What ``python -m module`` tells about each launch."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    script = [sys.executable, "-m", module]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_launches_compile_for_hopper_without_spills(tmp_path):
    rows = compiled("tests.ops.compile_linear", tmp_path)
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


@pytest.mark.slow
def test_the_sampler_compiles_for_hopper(tmp_path):
    rows = compiled("tests.ops.compile_sampling", tmp_path)
    assert {row["name"] for row in rows} == {"_scan", "collect", "settle", "_edit", "_keep_allowed"}
    for row in rows:
        # The search of a whole row sums eight pivots in registers and spills a few beside them.
        assert row["stack"] <= (160 if row["name"] == "settle" else 0), row
        assert row["shared"] <= SHARED_MEMORY and row["waits"] == row["pdl"], row
        narrow = row["name"] == "_keep_allowed"  # 32 logits share a word, which is all it loads
        assert row["wide_loads"] > 0 or row["vocab"] % 16 or narrow, row


@pytest.mark.slow
def test_attention_compiles_for_hopper(tmp_path):
    rows = compiled("tests.ops.compile_attention", tmp_path)
    assert {row["name"] for row in rows} == {
        *("decode_attention_kernel", "prefill_attention_kernel", "rope_cache_kernel"),
    }
    for row in rows:
        # Four warps and some spilled registers were faster than eight warps without.
        spills = row["name"] == "prefill_attention_kernel" and row["rows"] == 128
        assert row["stack"] <= (320 if spills else 16), row
        assert row["shared"] <= SHARED_MEMORY and row["waits"] == row["pdl"], row
        assert row["wide_loads"] > 0 or row["name"] == "rope_cache_kernel", row
        assert (row["bulk_loads"] > 0) == row["tma"], row
        assert row["wgmma"] > 0 or row["name"] != "prefill_attention_kernel", row


@pytest.mark.slow
def test_latent_attention_compiles_for_hopper(tmp_path):
    rows = compiled("tests.ops.compile_latent", tmp_path)
    assert {row["name"] for row in rows} == {
        *("latent_cache_kernel", "latent_attention_kernel", "latent_merge_kernel"),
    }
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= SHARED_MEMORY, row
        if row["name"] == "latent_attention_kernel":
            # Keys arrive 16 bytes at a time; whole warp groups multiply tiles of 64 lines.
            assert row["wide_copies"] > 0, row
            assert (row["wgmma"] > 0) == (row["fixed"]["ROWS"] == 64), row


@pytest.mark.slow
def test_experts_and_their_routing_compile_for_hopper_without_spills(tmp_path):
    rows = compiled("tests.ops.compile_moe", tmp_path)
    products = {"pair_up_kernel", "pair_down_kernel", "grouped_kernel"}
    others = {"route_kernel", "count_kernel", "place_kernel", "sum_kernel"}
    assert {row["name"] for row in rows} == products | others
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= SHARED_MEMORY, row
        assert row["waits"] == row["pdl"], row
        if row["name"] in products:
            assert row["wide_loads"] > 0, row
        if row["name"] == "grouped_kernel":
            assert row["wgmma"] > 0, row


@pytest.mark.slow
def test_what_is_deterministic_compiles_for_hopper(tmp_path):
    """All forms of the linear, however many rows they are for, with one matrix instruction."""
    rows = compiled("tests.ops.compile_fixed", tmp_path)
    kernels = {"fixed_linear_kernel", "rope_cache_kernel", "prefill_attention_kernel"}
    assert {row["name"] for row in rows} == kernels
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= 99 << 10, row  # also on cards before Hopper
        assert row["waits"] == row["pdl"], row
        if row["name"] == "fixed_linear_kernel":
            assert row["products"] == ["m64n64k16"], row


@pytest.mark.slow
def test_quantized_weights_compile_for_hopper(tmp_path):
    rows = compiled("tests.ops.compile_quantized", tmp_path)
    assert {row["name"] for row in rows} == {
        *("packed_gemv_kernel", "packed_skinny_kernel", "packed_grouped_kernel", "expand_kernel"),
        *("round_kernel", "gather_kernel", "outliers_kernel", "add_outliers_kernel"),
        "finish_kernel",
    }
    for row in rows:
        # The last fields of tables of rows are looked up beside many pointers.
        assert row["stack"] <= (64 if row["fixed"].get("TABLE") else 0), row
        assert row["shared"] <= SHARED_MEMORY and row["waits"] == row["pdl"], row
        if row["name"] == "packed_skinny_kernel":
            assert row["wgmma"] > 0 or not row["fixed"]["SWAP"], row
        if row["name"] in ("packed_gemv_kernel", "packed_skinny_kernel"):
            assert row["wide_loads"] > 0, row
