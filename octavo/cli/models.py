"""``octavo models``: the families octavo can run, the catalogue, and what is on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.catalogue import CATALOGUE
from octavo.checkpoint.split import first_part
from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import size, table
from octavo.flags import flag


@dataclass(frozen=True)
class ModelsOptions:
    json: bool = flag(False, "print JSON", group="models")


COMMAND = Command(
    "models",
    "Shows the supported model families, the names `octavo pull` knows, and models in the caches.",
    (ModelsOptions,),
)


def run(arguments: Arguments) -> int:
    options = arguments.build(ModelsOptions)
    families = supported_architectures()
    cached = cached_hub_models()
    if options.json:
        catalogue = {
            model.name: {
                "description": model.description,
                "license": model.license,
                "bytes": model.num_bytes,
                "path": str(model.cached_path) if model.is_cached else None,
            }
            for model in CATALOGUE.values()
        }
        hub = {
            model.name: {"path": str(model.path), "bytes": model.num_bytes, "files": model.gguf}
            for model in cached
        }
        print(json.dumps({"families": families, "catalogue": catalogue, "hub": hub}, indent=2))
        return 0
    print("families (the architecture in config.json, or general.architecture of a GGUF)")
    print(table([(family, ", ".join(names)) for family, names in families.items()]))
    print("\ncatalogue (octavo pull NAME, octavo serve NAME)")
    rows = [
        (
            model.name,
            model.description,
            size(model.num_bytes),
            model.license,
            str(model.cached_path) if model.is_cached else "not pulled yet",
        )
        for model in CATALOGUE.values()
    ]
    print(table(rows))
    print("\nhub models on this machine (octavo serve ORG/NAME, ORG/NAME:FILE of GGUF files)")
    on_disk = [
        (name, size(num_bytes), str(model.path))
        for model in cached
        for name, num_bytes in model.servable()
    ]
    print(table(on_disk) or "  none")
    return 0


def supported_architectures() -> dict[str, list[str]]:
    """Architecture in config.json -> the GGUF names of the same family."""
    from octavo.model.families.catalogue import FAMILIES

    return {
        name: list(family.gguf_architectures)
        for family in FAMILIES
        for name in family.architectures
    }


@dataclass(frozen=True)
class CachedModel:
    """A repository in the hub's cache. ``num_bytes``: of all its files there, of every revision.
    ``gguf``: names of the GGUF files of the newest revision."""

    name: str
    path: Path
    num_bytes: int
    has_config: bool
    gguf: list[str]

    def servable(self) -> list[tuple[str, int]]:
        """What ``octavo serve`` can be given, and its bytes."""
        found = {self.name: self.num_bytes} if self.has_config else {}
        for name in self.gguf:  # parts of a split one count as its first
            files = self.path.glob(f"snapshots/*/{name}")
            served = f"{self.name}:{first_part(Path(name))}"
            found[served] = found.get(served, 0) + max(file.stat().st_size for file in files)
        return list(found.items())


def cached_hub_models() -> list[CachedModel]:
    """Repositories with a config.json or GGUF files in the hub's own cache, of a supported family
    or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = []
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        if not snapshots:
            continue
        newest = snapshots[-1]
        gguf = sorted(
            str(file.relative_to(newest)) for file in newest.rglob("*.gguf") if file.is_file()
        )
        has_config = (newest / "config.json").is_file()
        if has_config or gguf:
            name = folder.name.removeprefix("models--").replace("--", "/")
            # Snapshots are links to blobs; where links are not possible they are the files.
            files = {file.resolve() for file in folder.rglob("*") if file.is_file()}
            kept = {file for file in files if "blobs" in file.parts or "snapshots" in file.parts}
            total = sum(file.stat().st_size for file in kept)
            found.append(CachedModel(name, folder, total, has_config, gguf))
    return found
