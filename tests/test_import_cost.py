"""What importing costs: torch takes seconds, so nothing that answers quickly may load it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures import models

HEAVY = ("torch", "triton", "transformers", "pandas", "scipy")
LIGHT_MODULES = {
    "octavo": (*HEAVY, "numpy", "fastapi"),
    "octavo.cli.main": (*HEAVY, "numpy", "fastapi", "aiohttp", "rich", "huggingface_hub"),
    "octavo.cli.serve": (*HEAVY, "fastapi", "aiohttp", "rich", "huggingface_hub"),
    "octavo.cli.bench.serve": (*HEAVY, "fastapi"),
    "octavo.checkpoint.locate": (*HEAVY, "fastapi", "huggingface_hub"),
    "octavo.core.scheduler": (*HEAVY, "fastapi"),
    "octavo.engine.client": (*HEAVY, "fastapi"),
    "octavo.engine.admission": (*HEAVY, "fastapi"),
    "octavo.text.tokenizer": (*HEAVY, "fastapi"),
    "octavo.text.chat": (*HEAVY, "fastapi"),
    "octavo.server.app": HEAVY,
    "octavo.server.lifecycle": (*HEAVY, "fastapi"),
    "octavo.model.families.catalogue": HEAVY,
    "octavo.llm": HEAVY,
    "octavo.plan.plan": HEAVY,
}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_brings_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert [name for name in LIGHT_MODULES[module] if name in loaded] == []


def test_a_cpu_never_imports_triton():
    script = (
        "import sys, torch; from octavo.ops import registry; import octavo.worker.runner;"
        "[registry.select(op, 'cpu', torch.bfloat16) for op in registry.operations()];"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout.split() and "triton" not in done.stdout.split()


def test_a_start_on_a_cpu_does_not_import_torchs_compiler():
    script = (
        "import sys; from pathlib import Path; from octavo.config import *; prepare_torch();"
        "from octavo.worker.runner import Runner;"
        "path = sys.argv[1]; config = EngineConfig(model=ModelConfig(model=path));"
        "Runner(config, Path(path)).start(lambda *news: None); print(*sys.modules)"
    )
    command = [sys.executable, "-c", script, str(models.path("R"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "torch" in loaded
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "triton")
    assert [name for name in heavy if name in loaded] == []
