"""``octavo models``: the families octavo can run, the catalogue, and what is on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from octavo.checkpoint.catalogue import CATALOGUE
from octavo.cli.arguments import Arguments, Command
from octavo.cli.console import size, table
from octavo.config import flag


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
        hub = {name: str(path) for name, path in cached.items()}
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
    print("\nhub models on this machine (octavo serve ORG/NAME)")
    print(table([(name, str(path)) for name, path in cached.items()]) or "  none")
    return 0


def supported_architectures() -> dict[str, list[str]]:
    """Architecture in config.json -> the GGUF names of the same family."""
    from octavo.model.families.catalogue import FAMILIES

    return {
        name: list(family.gguf_architectures)
        for family in FAMILIES
        for name in family.architectures
    }


def cached_hub_models() -> dict[str, Path]:
    """Repositories with a config.json in the hub's own cache, of a supported family or not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found: dict[str, Path] = {}
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        if any(folder.glob("snapshots/*/config.json")):
            found[folder.name.removeprefix("models--").replace("--", "/")] = folder
    return found
