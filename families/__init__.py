"""Families of models, a file each: what their files say, and where their tensors lie. A new one is a file here."""

from importlib import import_module
from pathlib import Path

from .family import Family, HeadInFolder, InFolder, InGguf, Keys

_MODULES = [import_module(f".{path.stem}", __name__) for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))]
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _MODULES if hasattr(module, "FAMILY"))
FOLDERS = {each.model_type: each for family in FAMILIES for each in family.folders}
HEADS = [each for family in FAMILIES for each in family.heads]
GGUFS = {each.architecture: each for family in FAMILIES for each in family.ggufs}
TEMPLATES = {name: template for family in FAMILIES for name, template in family.templates.items()}

__all__ = ["FAMILIES", "FOLDERS", "GGUFS", "HEADS", "TEMPLATES", "Family", "HeadInFolder", "InFolder", "InGguf", "Keys"]
