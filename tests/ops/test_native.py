"""The library of CPU kernels: what it finds, and that octavo works without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.ops import registry
from octavo.ops.native import library, norm
from octavo.ops.native.library import Features
from tests.ops.comparing import assert_close, randn

DEFINITION = registry.versions("rms_norm")[0]
built = pytest.mark.skipif(library.load() is None, reason="no compiler when octavo was installed")


@built
def test_features_are_those_that_torch_finds() -> None:
    found = library.features()
    assert (Features.AVX2 in found) == torch.cpu._is_avx2_supported()
    assert (Features.AVX512 in found) == torch.cpu._is_avx512_supported()
    assert (Features.AVX512_BF16 in found) == torch.cpu._is_avx512_bf16_supported()


@built
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_code_is_shared_between_instruction_sets() -> None:
    """A weak function is one of several copies; the linker may keep the one that this CPU cannot
    run."""
    assert library.load() is not None
    path = library.load()._name
    listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    weak = [line for line in listed.splitlines() if line.split(" ")[-2:-1] == ["W"]]
    assert weak == []


@built
@pytest.mark.parametrize(
    "dtype,needed,name",
    [(dtype, *kernel) for dtype, kernels in norm.KERNELS.items() for kernel in kernels],
)
@pytest.mark.parametrize("size", (1, 7, 64, 577))
def test_norms_of_every_instruction_set(
    dtype: torch.dtype, needed: Features, name: str, size: int
) -> None:
    if needed not in library.features():
        pytest.skip("not on this CPU")
    x, weight = randn(9, size).to(dtype), randn(size, seed=1).to(dtype)
    y = norm.run(name, x, weight, 1e-5)
    expected = DEFINITION.call(x.double(), weight.double(), 1e-5)
    assert_close(y, expected, registry.versions("rms_norm")[-1], dtype)


@built
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_rows_norm_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = randn(200, 576).to(dtype), randn(576, seed=1).to(dtype)
    chosen = registry.select("rms_norm", "cpu", dtype)
    assert chosen.name == "native" and chosen.batch_invariant == "yes"
    whole = chosen.call(x, weight, 1e-5)
    for low, high in ((0, 1), (3, 4), (5, 12), (100, 200)):
        assert torch.equal(chosen.call(x[low:high], weight, 1e-5), whole[low:high])


def test_a_library_of_another_interface_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = (Path(__file__).parents[2] / "csrc" / "octavo.h").read_text()
    assert f"OCTAVO_INTERFACE = {library.INTERFACE} " in header
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    found, problem = library._found.__wrapped__()
    assert found is None and problem


WITHOUT = """
import sys
from pathlib import Path
from octavo.ops.native import library, norm
library.EXTENSION_SUFFIXES.clear()
from octavo.ops import registry
import torch
assert library.load() is None and not library.features() and "g++" in library.problem()
names = [registry.select(op, "cpu", torch.float32).name for op in ("rms_norm", "linear")]
print(*names)
"""


def test_without_the_library_torch_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "native" not in done.stdout
