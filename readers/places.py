"""Where a family's tensors lie among those of a file, and how they become what its architecture takes. Knows no format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..architectures import Config, architecture_of
from .model_file import FileTensor

TURNED_AT_ONCE = 16  # inputs of a stored matrix: a cache line of each output; GPT-2 large in fp32 at 2.7 GB/s, all at once 0.7
COMPARED_ROWS = 2048  # of an embedding and a head at a time


class Place(NamedTuple):
    """Where a tensor lies: its name, `{}` for the layer, and in which form.

    halves: in each head all first parts of RoPE's pairs, then all second ones; conv: a matrix (inputs, outputs), not (outputs,
    inputs); part, parts: of so many tensors side by side along the outputs, which one it is; alone: of several that there may be,
    each with its number in its name, it is the only one and has none.
    """

    name: str
    halves: bool = False
    conv: bool = False
    part: int = 0
    parts: int = 1
    alone: bool = False


class Source(Protocol):
    """The tensors of a model's files."""

    def tensor(self, name: str, shape: tuple[int, ...], /) -> Any:
        """Raises CheckpointError for one that is missing or of another shape."""


def tensors_of(config: Config, places: Mapping[str, Place], source: Source) -> dict[str, Any]:
    """What the config's architecture takes, by its names; of layers a list."""
    tensors: dict[str, Any] = {}
    for name, shape in architecture_of(config).shapes(config).items():
        place = places[name]
        if "{}" in place.name or place.alone:
            layers = range(shape[0])
            tensors[name] = [_tensor(source, place, place.name.format(i), shape[1:], config.head_dim) for i in layers]
        else:
            tensors[name] = _tensor(source, place, place.name, shape, config.head_dim)
    return tensors


def _tensor(source: Source, place: Place, name: str, shape: tuple[int, ...], head_dim: int) -> Any:
    n_rows = shape[0]
    if place.conv:
        return Transposed(source.tensor(name, (shape[1], n_rows * place.parts)), place.part * n_rows, n_rows)
    if place.parts > 1:
        stored = source.tensor(name, (n_rows * place.parts, *shape[1:]))
        return stored.part(place.part * n_rows, (place.part + 1) * n_rows)
    stored = source.tensor(name, shape)
    return stored.in_pairs(head_dim) if place.halves else stored


def are_equal(a: Any, b: Any) -> bool:
    """Whether two tensors of one shape hold the same, in the same numbers."""
    starts = range(0, a.shape[0], COMPARED_ROWS)
    return a.dtype == b.dtype and all(
        np.array_equal(a[first : first + COMPARED_ROWS], b[first : first + COMPARED_ROWS]) for first in starts
    )


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
