"""The modules of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specdec"


def modules() -> dict[str, Path]:
    """Return the files of the package by module name without "specdec."; a folder's __init__ has the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        found[name or "specdec"] = path
    return found


MODULES = modules()


def get_folder(module: str) -> str:
    return module.split(".")[0]
