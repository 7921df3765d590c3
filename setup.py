"""Builds the CPU kernels (csrc/) into octavo.ops.native where a C++ compiler is found.

``optional``: without a compiler, or where it fails, octavo is installed all the same and computes
with torch alone. The rest of the project's description is in pyproject.toml.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))
# Compiled with OpenMP but not linked with it: at run time torch's own is found, so that the kernels
# and torch's operators share one team of threads. Products and sums are fused only where the code
# says so: the compiler would choose by instruction set.
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-ffp-contract=off"]


class BuildKernels(build_ext):
    """Compiles as many files at once as there are cores; by itself setuptools takes one by one."""

    def build_extension(self, extension):
        compile_some = self.compiler.compile

        def compile_all(sources, **options):
            cores = len(os.sched_getaffinity(0))
            with ThreadPoolExecutor(cores) as pool:
                objects = pool.map(lambda source: compile_some([source], **options), sources)
                return [path for paths in objects for path in paths]

        Path(self.build_temp, "csrc").mkdir(parents=True, exist_ok=True)
        self.compiler.compile = compile_all
        super().build_extension(extension)


kernels = Extension(
    "octavo.ops.native.kernels", SOURCES, depends=HEADERS, extra_compile_args=FLAGS, optional=True
)
supported = platform.system() == "Linux" and platform.machine() == "x86_64"
setup(ext_modules=[kernels] if supported else [], cmdclass={"build_ext": BuildKernels})
