"""The head that a model brings along: in its own files, or in a folder beside them. Knows no format."""

from contextlib import suppress

from specdec.families.config_values import CheckpointError
from specdec.loaders import head_folder, mtp
from specdec.loaders.checkpoint import Checkpoint
from specdec.loaders.head_compatibility import check_fit


def own_head(target: Checkpoint) -> Checkpoint | None:
    """None where there is none. Raises CheckpointError for one that is damaged, not done here, or of another target."""
    if head := mtp.head_of(target):
        return head
    if head := head_folder.beside(target.path):
        check_fit(head, target.config)
    return head


def has_own_head(target: Checkpoint) -> bool:
    """Whether there is one that can be read."""
    with suppress(CheckpointError):
        return own_head(target) is not None
    return False
