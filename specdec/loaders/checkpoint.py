"""A model's file: bytes that are read when they are asked for, and the errors of files. Knows no format."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.config import Config
from specdec.families.config_values import CheckpointError
from specdec.families.tensor_specs import Place
from specdec.runtime.memory import all_finite
from specdec.runtime.simd import Int64
from specdec.validation import reading

FP32, FP16, BF16 = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2")  # of bf16 the bits: numpy has no such numbers
FLOATS: dict[str, np.dtype[Any]] = {"F32": FP32, "F16": FP16, "BF16": BF16}  # by the names that files give them
BYTE = np.dtype("u1")  # of blocks, which are no numbers yet
PIECE_BYTES = 1 << 26  # read at once: between two reads Ctrl-C is heard
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Checkpoint:
    """A model as it lies in its file.

    path: a file or a folder; config: its numbers; tensors: by the names and in the shapes of its architecture. What is asked of
    a tensor is read then. end_marks: names of the ids that end a text, bos: the id that begins one, where the files tell.
    vocabulary: the keys of the tokenizer that lies in the same file; chat_template: that of conversations, where it does.
    target_ids: of a head's rows (n_rows,), the target's ids, each once; None: row i is id i. A head has no tokenizer.
    family: what the file calls what the model is, where it does. sampling: what it is to be drawn with by its makers, by the
    names of `sampling.Sampling`, as far as the files tell. mtp: where the tensors of the head lie that they may bring along.
    pooling: which hidden states are a text's embedding: "mean", "last", "cls" (the first), or "" where the files do not tell.
    """

    path: Path
    config: Config
    tensors: Mapping[str, Any]
    end_marks: dict[int, str] = field(default_factory=dict)
    bos: int | None = None
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    target_ids: Int64 | None = None
    family: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    mtp: Sequence[Mapping[str, Place]] = ()
    pooling: str = ""


ADVISED = {  # from what on, and up to what
    "temperature": (0, 100.0), "top_p": (0, 1.0), "top_k": (0, 1e9), "min_p": (0, 1.0), "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (0, 100.0), "frequency_penalty": (0, 100.0),
}  # fmt: skip


def advised(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Numbers of sampling, by ours of names, under which values have them; what is none is left out: no text depends on it."""
    found = ((ours, values.get(key)) for ours, key in names.items())
    return {
        name: value
        for name, value in found
        if isinstance(value, int | float) and not isinstance(value, bool) and ADVISED[name][0] <= value <= ADVISED[name][1]
    }


class ModelFile:
    """A file of which parts are read. Not mapped: whoever truncates a mapped file kills those who look at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, CheckpointError, "a model file"):
            self._identity = _identity(path.stat())
            self.size = path.stat().st_size

    def read(self, start: int, n_bytes: int) -> Bytes:
        """That part of the file. Raises CheckpointError where it is not the file any more that it was."""
        return self.read_runs(start, 1, n_bytes, n_bytes).reshape(-1)

    def read_runs(self, start: int, n: int, n_bytes: int, stride: int) -> Bytes:
        """(n, n_bytes): so many runs, one every stride bytes. Raises CheckpointError as `read`."""
        runs = np.empty((n, n_bytes), np.uint8)
        with reading(self.path, CheckpointError), self.path.open("rb", buffering=0) as file:
            parts = runs.reshape(1, -1) if n_bytes == stride else runs
            is_whole = all(_fill(file, start + i * stride, part) for i, part in enumerate(parts))
            identity = _identity(os.fstat(file.fileno()))
        if not is_whole or identity != self._identity:
            raise CheckpointError(f"{self.path} has changed while it was read; try again when it is whole")
        return runs


def _fill(file: FileIO, start: int, data: Bytes) -> bool:
    """Whether the file has so many bytes there; they are read into data."""
    file.seek(start)
    done = 0
    while done < data.size and (n := file.readinto(data.data[done : done + PIECE_BYTES])):
        done += n
    return done == data.size


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor of floats that lies in a file. [layer] is the part of a layer; [first:last], rows or numbers, is read, an array.

    what: its numbers are, for people; dtype: FP32, FP16, BF16 or BYTE. Raises CheckpointError for numbers that are not finite.
    """

    file: ModelFile
    name: str
    shape: tuple[int, ...]
    start: int
    what: str = "weights"
    dtype: np.dtype[Any] = FP32

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __getitem__(self, index: int | slice) -> Any:
        inner = self.shape[1:]
        if isinstance(index, int):
            return replace(self, shape=inner, start=self.start + index * self.row_bytes)
        first, last, _ = index.indices(self.shape[0])
        data = self.file.read(self.start + first * self.row_bytes, max(last - first, 0) * self.row_bytes)
        return self.checked(data.view(self.dtype).reshape(-1, *inner))

    def part(self, first: int, last: int) -> "FileTensor":
        """Those rows, which are not read yet."""
        return replace(self, shape=(last - first, *self.shape[1:]), start=self.start + first * self.row_bytes)

    def flat(self) -> "FileTensor":
        """The same matrices, one below the other."""
        return replace(self, shape=(math.prod(self.shape[:-1]), self.shape[-1]))

    def heads(self, head_dim: int, n_turned: int, turn: tuple[int, int] = (0, 1)) -> "Derived":
        """A tensor of heads, of whose first n_turned rows i and i + n/2 become 2i and 2i + 1, as our RoPE has its pairs.

        turn: the number of these heads and how many there are, where those of several matrices lie in turns.
        """
        (number, n_turns), inner = turn, self.shape[1:]
        order = np.arange(head_dim)
        order[:n_turned] = order[:n_turned].reshape(2, -1).T.reshape(-1)

        def rows(first: int, last: int) -> npt.NDArray[Any]:
            begin, end = first // head_dim * head_dim, -(-last // head_dim) * head_dim
            heads = self[begin * n_turns : end * n_turns].reshape(-1, n_turns, head_dim, *inner)[:, number]
            return np.ascontiguousarray(heads[:, order]).reshape(-1, *inner)[first - begin : last - begin]

        return Derived(self, (self.shape[0] // n_turns, *inner), self.dtype, rows)

    def picked(self, places: Int64) -> "Derived":
        """Those of its rows, in that order; such as are neighbours are read at once."""

        def rows(first: int, last: int) -> npt.NDArray[Any]:
            own = places[first:last]
            ends = [0, *(np.flatnonzero(own[1:] != own[:-1] + 1) + 1).tolist(), len(own)]
            runs = (self[int(own[i]) : int(own[j - 1]) + 1] for i, j in itertools.pairwise(ends) if i < j)
            return np.concatenate([self[:0], *runs])

        return Derived(self, (len(places), *self.shape[1:]), self.dtype, rows)

    def columns(self, first: int, last: int) -> npt.NDArray[Any]:
        """(n, last - first) of a matrix (n, columns), read."""
        size = self.dtype.itemsize
        data = self.file.read_runs(self.start + first * size, self.shape[0], (last - first) * size, self.row_bytes)
        return self.checked(data.view(self.dtype))

    def checked(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers, all finite."""
        if self.dtype != BYTE and not all_finite(numbers):
            raise CheckpointError(f"{self.file.path} is damaged: {self.name} holds NaN or infinite {self.what}")
        return numbers


@dataclass(frozen=True)
class Derived:
    """A tensor whose rows are made of a stored one when they are asked for; rows(first, last) gives them."""

    stored: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[int, int], npt.NDArray[Any]]

    def __getitem__(self, index: slice) -> npt.NDArray[Any]:
        first, last, _ = index.indices(self.shape[0])
        return self.rows(first, last)
