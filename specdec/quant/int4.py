"""int4 weights, quantized here: groups of 32 codes with a scale and a minimum that nearly minimize the squared error.

For a few scales the codes that they ask for, then twice the least squares fit to codes and the codes that it asks for; the best
of all. Scales and minima are then rounded to fp16, and the codes chosen for those.
"""

from dataclasses import replace

import numpy as np

from specdec.quant.gguf_blocks import FOUR_AND_MINIMUM, KINDS
from specdec.quant.grouped import Rows, place
from specdec.quant.int8 import INT8
from specdec.quant.matrix import Floats, floats
from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Floats2, Pass, on_all_threads, operation
from specdec.runtime.simd import (  # fmt: skip
    LANES,
    Float32,
    add,
    ceil_div,
    fma,
    load,
    maximum,
    minimum,
    mul,
    reduce_add,
    reduce_max,
    rint,
    splat,
    store_bytes,
)
from specdec.runtime.work_stealing import share

FORM = FOUR_AND_MINIMUM
LARGEST = 15.0  # code
# Steps that a group's range is cut into, at first: what lies outside is cut off. With 4 and two fits the error of normal
# weights is 0.0714 of their deviation, with one range of 15 0.0782, with 11 and one fit 0.0722.
FIRST_STEPS = (13.0, 14.0, 15.0, 16.0)
N_FITS = 2
MOST_FP16 = 65504.0


@inlined
def codes_for(weights, inverse, bias):
    """The codes 0 to 15 of a vector of weights, at weights * inverse + bias."""
    return maximum(splat(0.0), minimum(splat(LARGEST), rint(fma(weights, inverse, bias))))


@operation
def fit_groups(run: Pass, thread: int, scales: Floats2, minima: Floats2, rows: Floats2) -> None:
    """scales and minima (rows, groups) of rows (rows, 32 * groups), NaN where a weight is not finite."""
    first, last = share(rows.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            at = row * rows.shape[1] + g * 2 * LANES
            a, b = load(rows, at), load(rows, at + LANES)
            not_finite = reduce_add(fma(a, splat(0.0), mul(b, splat(0.0))))
            low = -reduce_max(maximum(mul(a, splat(-1.0)), mul(b, splat(-1.0))))
            width = reduce_max(maximum(a, b)) - low
            a, b = add(a, splat(-low)), add(b, splat(-low))  # small numbers, for the sums
            total = reduce_add(add(a, b))
            best_error, best_scale, best_minimum = np.float32(np.inf), np.float32(0.0), np.float32(0.0)
            for i in range(len(FIRST_STEPS)):
                scale = width / np.float32(FIRST_STEPS[i])
                least = np.float32(0.5) * (width - np.float32(LARGEST) * scale)
                for _ in range(1 + N_FITS):
                    inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
                    p, q = (
                        codes_for(a, splat(inverse), splat(-least * inverse)),
                        codes_for(b, splat(inverse), splat(-least * inverse)),
                    )
                    off_a, off_b = fma(p, splat(-scale), add(a, splat(-least))), fma(q, splat(-scale), add(b, splat(-least)))
                    error = reduce_add(fma(off_a, off_a, mul(off_b, off_b)))
                    if error < best_error:
                        best_error, best_scale, best_minimum = error, scale, least
                    n, sum_of_codes = np.float32(2 * LANES), reduce_add(add(p, q))
                    squares, products = reduce_add(fma(p, p, mul(q, q))), reduce_add(fma(p, a, mul(q, b)))
                    determinant = n * squares - sum_of_codes * sum_of_codes
                    if determinant > 0.0:
                        scale = (n * products - sum_of_codes * total) / determinant
                        least = (total - scale * sum_of_codes) / n
            scales[row, g] = best_scale + not_finite
            minima[row, g] = low + best_minimum + not_finite


@operation
def code_groups(run: Pass, thread: int, words: Floats2, scales: Floats2, minima: Floats2, rows: Floats2) -> None:
    """The codes of rows in groups of those scales and minima, 4 words of each."""
    first, last = share(rows.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            at = row * rows.shape[1] + g * 2 * LANES
            scale = scales[row, g]
            inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
            low = splat(-minima[row, g])
            a = codes_for(add(load(rows, at), low), splat(inverse), splat(0.0))
            b = codes_for(add(load(rows, at + LANES), low), splat(inverse), splat(0.0))
            store_bytes(words, row * words.shape[1] * 4 + g * LANES, fma(b, splat(16.0), a))


def quantize(rows: Float32) -> Rows:
    """Rows (rows, n) as words of strips; a last group that n does not fill up ends in copies of its last weight."""
    n_groups = ceil_div(rows.shape[1], FORM.group)
    rows = np.pad(rows, ((0, 0), (0, n_groups * FORM.group - rows.shape[1])), "edge")
    fitted = np.empty((2, len(rows), n_groups), np.float32)
    on_all_threads(fit_groups(fitted[0], fitted[1], rows))
    halves = np.clip(fitted, -MOST_FP16, MOST_FP16).astype(np.float16)
    fitted = halves.astype(np.float32)
    words = np.empty((len(rows), n_groups * FORM.row_words), np.float32)
    on_all_threads(code_groups(words, fitted[0], fitted[1], rows))
    numbers = np.ascontiguousarray(halves.transpose(1, 2, 0)).view(np.uint16)
    factors = np.empty((len(rows), n_groups, FORM.n_levels, 0), np.int8)
    return Rows(numbers, factors, words.view(np.uint32).reshape(len(rows), n_groups, 1, FORM.row_words))


def fill(strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`, of floats of any type."""
    place(strips, first, stride, quantize(floats(rows)))


# Embedding and classifier in int8: SmolLM2 accepts 87% of such a copy, 69% of one that is int4 throughout, 88% of an int8 one.
INT4 = replace(KINDS["Q4_1"], name="int4", fill=fill, of_blocks=False, of_tables=INT8)
