"""Heads that draft for a model: which rows say which ids, and whether one fits a target. Knows no format."""

import numpy as np

from specdec.config import Config, HeadConfig
from specdec.families.config_values import CheckpointError
from specdec.families.head_compatibility import misfit
from specdec.loaders.checkpoint import Checkpoint
from specdec.runtime.simd import Int64


def checked_ids(ids: Int64, vocab_size: int, told: str) -> Int64:
    """The target's id of each row; told: where they lie. Raises CheckpointError for ids that there are not, and for one twice."""
    if (wrong := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        row = wrong[0]
        raise CheckpointError(f"{told} says the id {ids[row]} for row {row}; expected 0 to {vocab_size - 1}, the target's ids")
    kinds, counts = np.unique(ids, return_counts=True)
    if len(kinds) < len(ids):
        raise CheckpointError(f"{told} says the id {kinds[counts.argmax()]} for {counts.max()} rows; expected each id once")
    return ids


def check_rows(head: HeadConfig, vocab_size: int, has_ids: bool, told: str) -> None:
    """Raises CheckpointError for a head of some of the ids that does not say which; told: the file."""
    if head.n_rows < vocab_size and not has_ids:
        raise CheckpointError(f"{told}: the head says {head.n_rows} of {vocab_size} ids, and has no d2t, which would say which")


def check_fit(head: Checkpoint, target: Config) -> None:
    """Raises CheckpointError, which says in one line what keeps a head from drafting for that target."""
    if flaw := misfit(head.config, target):
        raise CheckpointError(f"{head.path} does not fit the target: {flaw}")


def fits(head: Config, target: Config) -> bool:
    """Whether nothing keeps a head from drafting for that target."""
    return not misfit(head, target)
