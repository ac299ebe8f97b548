"""A name becomes a file or folder, behind a line of the terminal that shows the download if there is one."""

from collections.abc import Sequence
from pathlib import Path

from specdec.loaders.model_lookup import find, here
from specdec.ui.progress import QUIET_SECONDS, loading


def find_model(name: str, words: Sequence[str] = ()) -> Path:
    """Return where a model is, downloaded if need be.

    Args:
        name: As in `find`.
        words: What could have been given in the place of a name.

    Raises:
        CheckpointError: There is no such model here, and it cannot be downloaded.
    """
    if not name or here(name):
        return find(name, words=words)
    with loading(f"looking for {name}", QUIET_SECONDS):
        return find(name, words=words)
