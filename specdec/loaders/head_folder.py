"""Open the folder of a draft head as a `Checkpoint`, and find one inside or next to its model's folder."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from specdec.argument_checks import wrap_read_errors
from specdec.families import HF_HEADS, HFHead
from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import Checkpoint, DerivedTensor
from specdec.loaders.head_checks import check_id_map, check_target_ids
from specdec.loaders.hf_checkpoint import HFFolder, has_tied_embedding
from specdec.loaders.hf_config import CONFIG
from specdec.loaders.json_file import read_json_object
from specdec.loaders.safetensors import INDEX, PICKLE_WEIGHTS, WEIGHTS
from specdec.loaders.tensor_assembly import assemble_tensors
from specdec.runtime.simd import Int64


def reorder_rows(stored: Any, order: Int64) -> DerivedTensor:
    """Return a tensor with row order[i] of a stored matrix as row i; the first read reads and caches the whole matrix."""
    read_all = functools.cache(lambda: stored[:])
    return DerivedTensor(stored, stored.shape, stored.dtype, lambda first, last: read_all()[order[first:last]])


def detect_head(folder: Path) -> HFHead | None:
    """Return the kind of draft head that a folder's config.json describes; None if it describes no head or is missing.

    Raises:
        CheckpointError: The config.json cannot be read or is damaged.
    """
    with wrap_read_errors(folder, CheckpointError):
        if not (folder / CONFIG).exists():
            return None
    given = read_json_object(folder / CONFIG)
    return next((head for head in HF_HEADS if head.is_head_config(given)), None)


def load_adjacent_head(model: Path) -> Checkpoint | None:
    """Open the draft head in a folder inside or next to a model's folder as a `Checkpoint`; return None if there is none.

    Args:
        model: The model's folder; a file has no such head.

    Raises:
        CheckpointError: The head is damaged or not supported.
    """
    folder_path = model.absolute()
    for head in HF_HEADS:
        for folder in (
            (folder_path / head.folder_names[0], folder_path.with_name(head.folder_names[1].format(folder_path.name)))
            if head.folder_names
            else ()
        ):
            if model.is_dir() and detect_head(folder) is head:
                return load_checkpoint(folder, head)
    return None


def load_checkpoint(path: Path, head: HFHead) -> Checkpoint:
    """Open the folder of a draft head as a `Checkpoint`, after checking everything that its headers show.

    Args:
        path: The folder.
        head: The kind of head, from `detect_head`.

    Raises:
        CheckpointError: The head is not complete and consistent. Weights are checked when they are read.
    """
    with wrap_read_errors(path, CheckpointError):
        if (path / PICKLE_WEIGHTS).exists() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
            raise CheckpointError(
                f"{path} has its weights only in {PICKLE_WEIGHTS}, which may run code when it is read; write them to "
                f"{WEIGHTS}: "
                f"save_file(torch.load('{PICKLE_WEIGHTS}', weights_only=True), '{WEIGHTS}'), with save_file of safetensors.torch"
            )
    given, folder = read_json_object(path / CONFIG), HFFolder(path, head.prefix, head.ignored_names)
    config = head.parse_config(path / CONFIG, given, folder)
    if (problem := config.find_error()) or not config.head:
        raise CheckpointError(f"{path / CONFIG} does not describe a valid draft head: {problem}")
    id_map = head.get_id_map_name(config, folder)
    check_id_map(config.head, config.vocab_size, bool(id_map), f"{path / CONFIG}")
    specs, ids = {**head.get_tensor_specs(config, folder)}, None
    if config.shared_classifier and not has_tied_embedding(folder, specs, config):
        raise CheckpointError(f"{path} has a classifier that differs from the embedding, but its {CONFIG} ties them")
    tensors = assemble_tensors(config, specs, folder)
    if id_map:
        stored_ids = folder.read_integers(id_map, config.head.draft_vocab_size)
        ids = stored_ids + np.arange(len(stored_ids)) if head.has_id_offsets else stored_ids
        ids = check_target_ids(ids, config.vocab_size, folder.describe(id_map))
        tensors |= {name: reorder_rows(tensors[name], ids) for name in head.id_ordered_tensors}
    folder.ignore(head.list_unused(config))
    folder.check_all_used()
    return Checkpoint(path, config, tensors, target_ids=ids, family=config.architecture)
