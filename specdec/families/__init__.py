"""Families of models, a file each: what their files say, and where their tensors lie. A new one is a file here."""

from importlib import import_module
from pathlib import Path
from typing import Any

from specdec.families.family import HeadInFolder, InFolder, InGguf, Keys, Template

_FILES = sorted(Path(__file__).parent.glob("[a-z]*.py"))
_WAYS: list[Any] = [way for file in _FILES for way in getattr(import_module(f".{file.stem}", __name__), "FAMILY", ())]
FOLDERS = {way.model_type: way for way in _WAYS if isinstance(way, InFolder)}
HEADS = [way for way in _WAYS if isinstance(way, HeadInFolder)]
GGUFS = {way.architecture: way for way in _WAYS if isinstance(way, InGguf)}
TEMPLATES = {way.name: way for way in _WAYS if isinstance(way, Template)}

__all__ = ["FOLDERS", "GGUFS", "HEADS", "TEMPLATES", "HeadInFolder", "InFolder", "InGguf", "Keys"]
