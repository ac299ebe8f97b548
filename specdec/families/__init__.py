"""Model families, one file each: how to read their configs and how their tensors are stored. Add a file for a new family."""

from importlib import import_module
from pathlib import Path
from typing import Any

from specdec.families.family import GGUFFamily, GGUFMetadata, HFFamily, HFHead, NamedChatTemplate

_FILES = sorted(Path(__file__).parent.glob("[a-z]*.py"))
_DEFINITIONS: list[Any] = [each for file in _FILES for each in getattr(import_module(f".{file.stem}", __name__), "FAMILY", ())]
HF_FAMILIES = {each.model_type: each for each in _DEFINITIONS if isinstance(each, HFFamily)}
HF_HEADS = [each for each in _DEFINITIONS if isinstance(each, HFHead)]
GGUF_FAMILIES = {each.architecture: each for each in _DEFINITIONS if isinstance(each, GGUFFamily)}
CHAT_TEMPLATES = {each.name: each for each in _DEFINITIONS if isinstance(each, NamedChatTemplate)}

__all__ = ["CHAT_TEMPLATES", "GGUF_FAMILIES", "HF_FAMILIES", "HF_HEADS", "GGUFFamily", "GGUFMetadata", "HFFamily", "HFHead"]
