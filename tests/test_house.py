"""The house: who may import whom, and what the fresh clone promises."""

import ast
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# each room and the rooms below it that it may know
MAY_IMPORT = {
    "specdec": {"bench", "panel", "decoding", "checkpoint", "packing", "tokenizer", "kernels"},
    "bench": {"kernels", "packing"},
    "panel": {"decoding", "tokenizer"},
    "decoding": {"kernels", "tokenizer"},
    "checkpoint": {"kernels", "packing"},
    "packing": {"kernels"},
    "tokenizer": set(),
    "kernels": set(),
}
OUTSIDE = {
    "specdec": {"typer", "rich"},
    "bench": {"numba", "numpy", "rich"},
    "panel": {"rich"},
    "decoding": {"numpy"},
    "checkpoint": {"numpy"},
    "packing": {"numpy"},
    "tokenizer": set(),
    "kernels": {"numba", "numpy", "llvmlite"},  # llvmlite is numba's own
}


def imports(room: str) -> list[str]:
    tree = ast.parse((ROOT / f"{room}.py").read_text(encoding="utf-8"))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [f"specdec.{alias.name}" for alias in node.names] if module == "specdec" else [module]
    return names


def test_imports_point_one_way():
    for room, below in MAY_IMPORT.items():
        inside = {name.split(".")[1] for name in imports(room) if name.startswith("specdec.")}
        assert inside <= below, f"{room} imports {inside - below}"


def test_every_module_is_a_room_of_the_house():
    assert {path.stem for path in ROOT.glob("*.py")} == set(MAY_IMPORT)


def test_each_room_uses_only_the_packages_it_needs():
    for room, packages in OUTSIDE.items():
        outside = {name.split(".")[0] for name in imports(room)} - set(sys.stdlib_module_names) - {"specdec"}
        assert outside <= packages, f"{room} imports {outside - packages}"


def test_an_installation_puts_one_package_on_the_path():
    """Hugging Face publishes a top-level package `kernels`; nothing of ours may lie where it is looked for."""
    try:
        files = metadata.files("specdec") or []
    except metadata.PackageNotFoundError:
        pytest.skip("specdec is not installed")
    tops = {file.parts[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info") and top != ".."} == {"specdec"}
