"""The folder of a head that drafts, to a `Checkpoint`; and where one lies beside its model. Knows no head."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from specdec.families import HEADS, HeadInFolder
from specdec.families.config_values import CheckpointError
from specdec.loaders.checkpoint import Checkpoint, Derived
from specdec.loaders.head_compatibility import check_rows, checked_ids
from specdec.loaders.hf_config import CONFIG
from specdec.loaders.hf_folder import Folder, is_tied
from specdec.loaders.json_file import read_object
from specdec.loaders.safetensors import INDEX, PICKLE, WEIGHTS
from specdec.loaders.tensor_assembly import tensors_of
from specdec.runtime.simd import Int64
from specdec.validation import reading


def ordered(stored: Any, order: Int64) -> Derived:
    """A matrix whose rows are those of a stored one in another order."""
    whole = functools.cache(lambda: stored[:])
    return Derived(stored, stored.shape, stored.dtype, lambda first, last: whole()[order[first:last]])


def head_of(folder: Path) -> HeadInFolder | None:
    """Which head a folder's config.json is that of, if of any. Raises CheckpointError for one that is damaged."""
    with reading(folder, CheckpointError):
        if not (folder / CONFIG).exists():
            return None
    given = read_object(folder / CONFIG)
    return next((head for head in HEADS if head.is_one(given)), None)


def beside(model: Path) -> Checkpoint | None:
    """The head in a model's folder, or in one beside that; None where there is none. Raises CheckpointError."""
    whole = model.absolute()
    for head in HEADS:
        for folder in (whole / head.beside[0], whole.with_name(head.beside[1].format(whole.name))) if head.beside else ():
            if model.is_dir() and head_of(folder) is head:
                return load_checkpoint(folder, head)
    return None


def load_checkpoint(path: Path, head: HeadInFolder) -> Checkpoint:
    """Open a head's folder, after checking all that its headers can tell.

    Raises CheckpointError for anything but a complete and consistent head; numbers are checked when they are read.
    """
    with reading(path, CheckpointError):
        if (path / PICKLE).exists() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
            raise CheckpointError(
                f"{path} holds its weights in {PICKLE} alone, which may run code when it is read; write them to {WEIGHTS}: "
                f"save_file(torch.load('{PICKLE}', weights_only=True), '{WEIGHTS}'), with save_file of safetensors.torch"
            )
    given, folder = read_object(path / CONFIG), Folder(path, head.prefix, head.harmless)
    config = head.config(path / CONFIG, given, folder)
    if (flaw := config.flaw()) or not config.head:
        raise CheckpointError(f"{path / CONFIG} describes no head: {flaw}")
    told = head.ids(config, folder)
    check_rows(config.head, config.vocab_size, bool(told), f"{path / CONFIG}")
    places, ids = {**head.places(config, folder)}, None
    if config.shared_classifier and not is_tied(folder, places, config):
        raise CheckpointError(f"{path} holds a classifier that is not the embedding, as which {CONFIG} says that it is saved")
    tensors = tensors_of(config, places, folder)
    if told:
        numbers = folder.integers(told, config.head.n_rows)
        ids = numbers + np.arange(len(numbers)) if head.are_offsets else numbers
        ids = checked_ids(ids, config.vocab_size, folder.told(told))
        tensors |= {name: ordered(tensors[name], ids) for name in head.in_order}
    folder.leave_out(head.unused(config))
    folder.check_all_used()
    return Checkpoint(path, config, tensors, target_ids=ids, family=config.architecture)
