"""fp32 weights: strips (P, n, R), one chain of fused multiply-adds in ascending k for each row and token."""

from typing import Any

import numpy as np

from specdec.quant.matmul import embedded_by, multiplied_by
from specdec.quant.matrix import ALL, Floats, Kind, floats
from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Floats2, Floats3, Halves2, Halves3, Pass, on_all_threads, operation
from specdec.runtime.simd import LANES, Float32, ceil_div, lane, load
from specdec.runtime.tile import FLOAT_TOKENS, STRIP_ROWS, strip_tile
from specdec.runtime.work_stealing import share

BLOCK = 32  # columns of a block that is turned, a number that the compiler sees: 135M weights on two threads 0.04 s, else 0.1


@inlined
def floats_of_x(run, thread, p, n_tokens):
    """x as a tile over floats takes it."""
    return p.x[thread if p.x.shape[0] > 1 else 0], 0


def weight_of(load_weights: Any) -> Any:
    """What gives a weight of a strip whose columns that loads."""

    @inlined
    def weight_at(w, strip, row, k, n, group):
        return lane(load_weights(w, (strip * n + k) * STRIP_ROWS + row // LANES * LANES), row % LANES)

    return weight_at


@inlined
def turn_rows(out, source):
    """out[k, r] = source[r, k]: rows (R or fewer, n) as columns (n, R)."""
    n = source.shape[1]
    whole = n // BLOCK * BLOCK
    for k in range(0, whole, BLOCK):
        for r in range(source.shape[0]):
            for j in range(BLOCK):
                out[k + j, r] = source[r, k + j]
    for k in range(whole, n):
        for r in range(source.shape[0]):
            out[k, r] = source[r, k]


@operation
def fill_strips(run: Pass, thread: int, strips: Floats3, first: int, stride: int, matrix: Floats2) -> None:
    """strips[first + stride * i, k, r] = matrix[R i + r, k]: rows (rows, n) into every stride-th of strips (P, n, R)."""
    begin, end = share(ceil_div(matrix.shape[0], STRIP_ROWS), run.part, run.n_parts)
    for strip in range(begin, end):
        turn_rows(strips[first + stride * strip], matrix[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS])


@operation
def read_strips(run: Pass, thread: int, matrix: Floats2, strips: Floats3) -> None:
    """matrix[R i + r, k] = strips[i, k, r]."""
    begin, end = share(strips.shape[0], run.part, run.n_parts)
    for strip in range(begin, end):
        turn_rows(matrix[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS].T, strips[strip].T)


# of two bytes a weight
fill_halves = fill_strips.over("fill_halves", strips=Halves3, matrix=Halves2)
read_halves = read_strips.over("read_halves", matrix=Halves2, strips=Halves3)


def pack_rows(strips: Floats, first: int, stride: int, rows: Floats) -> None:
    """`fill_strips` on all threads: the rows that pad the last strip stay zero."""
    fill = fill_strips if strips.dtype == np.float32 else fill_halves
    on_all_threads(fill(strips, first, stride, np.ascontiguousarray(rows)))


def unpack_rows(strips: Floats, n: int) -> Floats:
    """All rows of strips (P, n, R), those that pad the last one among them."""
    rows = np.empty((len(strips) * STRIP_ROWS, n), strips.dtype)
    read = read_strips if strips.dtype == np.float32 else read_halves
    on_all_threads(read(rows, np.ascontiguousarray(strips)))
    return rows


def fill(strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`, of floats of any type."""
    pack_rows(strips, first, stride, floats(rows))


def rows_of(strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`."""
    return unpack_rows(strips[block], n)


def no_group(n: int, file_group: int) -> int:
    """`Kind.group`."""
    return 0


def strip_shape(n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`."""
    return n, STRIP_ROWS


def no_scratch(n: int, group: int) -> int:
    """`Kind.scratch_words`: an array has at least one."""
    return 1


product, experts = multiplied_by(__name__, "", strip_tile, FLOAT_TOKENS, floats_of_x)
embed = embedded_by(__name__, "", weight_of(load))
FP32 = Kind("fp32", product, embed, experts, no_group, strip_shape, fill, rows_of, no_scratch)
