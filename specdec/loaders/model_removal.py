"""Removal of a model's files: its own files on disk, or what the hub's cache holds of its repository."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from specdec.families.config_values import CheckpointError
from specdec.loaders.gguf_shard_names import list_shard_names
from specdec.loaders.model_paths import BUNDLED_MODELS_DIR


def list_model_files(path: Path) -> list[Path]:
    """List what to delete with the model at a path: a file and its shards, a folder, or its files in the hub's cache.

    Raises:
        CheckpointError: The model is bundled with specdec.
    """
    if path.resolve().parent == BUNDLED_MODELS_DIR:
        raise CheckpointError(f"{path.name} is bundled with specdec and cannot be removed")
    if repository_dir := _find_repository_dir(path):
        shards = _list_shards(path)
        if not path.is_file() or {*path.parent.rglob("*.gguf")} <= {*shards}:
            return [repository_dir]
        # Follow one link only: the library keeps blobs that repositories share in a separate store.
        return [*shards, *(link.parent / link.readlink() for link in shards if link.is_symlink())]
    return _list_shards(path)


def compute_total_bytes(paths: Sequence[Path]) -> int:
    """Return the bytes of files and folders; each file counts once."""
    files = {file.resolve() for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    return sum(file.stat().st_size for file in files)


def delete_files(paths: Sequence[Path]) -> None:
    """Delete files and folders. Raises CheckpointError for one that cannot be deleted."""
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot remove {error.filename or path}: {error.strerror}") from None


def _find_repository_dir(path: Path) -> Path | None:
    """Return the cache's folder of the repository that a path belongs to, or None."""
    repository_dirs = (each for each in path.parents if each.name.startswith("models--") and (each / "snapshots").is_dir())
    return next(repository_dirs, None)


def _list_shards(path: Path) -> list[Path]:
    """List a model's files: a folder, or a file and its shards."""
    others = (path.with_name(name) for name in list_shard_names(path.name))
    return [path] if path.is_dir() else [other for other in others if other == path or other.is_file()]
