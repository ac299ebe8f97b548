"""int4 weights, quantized at load: groups of 32 codes with a scale and a minimum that nearly minimize the squared error.

For each of a few initial scales, the codes are computed, then twice the least squares fit to the codes and the new codes; the
best result counts. Scales and minima are then rounded to fp16, and the codes are chosen for those.
"""

import numpy as np

from specdec.quant.gguf_repacking import Q4_MIN_LAYOUT, WEIGHT_FORMATS
from specdec.quant.groupwise import GroupedFormat, GroupedRows, pack_codes, pack_grouped_rows
from specdec.quant.int8 import BYTES_PER_WORD, INT8
from specdec.quant.packed_matrix import Floats, to_float32
from specdec.runtime.code_cache import inlined
from specdec.runtime.op_program import Floats2, ForwardContext, kernel, run_on_all_threads
from specdec.runtime.simd import LANES, Float32, add, fma, load, maximum, minimum, mul, reduce_add, reduce_max, rint, store_bytes
from specdec.runtime.work_stealing import get_chunk_range

LAYOUT = Q4_MIN_LAYOUT
MAX_CODE = 15.0
# Initial numbers of steps per range of a group; values outside are clipped. With 4 of them and two fits, the error of normal
# weights is 0.0714 of their deviation; with one range of 15 it is 0.0782, with 11 and one fit 0.0722.
INITIAL_STEPS = (13.0, 14.0, 15.0, 16.0)
N_FITS = 2
MAX_FP16 = 65504.0


@inlined
def quantize_vector(weights, inverse, bias, max_code):
    """Return weights * inverse + bias of a vector, rounded and clipped to the codes 0 to max_code, as integral floats."""
    return maximum(0.0, minimum(max_code, rint(fma(weights, inverse, bias))))


@kernel
def fit_groups(run: ForwardContext, thread: int, scales: Floats2, minima: Floats2, rows: Floats2) -> None:
    """Fill the scale and the minimum (rows, groups) of each group of 32 weights in rows; they are NaN if a weight is not finite.

    rows: (rows, 32 * groups).
    """
    first, last = get_chunk_range(rows.shape[0], run.chunk, run.n_chunks)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            at = row * rows.shape[1] + g * 2 * LANES
            a, b = load(rows, at), load(rows, at + LANES)
            not_finite = reduce_add(fma(a, 0.0, mul(b, 0.0)))
            lowest = -reduce_max(maximum(mul(a, -1.0), mul(b, -1.0)))
            width = reduce_max(maximum(a, b)) - lowest
            a, b = add(a, -lowest), add(b, -lowest)  # keeps the sums accurate
            total = reduce_add(add(a, b))
            best_error, best_scale, best_minimum = np.float32(np.inf), np.float32(0.0), np.float32(0.0)
            for i in range(len(INITIAL_STEPS)):
                scale = width / np.float32(INITIAL_STEPS[i])
                group_minimum = np.float32(0.5) * (width - np.float32(MAX_CODE) * scale)
                for _ in range(1 + N_FITS):
                    inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
                    p = quantize_vector(a, inverse, -group_minimum * inverse, MAX_CODE)
                    q = quantize_vector(b, inverse, -group_minimum * inverse, MAX_CODE)
                    residual_a = fma(p, -scale, add(a, -group_minimum))
                    residual_b = fma(q, -scale, add(b, -group_minimum))
                    error = reduce_add(fma(residual_a, residual_a, mul(residual_b, residual_b)))
                    if error < best_error:
                        best_error, best_scale, best_minimum = error, scale, group_minimum
                    n, sum_of_codes = np.float32(2 * LANES), reduce_add(add(p, q))
                    squares, products = reduce_add(fma(p, p, mul(q, q))), reduce_add(fma(p, a, mul(q, b)))
                    determinant = n * squares - sum_of_codes * sum_of_codes
                    if determinant > 0.0:
                        scale = (n * products - sum_of_codes * total) / determinant
                        group_minimum = (total - scale * sum_of_codes) / n
            scales[row, g] = best_scale + not_finite
            minima[row, g] = lowest + best_minimum + not_finite


@kernel
def quantize_groups(
    run: ForwardContext, thread: int, codes: Floats2, scales: Floats2, minima: Floats2, rows: Floats2, max_code: float
) -> None:
    """Write the codes 0 to max_code of rows as bytes, for given scales and minima (rows, groups).

    rows: (rows, group size * groups).
    """
    first, last = get_chunk_range(rows.shape[0], run.chunk, run.n_chunks)
    group_size = rows.shape[1] // scales.shape[1]
    for row in range(first, last):
        for i in range(0, rows.shape[1], LANES):
            at, scale = row * rows.shape[1] + i, scales[row, i // group_size]
            inverse = np.float32(1.0) / scale if scale != 0.0 else np.float32(0.0)
            weights = add(load(rows, at), -minima[row, i // group_size])
            store_bytes(codes, at, quantize_vector(weights, inverse, 0.0, max_code))


def fill_up_columns(rows: Float32, multiple: int) -> Float32:
    """Return rows (rows, n) with copies of the last weight up to a multiple of columns, which cost no other weight accuracy."""
    n_missing = -rows.shape[1] % multiple
    return np.pad(rows, ((0, 0), (0, n_missing)), "edge") if n_missing else rows


def quantize(rows: Float32) -> GroupedRows:
    """Return float32 rows (rows, n) quantized to int4; copies of the last weight fill up the last group."""
    rows = fill_up_columns(rows, LAYOUT.group_size)
    n_groups = rows.shape[1] // LAYOUT.group_size
    fitted = np.empty((2, len(rows), n_groups), np.float32)
    run_on_all_threads(fit_groups(fitted[0], fitted[1], rows))
    halves = np.clip(fitted, -MAX_FP16, MAX_FP16).astype(np.float16)
    fitted = halves.astype(np.float32)
    codes = np.empty((len(rows), rows.shape[1] // BYTES_PER_WORD), np.float32)
    run_on_all_threads(quantize_groups(codes, fitted[0], fitted[1], rows, MAX_CODE))
    words = pack_codes(LAYOUT, codes.view(np.uint32).reshape(len(rows), n_groups, 1, -1))
    params = np.ascontiguousarray(halves.transpose(1, 2, 0)).view(np.uint16)
    factors = np.empty((len(rows), n_groups, 0), np.uint8)
    return GroupedRows(params, factors, words)


class DraftInt4Format(GroupedFormat):
    """Panels of int4 weights that are quantized at load.

    As the draft of another model, Qwen2.5-Coder 0.5B is accepted as often with its classifier in int4 as in int8.
    """

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats, group_size: int) -> None:
        """Quantize and pack rows of floats of any type; see `WeightFormat.pack`."""
        pack_grouped_rows(panels, first, stride, quantize(to_float32(rows)))


class Int4Format(DraftInt4Format):
    """The same with embedding and classifier in int8.

    As a draft for SmolLM2, this copy reaches 87% acceptance, all int4 69%, int8 88%.
    """

    embedding_format = INT8


Q4_1_FIELDS = vars(WEIGHT_FORMATS["Q4_1"]) | {"name": "int4"}  # layout and kernels
INT4, DRAFT_INT4 = Int4Format(**Q4_1_FIELDS), DraftInt4Format(**Q4_1_FIELDS)
