"""The files of a model that is there go: of one in models/ its own, of one on the hub what the cache holds of it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from specdec.families.config_values import CheckpointError
from specdec.loaders.gguf_shards import parts_of
from specdec.loaders.model_lookup import MODELS


def files_of(path: Path) -> list[Path]:
    """What goes with a model at that path: a file with its other parts, a folder, or all that the cache has of a repository.

    Raises CheckpointError for one that comes along.
    """
    if path.resolve().parent == MODELS:
        raise CheckpointError(f"{path.name} comes along with specdec, and stays")
    if storage := _storage_of(path):
        alike = _parts(path)
        if not path.is_file() or {*path.parent.rglob("*.gguf")} <= {*alike}:
            return [storage]
        # One step of the links only: the library keeps blobs that repositories share in a store of their own.
        return [*alike, *(link.parent / link.readlink() for link in alike if link.is_symlink())]
    return _parts(path)


def size_of(paths: Sequence[Path]) -> int:
    """Bytes, each once."""
    files = {file.resolve() for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    return sum(file.stat().st_size for file in files)


def remove(paths: Sequence[Path]) -> None:
    """Raises CheckpointError for what cannot be removed."""
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot remove {error.filename or path}: {error.strerror}") from None


def _storage_of(path: Path) -> Path | None:
    """The cache's folder of the repository that a path is of; None for one that lies elsewhere."""
    storages = (each for each in path.parents if each.name.startswith("models--") and (each / "snapshots").is_dir())
    return next(storages, None)


def _parts(path: Path) -> list[Path]:
    """A model's files: a folder, or a file and the others that it is split into."""
    others = (path.with_name(name) for name in parts_of(path.name))
    return [path] if path.is_dir() else [other for other in others if other == path or other.is_file()]
