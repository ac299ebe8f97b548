"""The house: who may import whom, and what the fresh clone promises."""

import ast
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# each room and the rooms below it that it may know
MAY_IMPORT = {
    "__main__": {"specdec"},
    # the library's names, when asked for, and the command
    "specdec": {"command", "interrupts", "decoder", "decoding", "checkpoint", "tokenizer", "kernels"},
    "command": {"specdec", "interrupts", "bench", "panel", "decoder", "decoding", "files", "checkpoint", "tokenizer", "kernels"},
    "decoder": {"decoding", "files", "checkpoint", "packing", "tokenizer", "kernels", "checks"},
    "files": {"checkpoint", "tokenizer"},
    "bench": {"kernels", "packing"},
    "panel": {"decoding", "interrupts", "tokenizer"},
    "interrupts": set(),
    "decoding": {"kernels", "tokenizer", "checks"},
    "checkpoint": {"kernels", "packing"},
    "packing": {"kernels"},
    "tokenizer": {"checks"},
    "kernels": {"checks", "machine.cache"},
    "checks": set(),
    "machine.cache": set(),
}
OUTSIDE = {
    "__main__": set(),
    "specdec": set(),
    "command": {"typer", "rich"},
    "decoder": set(),
    "files": set(),
    "bench": {"numba", "numpy", "rich"},
    "panel": {"rich"},
    "interrupts": set(),
    "decoding": {"numpy"},
    "checkpoint": {"numpy"},
    "packing": {"numpy"},
    "tokenizer": set(),
    "kernels": {"numba", "numpy", "llvmlite"},  # llvmlite is numba's own
    "checks": set(),
    "machine.cache": {"numba"},
}


def modules() -> dict[str, Path]:
    """The product's files, by module."""
    folders = [ROOT, ROOT / "machine"]
    paths = [path.relative_to(ROOT) for folder in folders for path in folder.glob("*.py")]
    return {".".join(path.with_suffix("").parts): ROOT / path for path in paths}


def imports(room: str) -> tuple[set[str], set[str]]:
    """The rooms and the packages that a room imports, wherever in its file."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(ROOT.joinpath(*room.split(".")).with_suffix(".py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            inside |= {alias.name if (ROOT / f"{alias.name}.py").exists() else "specdec" for alias in node.names}
    if "specdec" in outside:
        inside.add("specdec")
    return inside, outside - set(sys.stdlib_module_names) - {"specdec"}


def test_imports_point_one_way():
    for room, below in MAY_IMPORT.items():
        inside, _ = imports(room)
        assert inside - {room} <= below, f"{room} imports {inside - below}"


def test_every_module_is_a_room_of_the_house():
    assert {name.removesuffix(".__init__") for name in modules()} - {"machine"} == set(MAY_IMPORT)


def test_each_room_uses_only_the_packages_it_needs():
    for room, packages in OUTSIDE.items():
        _, outside = imports(room)
        assert outside <= packages, f"{room} imports {outside - packages}"


def test_an_installation_puts_one_package_on_the_path():
    """Hugging Face publishes a top-level package `kernels`; nothing of ours may lie where it is looked for."""
    try:
        files = metadata.files("specdec") or []
    except metadata.PackageNotFoundError:
        pytest.skip("specdec is not installed")
    tops = {file.parts[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info") and top != ".."} == {"specdec"}
