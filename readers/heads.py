"""Heads that draft for a model: which rows say which ids, and whether one fits a target. Knows no format."""

import numpy as np

from ..architectures import Config
from ..architectures.assistant import AssistantConfig, sources
from ..architectures.config import HeadConfig
from ..families.eagle3 import MADE_FOR, are_layers, family_like
from ..families.values import CheckpointError, shown
from ..machine.vectors import Int64
from .model_file import Checkpoint


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


def misfit(config: Config, target: Config) -> str:
    """What keeps a head from drafting for a target, in words; empty where nothing does."""
    head, n_layers = config.head, target.n_layers
    if not head:
        return "it is no head"
    if head.target_dim != target.dim:
        return f"it takes states of {head.target_dim} numbers; the target's have {target.dim}"
    if isinstance(head, AssistantConfig):
        return _misfit_of_caches(config, target)
    layers = head.layers_of(n_layers)
    if not are_layers(layers) or max(layers) > n_layers:
        return f"it takes the states before the layers {', '.join(map(str, layers))}; the target has {n_layers} layers"
    if config.vocab_size != target.vocab_size:
        return f"it is for {config.vocab_size} ids; the target has {target.vocab_size}"
    family = family_like(target)
    if MADE_FOR.get(head.made_for, family) != family:
        return f"it was made for a {shown(head.made_for)}; the target is like {family}"
    return ""


def _misfit_of_caches(config: Config, target: Config) -> str:
    """The same of an assistant, which takes the target's keys and values."""
    if config.vocab_size != target.vocab_size:
        return f"it is for {config.vocab_size} ids; the target has {target.vocab_size}"
    try:
        sources(config, target)
    except ValueError as error:
        return str(error)
    return ""
