"""A model's file: bytes that are read when they are asked for, and the errors of files. Knows no format."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..architectures import Config
from ..machine.memory import all_finite
from ..machine.vectors import Float32

FLOAT_BYTES = 4
Bytes = npt.NDArray[np.uint8]


class CheckpointError(ValueError):
    """A file that cannot be used as a model: one line with the file, what is wrong and what would be right."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies in its file.

    config: its numbers; tensors: by the names and in the shapes of its architecture. What is asked of a tensor is read then.
    """

    path: Path
    config: Config
    tensors: Mapping[str, Any]


class ModelFile:
    """A file of which parts are read. Not mapped: whoever truncates a mapped file kills those who look at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with telling_os_errors(path):
            if path.is_dir():
                raise CheckpointError(f"{path} is a directory; expected a model file")
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is no regular file; expected a model file")
            self._identity = _identity(path.stat())
            self.size = path.stat().st_size

    def read(self, start: int, n_bytes: int) -> Bytes:
        """That part of the file. Raises CheckpointError where it is not the file any more that it was."""
        data = np.empty(n_bytes, np.uint8)
        done = 0
        with telling_os_errors(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < n_bytes and (n := file.readinto(data.data[done:])):
                done += n
            identity = _identity(os.fstat(file.fileno()))
        if done < n_bytes or identity != self._identity:
            raise CheckpointError(f"{self.path} has changed while it was read; try again when it is whole")
        return data


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor of floats that lies in a file. [layer] is the part of a layer; [first:last], rows or numbers, is read, an array.

    what: its numbers are, for people. Raises CheckpointError for such as are not finite.
    """

    file: ModelFile
    name: str
    shape: tuple[int, ...]
    start: int
    what: str = "weights"

    def __getitem__(self, index: int | slice) -> Any:
        inner = self.shape[1:]
        stride = math.prod(inner) * FLOAT_BYTES
        if isinstance(index, int):
            return replace(self, shape=inner, start=self.start + index * stride)
        first, last, _ = index.indices(self.shape[0])
        data = self.file.read(self.start + first * stride, (last - first) * stride)
        numbers: Float32 = data.view("<f4").reshape(last - first, *inner)
        if not all_finite(numbers):
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds NaN or infinite {self.what}")
        return numbers


@contextmanager
def telling_os_errors(path: Path) -> Iterator[None]:
    """What the system says of a file, as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read {path}: {reason}") from None
