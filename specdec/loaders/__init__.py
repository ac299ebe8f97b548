"""Readers of model files: each turns the bytes of one format into a config and tensors, and checks them."""

import os
from pathlib import Path

from specdec.argument_checks import wrap_read_errors
from specdec.families.config_values import CheckpointError, CheckpointWarning
from specdec.loaders import gguf_checkpoint, head_folder, hf_checkpoint, llama2c
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.gguf_checkpoint import read_vocabulary
from specdec.loaders.json_file import read_json_object, read_optional_json_object, write_text_atomically
from specdec.loaders.unsupported_formats import reject_unsupported_formats


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model or a draft head from a Hugging Face folder, a GGUF file or a llama2.c file as a `Checkpoint`.

    Weights are read later, when a tensor of the checkpoint is indexed. A GGUF file is recognized by its first bytes, whatever its
    name is. A llama2.c file holds a model, not a head.

    Raises:
        CheckpointError: The path holds no complete and consistent model.
    """
    path = Path(path)
    if _is_folder(path):
        head = head_folder.detect_head(path)
        return head_folder.load_checkpoint(path, head) if head else hf_checkpoint.load_checkpoint(path)
    if gguf_checkpoint.is_gguf(path):
        return gguf_checkpoint.load_checkpoint(path)
    if path.suffix != ".json":
        reject_unsupported_formats(path)
    if path.suffix in (".json", ".safetensors"):
        raise CheckpointError(f"{path} is one part of a model; name the folder that holds it and its config.json")
    return llama2c.load_checkpoint(path)


def is_head_folder(folder: Path) -> bool:
    """Return whether a folder's config.json describes a draft head; False without a config.json.

    Raises:
        CheckpointError: The config.json cannot be read or is damaged.
    """
    return head_folder.detect_head(folder) is not None


def is_llama2c_file(path: Path) -> bool:
    """Return whether a path is neither a folder nor a GGUF file, so that `load_checkpoint` can only read it as a llama2.c file.

    Raises:
        CheckpointError: The path cannot be read.
    """
    return not _is_folder(path) and not gguf_checkpoint.is_gguf(path)


def _is_folder(path: Path) -> bool:
    with wrap_read_errors(path, CheckpointError):
        return path.is_dir()


__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "is_head_folder",
    "is_llama2c_file",
    "load_checkpoint",
    "read_json_object",
    "read_optional_json_object",
    "read_vocabulary",
    "write_text_atomically",
]  # fmt: skip
