"""A name becomes a model: found, read and packed. Knows nothing of drafts."""

import os
from collections.abc import Callable

from ..architectures import architecture_of
from ..checks import file_name
from ..transformer import KV, Transformer
from ..weights import INT8, Kind
from . import Checkpoint, CheckpointError, load_checkpoint
from .files import find

Progress = Callable[[str, float], None]  # is told the name of a model and the share of it that is loaded


def tell_nobody(name: str, share: float) -> None:
    """Of a `Progress` that nobody watches."""


def load_model(
    path: str | os.PathLike[str],
    int8: bool = False,
    n_threads: int | None = None,
    n_positions: int | None = None,
    kv: KV = "auto",
) -> Transformer:
    """The model of a path or a name; int8: whether its weights become int8 where they are floats; all else as `Transformer` says.

    Raises CheckpointError.
    """
    return loaded(opened("path", path), INT8 if int8 else None, n_threads, n_positions, tell_nobody, kv)


def opened(parameter: str, name: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of that path or name."""
    return load_checkpoint(find(file_name(parameter, name)))


def loaded(
    checkpoint: Checkpoint, kind: Kind | None, n_threads: int | None, n_positions: int | None, progress: Progress, kv: KV
) -> Transformer:
    """The model in a checkpoint."""
    name = checkpoint.path.name
    try:
        weights = architecture_of(checkpoint.config).pack(
            checkpoint.config, checkpoint.tensors, kind, lambda share: progress(name, share)
        )
    except MemoryError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit: {error or 'there is no memory for its weights'}") from None
    return Transformer(checkpoint.config, weights, n_threads, n_positions, kv)
