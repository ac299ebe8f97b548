"""Removal of a model's files: its own files on disk, or what the hub's cache holds of its repository."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from specdec.argument_checks import CheckpointError
from specdec.loaders.model_file import list_shards
from specdec.loaders.model_paths import BUNDLED_MODELS_DIR


def list_model_files(path: Path) -> list[Path]:
    """List the files and folders to delete in order to remove the model at a path, without deleting anything.

    They are a file and its shards, or a folder. In the hub's cache they are the repository's folder, or, if other GGUF files of
    the repository remain, the model's links and blobs.

    Raises:
        CheckpointError: The model is bundled with specdec.
    """
    if path.resolve().parent == BUNDLED_MODELS_DIR:
        raise CheckpointError(f"{path.name} is bundled with specdec and cannot be removed")
    if repository_dir := _find_repository_dir(path):
        shards = list_shards(path)
        if not path.is_file() or {*path.parent.rglob("*.gguf")} <= {*shards}:
            return [repository_dir]
        # Follow one link only: the library keeps blobs that repositories share in a separate store.
        return [*shards, *(link.parent / link.readlink() for link in shards if link.is_symlink())]
    return list_shards(path)


def compute_total_bytes(paths: Sequence[Path]) -> int:
    """Return the total size in bytes of files and folders on disk; a file that occurs twice, also by a link, counts once."""
    files = {file.resolve() for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    return sum(file.stat().st_size for file in files)


def delete_files(paths: Sequence[Path]) -> None:
    """Delete the given files and folders from the disk; a file that does not exist is skipped.

    Raises:
        CheckpointError: A file or folder cannot be deleted; the ones after it remain.
    """
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot remove {error.filename or path}: {error.strerror}") from None


def _find_repository_dir(path: Path) -> Path | None:
    """Return the repository folder in the hub's cache that contains a path; None if the path is not in the cache."""
    repository_dirs = (each for each in path.parents if each.name.startswith("models--") and (each / "snapshots").is_dir())
    return next(repository_dirs, None)
