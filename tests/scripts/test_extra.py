"""What the clients' environment is made from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/extra.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)


def test_requirements_of_an_extra_are_lines_for_pip():
    lines = run("conformance").stdout.splitlines()
    assert {"openai>=1.60", "lm-eval[api]>=0.4.9"} <= {*lines}
    assert not any(line.startswith(("torch", "octavo")) for line in lines)


def test_an_unknown_extra_is_refused_with_the_known_ones():
    refused = run("no-such-extra")
    assert refused.returncode == 1 and "conformance" in refused.stderr
