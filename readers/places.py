"""Where a family's tensors lie among those of a file, and how they become what its architecture takes. Knows no format."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..architectures import Config, architecture_of
from ..machine.vectors import Float32
from ..weights.matrix import floats
from .model_file import FP32, FileTensor

TURNED_AT_ONCE = 16  # inputs of a stored matrix: a cache line of each output; GPT-2 large in fp32 at 2.7 GB/s, all at once 0.7
GATED, QKV, QKV_BIASES = ("w1", "w3"), ("wq", "wk", "wv"), ("bq", "bk", "bv")  # what may lie in one tensor
COMPARED_ROWS = 2048  # of an embedding and a head at a time


class Place(NamedTuple):
    """Where a tensor lies: its name, `{}` for the layer, and in which form.

    halves: in each head all first parts of RoPE's pairs, then all second ones; conv: a matrix (inputs, outputs), not (outputs,
    inputs); among: the tensors, by our names, that lie there one behind the other along the outputs, itself one of them;
    alone: of several that there may be, each with its number in its name, it is the only one and has none; less_one: 1 is to be
    added to its numbers.
    """

    name: str
    halves: bool = False
    conv: bool = False
    among: tuple[str, ...] = ()
    alone: bool = False
    less_one: bool = False


class Source(Protocol):
    """The tensors of a model's files."""

    def tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Raises CheckpointError for one that is missing or of another shape."""


def tensors_of(config: Config, places: Mapping[str, Place], source: Source) -> dict[str, Any]:
    """What the config's architecture takes, by its names; of layers a list."""
    tensors: dict[str, Any] = {}
    shapes = architecture_of(config).shapes(config)

    def tensor(name: str, stored_name: str, shape: tuple[int, ...]) -> Any:
        place, (n_rows, *others) = places[name], shape
        rows = {each: shapes[each][-len(shape)] for each in place.among or (name,)}
        total, first = sum(rows.values()), 0
        for each in itertools.takewhile(lambda each: each != name, rows):
            first += rows[each]
        if place.conv:
            return Transposed(source.tensor(stored_name, (*others, total)), first, n_rows)
        stored = source.tensor(stored_name, (total, *others))
        own = stored.part(first, first + n_rows) if place.among else stored
        own = own.in_pairs(config.head_dim, config.n_turned) if place.halves else own
        return OneMore(own) if place.less_one else own

    for name, shape in shapes.items():
        place = places[name]
        if "{}" in place.name or place.alone:
            tensors[name] = [tensor(name, place.name.format(i), shape[1:]) for i in range(shape[0])]
        else:
            tensors[name] = tensor(name, place.name, shape)
    return tensors


def are_equal(a: Any, b: Any) -> bool:
    """Whether two tensors of one shape hold the same, in the same numbers."""
    starts = range(0, a.shape[0], COMPARED_ROWS)
    return a.dtype == b.dtype and all(
        np.array_equal(a[first : first + COMPARED_ROWS], b[first : first + COMPARED_ROWS]) for first in starts
    )


@dataclass(frozen=True)
class OneMore:
    """A stored vector, to each of whose numbers 1 is added in float32."""

    stored: Any
    dtype = FP32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    def __getitem__(self, index: slice) -> Float32:
        return np.float32(1) + floats(self.stored[index])


@dataclass(frozen=True)
class Transposed:
    """The matrix whose rows are the columns from `first` on, so many, of a stored one, which are read and nothing else."""

    stored: FileTensor
    first: int
    n_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_rows, self.stored.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.dtype

    def __getitem__(self, index: slice) -> npt.NDArray[Any]:
        first, last, _ = index.indices(self.n_rows)
        columns = self.stored.columns(self.first + first, self.first + max(first, last))
        rows = np.empty(columns.shape[::-1], columns.dtype)
        for i in range(0, len(columns), TURNED_AT_ONCE):
            rows[:, i : i + TURNED_AT_ONCE] = columns[i : i + TURNED_AT_ONCE].T
        return rows
