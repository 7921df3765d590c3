"""``octavo pull``: fetch a model now, so that serving it later needs no network."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.checkpoint.catalogue import CATALOGUE, pull
from octavo.checkpoint.locate import locate
from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import PhaseLine, size
from octavo.flags import flag


@dataclass(frozen=True)
class PullOptions:
    model: str = flag(
        "smollm2-135m",
        "a name from `octavo models`, or a hub id",
        group="pull",
        positional=True,
    )
    revision: str | None = flag(None, "hub revision (branch, tag or commit)", group="pull")


COMMAND = Command(
    "pull",
    "Fetches a model into the cache.",
    (PullOptions,),
    examples=("octavo pull smollm2-135m", "octavo pull org/name --revision main"),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(PullOptions)
    progress = PhaseLine()
    if options.model in CATALOGUE:
        path = pull(CATALOGUE[options.model], progress, verify=True)
    else:
        path = locate(options.model, options.revision, progress=progress).path
    progress.end()
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    total = sum(file.stat().st_size for file in files)
    print(f"{options.model}: {path} ({size(total)})")
    return 0
