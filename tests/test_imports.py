"""Who imports whom: the rules of docs/architecture.md, read from the sources with ``ast``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "octavo"

# Room -> what of octavo it may import, its own room aside. A name ends at a dot.
EVERYBODY = {"types", "flags", "speculation", "config", "machine", "logs"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "flags": {"types"},
    "speculation": {"types", "flags"},
    "config": {"types", "flags", "speculation"},
    "machine": set(),
    "logs": set(),
    "outputs": {"types"},
    "core": EVERYBODY,
    "checkpoint": EVERYBODY,
    "text": EVERYBODY | {"checkpoint"},
    "collector": set(),
    "parent": set(),
    "grammar": EVERYBODY,
    "wire": EVERYBODY,
    "engine": EVERYBODY | {"core", "checkpoint", "grammar", "wire"},
    "engine.process": EVERYBODY | {"engine", "collector", "parent", "wire"},
    "engine.start": EVERYBODY
    | {"core", "checkpoint", "engine", "grammar", "model.facts", "model.shard", "plan", "worker"},
    "plan": EVERYBODY
    | {"checkpoint", "quant", "worker.sizes", "worker.memory", "worker.gpu_memory"}
    | {"model.spec", "model.shard", "model.stages", "model.structure", "model.facts"}
    | {"model.families", "model.quantization", "model.loader.headers", "model.loader.sizes"},
    "assembly": EVERYBODY | {"engine.messages", "outputs", "text"},
    "ops": set(),
    "quant": EVERYBODY | {"ops", "checkpoint.json_file"},
    "parallel": EVERYBODY | {"ops.native"},
    "model": EVERYBODY | {"ops", "quant", "parallel", "checkpoint"},
    "worker": EVERYBODY
    | {"ops", "model", "parallel", "checkpoint", "core.plan", "grammar"}
    | {"wire"},
    "worker.process": EVERYBODY | {"parallel", "core.plan", "grammar", "parent", "wire"},
    "server": EVERYBODY
    | {"engine.client", "engine.messages", "engine.admission", "engine.streams", "engine.beams"}
    | {"engine.replicas", "engine.replica", "engine.launch", "engine.placement", "engine.routing"}
    | {"engine.door", "engine.joining", "engine.ray_backend"}
    | {"text", "checkpoint", "collector", "parent", "grammar"},
    "progress": EVERYBODY | {"engine.messages"},
    "frontend": EVERYBODY | {"engine", "assembly", "text", "checkpoint", "grammar"},
    "llm": EVERYBODY | {"engine", "assembly", "frontend", "outputs", "progress", "text"},
    "evaluate": EVERYBODY | {"checkpoint", "text", "model", "worker.device"},
    "quantize": EVERYBODY | {"checkpoint", "text", "ops", "quant", "model", "evaluate"},
    "quantize.recipe": EVERYBODY,
    "evaluate.corpus": EVERYBODY,
    "evaluate.report": EVERYBODY,
    "ray_nodes": EVERYBODY | {"parent", "cli"},
    "ray": EVERYBODY | {"llm"},
    "cli": {""},
    "__main__": {"cli"},
    "__init__": {"types", "outputs", "llm"},
}
# Rooms whose sources never name torch, at the top or in a function.
WITHOUT_TORCH = {
    *(
        "types",
        "flags",
        "speculation",
        "config",
        "machine",
        "wire",
        "outputs",
        "core",
        "checkpoint",
        "collector",
        "text",
        "engine",
        "grammar",
        "assembly",
        "progress",
        "frontend",
        "server",
        "llm",
        "cli",
    ),
    *("plan", "model.structure", "model.loader.headers", "model.loader.sizes"),
    *("model.spec", "model.stages", "model.families", "evaluate.corpus", "evaluate.report"),
    "quantize.recipe",
}


def modules() -> list[str]:
    paths = [p.relative_to(ROOT).with_suffix("") for p in sorted(ROOT.rglob("*.py"))]
    return [".".join(path.parts) for path in paths]


def imports(module: str) -> Iterator[tuple[str, int]]:
    """(absolute name, line) of every import in the module's source."""
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "octavo" or is_package(node.module):
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno
            else:
                yield node.module, node.lineno


def is_package(name: str) -> bool:
    return name.startswith("octavo.") and (ROOT.parent / name.replace(".", "/")).is_dir()


def within(name: str, room: str) -> bool:
    return room == "" or name == room or name.startswith(room + ".")


def room_of(module: str) -> str:
    """The longest room of the table that holds the module."""
    found = [room for room in MAY_IMPORT if within(module, room)]
    assert found, f"octavo/{module} belongs to no room of MAY_IMPORT"
    return max(found, key=len)


def breaches(module: str) -> list[str]:
    room = room_of(module)
    own = room.partition(".")[0]
    found = []
    for name, line in imports(module):
        if not name.startswith("octavo.") or name == "octavo.__version__":
            continue
        target = name.removeprefix("octavo.")
        allowed = within(target, own) or any(within(target, r) for r in MAY_IMPORT[room])
        if not allowed:
            found.append(f"octavo/{module}.py:{line}: {room} must not import {target}")
    return found


@pytest.mark.parametrize("module", modules())
def test_rooms_import_only_what_they_may(module: str) -> None:
    assert breaches(module) == []


@pytest.mark.parametrize("module", modules())
def test_torch_and_transformers_stay_where_they_belong(module: str) -> None:
    names = {name.partition(".")[0] for name, _ in imports(module)}
    assert "transformers" not in names
    if any(within(module, room) for room in WITHOUT_TORCH):
        assert "torch" not in names


def uses(module: str, attribute: str, owner: str) -> bool:
    """Whether the source says ``owner.attribute`` or imports it from ``owner``."""
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == attribute:
            value = node.value
            if isinstance(value, ast.Name) and value.id == owner:
                return True
        from_owner = isinstance(node, ast.ImportFrom) and node.module == owner
        if from_owner and any(alias.name == attribute for alias in node.names):
            return True
    return False


def test_only_config_reads_the_environment() -> None:
    readers = [
        module
        for module in modules()
        if any(uses(module, name, "os") for name in ("environ", "getenv", "environb"))
    ]
    assert readers == ["config"]


def test_only_parallel_uses_torch_distributed() -> None:
    users = [
        module
        for module in modules()
        if uses(module, "distributed", "torch")
        or any(within(name, "torch.distributed") for name, _ in imports(module))
    ]
    assert set(users) <= {"parallel"}


def test_packages_are_empty() -> None:
    files = [path for path in ROOT.rglob("__init__.py") if path != ROOT / "__init__.py"]
    assert [path for path in files if path.read_text().strip()] == []
    assert all((path.parent / "__init__.py").exists() for path in ROOT.rglob("*.py"))


def test_a_breach_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("core", "ops", "server"):
        monkeypatch.setattr(
            f"{__name__}.imports", lambda module: iter([("octavo.worker.runner", 1)])
        )
        assert breaches(f"{room}.x") != []
