"""Resolution of a model's name to a path, with a status line while it downloads."""

from collections.abc import Sequence
from pathlib import Path

from specdec.loaders.model_paths import find_local, resolve_path
from specdec.ui.progress import STATUS_DELAY_S, show_status


def find_model(name: str, candidates: Sequence[str] = ()) -> Path:
    """Return the path of a model, and download the model if it is not installed, with a status line meanwhile.

    Args:
        name: Path, alias or hub name of the model, as in `resolve_path`.
        candidates: Keywords that would be valid in place of a name, for suggestions.

    Raises:
        CheckpointError: The model is neither installed nor downloadable.
    """
    if not name or find_local(name):
        return resolve_path(name, candidates=candidates)
    with show_status(f"looking for {name}", STATUS_DELAY_S):
        return resolve_path(name, candidates=candidates)
