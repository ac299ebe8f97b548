"""Readers, a room for each format: bytes of files to a config and tensors, and every check of them."""

import os
from pathlib import Path

from specdec.families.config_values import CheckpointError, CheckpointWarning
from specdec.loaders import gguf, head_folder, hf_folder, llama2c
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.format_sniffing import refuse_strangers
from specdec.loaders.gguf import read_vocabulary
from specdec.loaders.json_file import object_if_there, read_object, replace_text
from specdec.validation import reading


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The model, or a head, of a Hugging Face folder or a GGUF file whatever its name, or the model of a llama2.c file.

    Raises CheckpointError.
    """
    path = Path(path)
    if _is_folder(path):
        head = head_folder.head_of(path)
        return head_folder.load_checkpoint(path, head) if head else hf_folder.load_checkpoint(path)
    if gguf.is_gguf(path):
        return gguf.load_checkpoint(path)
    if path.suffix != ".json":
        refuse_strangers(path)
    if path.suffix in (".json", ".safetensors"):
        raise CheckpointError(f"{path} is a part of a model; name the folder that holds it and its config.json")
    return llama2c.load_checkpoint(path)


def is_head(folder: Path) -> bool:
    """Whether a folder's config.json is that of a head. Raises CheckpointError for one that is damaged."""
    return head_folder.head_of(folder) is not None


def is_llama2c(path: Path) -> bool:
    """Whether that is read as a llama2.c file. Raises CheckpointError."""
    return not _is_folder(path) and not gguf.is_gguf(path)


def _is_folder(path: Path) -> bool:
    with reading(path, CheckpointError):
        return path.is_dir()


__all__ = [
    "Checkpoint", "CheckpointError", "CheckpointWarning", "is_head", "is_llama2c", "load_checkpoint", "object_if_there",
    "read_object", "read_vocabulary", "replace_text",
]  # fmt: skip
