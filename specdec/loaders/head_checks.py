"""Checks of draft heads: their token id maps, and whether a head is compatible with a target."""

import numpy as np

from specdec.families.config_values import CheckpointError
from specdec.families.head_matching import find_incompatibility
from specdec.loaders.checkpoint import Checkpoint
from specdec.model_config import HeadConfig, ModelConfig
from specdec.runtime.simd import Int64


def check_target_ids(ids: Int64, vocab_size: int, source: str) -> Int64:
    """Check that the token id map of a draft head holds valid ids of the target, each once, and return it unchanged.

    Args:
        ids: The target's token id for each row of the head's vocabulary, (n_rows,).
        vocab_size: The target's vocabulary size.
        source: Where the ids are stored, for errors.

    Raises:
        CheckpointError: An id is out of range or occurs twice.
    """
    if (wrong := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        row = wrong[0]
        raise CheckpointError(f"{source} maps row {row} to the id {ids[row]}; expected 0 to {vocab_size - 1}, the target's ids")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise CheckpointError(f"{source} maps {counts.max()} rows to the id {values[counts.argmax()]}; expected each id once")
    return ids


def check_id_map(head: HeadConfig, vocab_size: int, has_ids: bool, source: str) -> None:
    """Raise CheckpointError if a draft head has fewer token ids than its target and no map to the target's ids.

    Args:
        head: The head's config.
        vocab_size: The target's vocabulary size.
        has_ids: Whether the head's files hold an id map.
        source: The head's file, for errors.
    """
    if head.draft_vocab_size < vocab_size and not has_ids:
        raise CheckpointError(
            f"{source}: the head has {head.draft_vocab_size} of {vocab_size} ids, but no d2t tensor to map them to the target's"
        )


def check_compatibility(head: Checkpoint, target: ModelConfig) -> None:
    """Raise CheckpointError with the reason if a draft head cannot draft for the target with the given config."""
    if reason := find_incompatibility(head.config, target):
        raise CheckpointError(f"{head.path} is not compatible with the target: {reason}")


def is_compatible(head: ModelConfig, target: ModelConfig) -> bool:
    """Return whether a draft head can draft for a target, according to their configs."""
    return not find_incompatibility(head, target)
