"""fp32 weights: strips (P, n, R), one chain of fused multiply-adds in ascending k for each row and token."""

import numpy as np

from ..machine.cache import inlined
from ..machine.parts import share
from ..machine.programs import Floats2, Floats3, Halves2, Halves3, Ints1, Pass, on_all_threads, operation
from ..machine.tiles import FLOAT_TOKENS, STRIP_ROWS, Work, multiply_strips, strip_tile
from ..machine.vectors import LANES, Float32, ceil_div, lane, load
from .matrix import ALL, Floats, Kind, Mixture, Product, floats, multiply_experts, own_strips

BLOCK = 32  # columns of a block that is turned, a number that the compiler sees: 135M weights on two threads 0.04 s, else 0.1


@inlined
def multiply(tile, run, thread, p):
    """out[t] (+)= W x[t] by a tile over floats: this part's strips; see `Matrix.product`."""
    first, last = own_strips(run, p)
    work = Work(first, last, run.n_logits if p.of_logits else run.n_tokens, p.first)
    multiply_strips(tile, FLOAT_TOKENS, p.out, p.w, p.x[thread if p.x.shape[0] > 1 else 0], 0, work, p.adding)


@inlined
def multiply_mixture(tile, run, thread, p):
    """`multiply_experts` by a tile over floats."""
    multiply_experts(tile, FLOAT_TOKENS, 0, p.x[thread if p.x.shape[0] > 1 else 0], run, thread, p)


@inlined
def gather(load_weights, run, thread, out, w, tokens, n):
    """out[t] = W[tokens[t]]: this part's columns; see `Matrix.embedding`."""
    first, last = share(n, run.part, run.n_parts)
    for t in range(run.n_tokens):
        strip, row = divmod(tokens[t], STRIP_ROWS)
        out[t, n:] = 0.0  # what an earlier pass left there may be NaN
        for k in range(first, last):
            weights = load_weights(w, (strip * n + k) * STRIP_ROWS + row // LANES * LANES)
            out[t, k] = lane(weights, row % LANES)


@operation
def product(run: Pass, thread: int, p: Product) -> None:
    """`multiply` of fp32 weights."""
    multiply(strip_tile, run, thread, p)


@operation
def experts(run: Pass, thread: int, p: Mixture) -> None:
    """`multiply_mixture` of fp32 weights."""
    multiply_mixture(strip_tile, run, thread, p)


@operation
def embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
    """`gather` of fp32 weights."""
    gather(load, run, thread, out, w, tokens, n)


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


@inlined
def turn(run, thread, strips, first, stride, matrix):
    """strips[first + stride * i, k, r] = matrix[R i + r, k]: rows (rows, n) into every stride-th of strips (P, n, R)."""
    begin, end = share(ceil_div(matrix.shape[0], STRIP_ROWS), run.part, run.n_parts)
    for strip in range(begin, end):
        turn_rows(strips[first + stride * strip], matrix[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS])


@inlined
def turn_back(run, thread, matrix, strips):
    """matrix[R i + r, k] = strips[i, k, r]."""
    n = matrix.shape[1]
    whole = n // BLOCK * BLOCK
    begin, end = share(strips.shape[0], run.part, run.n_parts)
    for strip in range(begin, end):
        out, source = matrix[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS], strips[strip]
        for k in range(0, whole, BLOCK):
            for r in range(STRIP_ROWS):
                for j in range(BLOCK):
                    out[r, k + j] = source[k + j, r]
        for k in range(whole, n):
            for r in range(STRIP_ROWS):
                out[r, k] = source[k, r]


@operation
def fill_strips(run: Pass, thread: int, strips: Floats3, first: int, stride: int, matrix: Floats2) -> None:
    """`turn` of float32."""
    turn(run, thread, strips, first, stride, matrix)


@operation
def fill_halves(run: Pass, thread: int, strips: Halves3, first: int, stride: int, matrix: Halves2) -> None:
    """`turn` of two bytes a weight."""
    turn(run, thread, strips, first, stride, matrix)


@operation
def read_strips(run: Pass, thread: int, matrix: Floats2, strips: Floats3) -> None:
    """`turn_back` of float32."""
    turn_back(run, thread, matrix, strips)


@operation
def read_halves(run: Pass, thread: int, matrix: Halves2, strips: Halves3) -> None:
    """`turn_back` of two bytes a weight."""
    turn_back(run, thread, matrix, strips)


def pack_rows(strips: Floats, first: int, stride: int, rows: Floats) -> None:
    """`turn` on all threads: the rows that pad the last strip stay zero."""
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


FP32 = Kind("fp32", product, embed, experts, no_group, strip_shape, fill, rows_of, no_scratch)
