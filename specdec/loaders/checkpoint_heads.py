"""The draft head that a model comes with: in its own files, or in a folder inside or next to its folder."""

from contextlib import suppress

from specdec.families.config_values import CheckpointError
from specdec.loaders import head_folder, mtp
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.head_checks import check_compatibility


def load_builtin_head(target: Checkpoint) -> Checkpoint | None:
    """Open the draft head that a target model comes with as a `Checkpoint`; return None if there is none.

    It is the MTP head in the target's own files, else a head in a folder inside or next to the target's folder.

    Raises:
        CheckpointError: The head is damaged, not supported, or belongs to another target.
    """
    if head := mtp.load_mtp_head(target):
        return head
    if head := head_folder.load_adjacent_head(target.path):
        check_compatibility(head, target.config)
    return head


def has_builtin_head(target: Checkpoint) -> bool:
    """Return whether a target model comes with a draft head that can be read and fits the target."""
    with suppress(CheckpointError):
        return load_builtin_head(target) is not None
    return False
