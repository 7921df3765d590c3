"""Prints what an extra of pyproject.toml requires, one a line: pip installs an extra only together
with the package itself.

    python scripts/extra.py conformance
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    if len(sys.argv) != 2 or sys.argv[1] not in extras:
        sys.exit(f"usage: extra.py {{{','.join(extras)}}}")
    print(*extras[sys.argv[1]], sep="\n")


if __name__ == "__main__":
    main()
