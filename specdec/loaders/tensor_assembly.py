"""Where a family's tensors lie among those of a file, and how they become what its architecture takes. Knows no format."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.config import Config
from specdec.families.family import Tensors
from specdec.families.tensor_specs import Place
from specdec.loaders.checkpoint import FP32, Derived, FileTensor
from specdec.loaders.mxfp4 import microscaled
from specdec.model.registry import architecture_of
from specdec.quant.matrix import floats

TURNED_AT_ONCE = 16  # inputs of a stored matrix: a cache line of each output; 3 GB in fp32 at 2.7 GB/s, all at once at 0.7
COMPARED_ROWS = 2048  # of an embedding and a head at a time


def tensors_of(config: Config, places: Mapping[str, Place], source: Tensors) -> dict[str, Any]:
    """What the config's architecture takes, by its names; of layers a list."""
    tensors: dict[str, Any] = {}
    shapes = architecture_of(config).shapes(config)

    def tensor(name: str, stored_name: str, shape: tuple[int, ...], place: Place, layer: int = 0) -> Any:
        n_rows, *others = shape
        if place.groups:
            groups = place.groups(config.of_layer(layer))
            return source.tensor(stored_name, (groups.n_rows, *others)).picked(groups.places())
        among = [name.removesuffix(name.rpartition(".")[2]) + each for each in place.among]
        rows = {each: shapes[each][-len(shape)] for each in among or (name,)}
        total, first = sum(rows.values()), 0
        for each in itertools.takewhile(lambda each: each != name, rows):
            first += rows[each]
        if place.conv:
            return transposed(source.tensor(stored_name, (*others, total)), n_rows, first)
        whole = (total * place.turn[1], *others)
        stored = source.tensor(stored_name, place.made.stored(whole) if place.made else whole)
        own = stored.part(first, first + n_rows) if place.among else stored
        if place.halves or place.turn[1] > 1:
            heads = config.of_layer(layer)
            own = own.heads(heads.head_dim, heads.n_turned if place.halves else 0, place.turn)
        if not (made := place.made):
            return own
        return Derived(own, shape, FP32, lambda first, last: made.numbers(floats(own[:]))[first:last])  # a small one

    def experts(name: str, layer: str, shape: tuple[int, ...], place: Place) -> list[Any]:
        """One tensor for each: all of one that holds them all, one behind the other, are parts of it."""
        n, n_rows, n_columns = shape
        if place.scales:
            return microscaled(source, (place.name.format(layer), place.scales.format(layer)), shape, *place.step)
        before, brace, behind = place.name.partition("experts.{}")
        if brace:
            stored = before.format(layer) + "experts.{}" + behind
            return [tensor(name, stored.format(i), shape[1:], place) for i in range(n)]
        if place.conv:
            columns = n_rows * place.step[1]
            whole = source.tensor(place.name.format(layer), (n, n_columns, columns)).flat()
            return [transposed(whole.part(i * n_columns, (i + 1) * n_columns), n_rows, *place.step) for i in range(n)]
        among = [f"{layer}.{each}" for each in place.among] or [name]
        sizes = [shapes[each][1] for each in among]
        total, first = sum(sizes), sum(sizes[: among.index(name)])
        whole = source.tensor(place.name.format(layer), (n, total, n_columns)).flat()
        return [whole.part(i * total + first, i * total + first + n_rows) for i in range(n)]

    for name, shape in shapes.items():
        layer, _, own = name.rpartition(".")  # where only some layers have it
        place = places[own]
        if place.each:
            tensors[name] = experts(name, layer, shape, place)
        elif layer:
            tensors[name] = tensor(name, place.name.format(layer), shape, place, int(layer))
        elif "{}" in place.name or place.alone:
            tensors[name] = [tensor(name, place.name.format(i), shape[1:], place, i) for i in range(shape[0])]
        else:
            tensors[name] = tensor(name, place.name, shape, place)
    return tensors


def are_equal(a: Any, b: Any) -> bool:
    """Whether two tensors of one shape hold the same, in the same numbers."""
    starts = range(0, a.shape[0], COMPARED_ROWS)
    return a.dtype == b.dtype and all(
        np.array_equal(a[first : first + COMPARED_ROWS], b[first : first + COMPARED_ROWS]) for first in starts
    )


def transposed(stored: FileTensor, n_rows: int, first: int, step: int = 1) -> Derived:
    """The matrix whose rows are the columns from `first` on, so many, each step-th, of a stored one, which are read alone."""

    def rows(begin: int, end: int) -> npt.NDArray[Any]:
        n, at = max(end - begin, 0), first + begin * step
        columns = stored.columns(at, at + n * step - (step - 1) * (n > 0))[:, ::step]
        rows = np.empty(columns.shape[::-1], columns.dtype)
        for i in range(0, len(columns), TURNED_AT_ONCE):
            rows[:, i : i + TURNED_AT_ONCE] = columns[i : i + TURNED_AT_ONCE].T
        return rows

    return Derived(stored, (n_rows, stored.shape[0]), stored.dtype, rows)
