"""Readers of model files: each turns the bytes of one format into a config and tensors, and checks them.

Only the reader of a file's own format is imported.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from specdec.argument_checks import CheckpointError, CheckpointWarning, JSONDict, count_common_prefix, wrap_read_errors
from specdec.families import detect_head
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.model_file import (
    CONFIG,
    is_gguf,
    read_json_object,
    read_optional_json_object,
    reject_unsupported_formats,
    write_text_atomically,
)
from specdec.model_config import ASSISTANT, ModelConfig

MTP_PREFIX = "mtp-"  # of the name of a GGUF file that holds an MTP head alone, as llama.cpp's converter names it
ADJACENT_NAME = "assistant"  # of a head's folder in a model's folder; one next to it is named like the model and this


def import_reader(name: str) -> Any:
    """Import the module of this folder that reads one format, and return it: "hf_checkpoint", "gguf_checkpoint" and others."""
    return import_module(f"{__name__}.{name}")


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model or a draft head from a Hugging Face folder, a GGUF file or a llama2.c file as a `Checkpoint`.

    Weights are read later, when a tensor of the checkpoint is indexed. A GGUF file is recognized by its first bytes, whatever its
    name is. A llama2.c file holds a model, not a head.

    Raises:
        CheckpointError: The path holds no complete and consistent model.
    """
    path = Path(path)
    if _is_folder(path):
        reader = "head_checkpoint" if is_head_folder(path) else "hf_checkpoint"
    elif is_gguf(path):
        reader = "gguf_checkpoint"
    else:
        reader = "llama2c"
        if path.suffix != ".json":
            reject_unsupported_formats(path)
        if path.suffix in (".json", ".safetensors"):
            raise CheckpointError(f"{path} is one part of a model; name the folder that holds it and its config.json")
    return cast(Checkpoint, import_reader(reader).load_checkpoint(path))


def is_head_folder(folder: Path) -> bool:
    """Return whether a folder's config.json describes a draft head; False without a config.json.

    Raises:
        CheckpointError: The config.json cannot be read or is damaged.
    """
    return _detect_head(folder) != ""


def is_llama2c_file(path: Path) -> bool:
    """Return whether a path is neither a folder nor a GGUF file, so that `load_checkpoint` can only read it as a llama2.c file.

    Raises:
        CheckpointError: The path cannot be read.
    """
    return not _is_folder(path) and not is_gguf(path)


def _detect_head(folder: Path) -> str:
    with wrap_read_errors(folder, CheckpointError):
        has_config = (folder / CONFIG).exists()
    return detect_head(read_json_object(folder / CONFIG)) if has_config else ""


def _is_folder(path: Path) -> bool:
    with wrap_read_errors(path, CheckpointError):
        return path.is_dir()


def read_vocabulary(path: Path) -> JSONDict:
    """Return the tokenizer's metadata in a GGUF file, by key without the prefix tokenizer.ggml; {} for a file that is not GGUF.

    Raises:
        CheckpointError: The file cannot be read or is damaged.
    """
    return cast(JSONDict, import_reader("gguf_checkpoint").read_vocabulary(path)) if is_gguf(path) else {}


def load_builtin_head(target: Checkpoint) -> Checkpoint | None:
    """Open the draft head that a target model comes with as a `Checkpoint`; return None if there is none.

    It is the MTP head in the target's own files, else one in a GGUF file next to the target's (`mtp-*.gguf`), or a head in a
    folder inside or next to the target's folder.

    Raises:
        CheckpointError: The head is damaged, not supported, or belongs to another target.
    """
    if target.mtp_specs and (head := import_reader("head_checkpoint").load_mtp_head(target)):
        return cast(Checkpoint, head)
    path = target.path.absolute()
    if not path.is_dir():
        heads = [load_checkpoint(each) for each in _list_mtp_files(path)] if target.mtp_specs else []
        return next((head for head in heads if head.config.head and not _find_incompatibility(head, target.config)), None)
    for folder in (path / ADJACENT_NAME, path.with_name(f"{path.name}-{ADJACENT_NAME}")):
        if _detect_head(folder) == ASSISTANT:
            head = load_checkpoint(folder)
            check_compatibility(head, target.config)
            return head
    return None


def _list_mtp_files(target: Path) -> list[Path]:
    """Return the files next to a target that by their names hold MTP heads, those with the most similar names first."""
    paths = sorted(target.parent.glob(f"{MTP_PREFIX}*.gguf"))
    return sorted(paths, key=lambda path: -count_common_prefix(path.name.removeprefix(MTP_PREFIX), target.name, len(target.name)))


def _find_incompatibility(head: Checkpoint, target: ModelConfig) -> str:
    return cast(str, import_reader("head_checkpoint").find_incompatibility(head.config, target))


def check_compatibility(head: Checkpoint, target: ModelConfig) -> None:
    """Raise CheckpointError with the reason if a draft head cannot draft for the target with the given config."""
    if reason := _find_incompatibility(head, target):
        raise CheckpointError(f"{head.path} is not compatible with the target: {reason}")


__all__ = [
    "Checkpoint", "CheckpointError", "CheckpointWarning", "check_compatibility", "is_head_folder", "is_llama2c_file",
    "load_builtin_head", "load_checkpoint", "read_json_object", "read_optional_json_object", "read_vocabulary",
    "write_text_atomically",
]  # fmt: skip
