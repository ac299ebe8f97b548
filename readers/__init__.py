"""Readers, a room for each format: bytes of files to a config and tensors, and every check of them."""

import os
from pathlib import Path

from . import huggingface, llama2c
from .model_file import Checkpoint, CheckpointError, telling_os_errors


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The model of a Hugging Face folder, or of a llama2.c file. Raises CheckpointError."""
    path = Path(path)
    with telling_os_errors(path):
        is_folder = path.is_dir()
    if not is_folder and path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is a part of a model; name the folder that holds it and its config.json")
    if not is_folder and path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} is a GGUF file, which is not read; expected a Hugging Face folder or a llama2.c checkpoint"
        )
    return huggingface.load_checkpoint(path) if is_folder else llama2c.load_checkpoint(path)


__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
