"""Installs a build of torch that suits this machine: ``install_torch.py REQUIREMENT CPU_INDEX``.

Run by the Python of the environment that gets it. With an NVIDIA GPU, or where the default index
offers a CPU build, that is plain ``pip install``. Otherwise pip would bring gigabytes of CUDA
packages to a machine that cannot use them, and CPU_INDEX is used instead (empty: take them).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PIP = [sys.executable, "-m", "pip"]
CUDA_PREFIXES = ("nvidia-", "cuda-")


def main(requirement: str, cpu_index: str) -> int:
    found = installed(requirement)
    if found:
        print(f"    torch {found} is here and satisfies {requirement}")
        return 0
    if has_gpu():
        print(f"    NVIDIA GPU found: {requirement} with CUDA")
        return install(requirement)
    cuda = cuda_packages(requirement)
    if cuda is None:
        return 1
    if not cuda:
        print(f"    no GPU; the default index has a CPU build of {requirement}")
        return install(requirement)
    if not cpu_index:
        print(f"    no GPU, but TORCH_INDEX is empty: {requirement} with {len(cuda)} CUDA packages")
        return install(requirement)
    print(f"    no GPU; the default index would bring {len(cuda)} CUDA packages: using {cpu_index}")
    code = install(requirement, "--index-url", cpu_index)
    if code:
        print(
            f"no CPU build of {requirement} could be installed from {cpu_index}; name another "
            "index (make TORCH_INDEX=…), another build (make TORCH='torch==…'), or take the CUDA "
            "build (make TORCH_INDEX=)",
            file=sys.stderr,
        )
    return code


def installed(requirement: str) -> str | None:
    """The version in this environment when it satisfies ``requirement``."""
    from pip._vendor.packaging.requirements import Requirement

    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if Requirement(requirement).specifier.contains(version) else None


def has_gpu() -> bool:
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def cuda_packages(requirement: str) -> list[str] | None:
    """CUDA packages that a plain install would bring (asked with a dry run); None: pip failed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [*PIP, "install", "--dry-run", "--ignore-installed", "--quiet"]
        if subprocess.run([*command, "--report", str(report), requirement]).returncode:
            print(f"pip finds no {requirement} for this Python and platform", file=sys.stderr)
            return None
        entries = json.loads(report.read_text())["install"]
    names = [entry["metadata"]["name"].lower().replace("_", "-") for entry in entries]
    return [name for name in names if name.startswith(CUDA_PREFIXES)]


def install(requirement: str, *flags: str) -> int:
    return subprocess.run([*PIP, "install", "--progress-bar", "on", *flags, requirement]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
