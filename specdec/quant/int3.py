"""int3 weights, quantized at load: groups of 16 codes with a scale that nearly minimizes the squared error, in blocks of 128.

Only large draft models have them. The layers of Qwen2.5-Coder 0.5B take 0.73 of the bytes of int4. With four draft tokens per
step, a pass of its 1.5B target yields 3% fewer tokens, 11% fewer if the classifier has 3 bits, too. The pair is 1.04 times as
fast.
"""

import numpy as np

from specdec.quant.gguf_repacking import make_format_fields
from specdec.quant.groupwise import GroupedFormat, GroupedRows, GroupLayout, pack_codes, pack_grouped_rows
from specdec.quant.int4 import DRAFT_INT4, MAX_FP16, fill_up_columns, quantize_groups, quantize_vector
from specdec.quant.int8 import BYTES_PER_WORD
from specdec.quant.packed_matrix import Floats, to_float32
from specdec.runtime.op_program import Floats2, ForwardContext, kernel, run_on_all_threads
from specdec.runtime.simd import LANES, Float32, add, fma, load, mul, reduce_add, reduce_max
from specdec.runtime.work_stealing import get_chunk_range

LAYOUT = GroupLayout(3, 16, 8, False)
MAX_CODE, ZERO_POINT = 7.0, 4.0
MAX_FACTOR = np.float32(127.0)  # of a group's scale, relative to its block's
# Initial numbers of steps from 0 to the weight of the largest magnitude. With four of them and a fit, the error of normal weights
# is 0.143 of their deviation, as with 25 and two fits; with 4 steps alone it is 0.155.
INITIAL_STEPS = (3.3, 3.8, 4.3, 4.8)


@kernel
def fit_scales(run: ForwardContext, thread: int, scales: Floats2, rows: Floats2) -> None:
    """Fill the scale (rows, groups) of each group of 16 weights in rows; it is NaN if a weight is not finite.

    rows: (rows, 16 * groups).
    """
    first, last = get_chunk_range(rows.shape[0], run.chunk, run.n_chunks)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            weights = load(rows, row * rows.shape[1] + g * LANES)
            highest, lowest = reduce_max(weights), -reduce_max(mul(weights, -1.0))
            extreme = highest if highest > -lowest else lowest
            best_error, best_scale = np.float32(np.inf), np.float32(0.0)
            for i in range(len(INITIAL_STEPS)):
                scale = -extreme / np.float32(INITIAL_STEPS[i])
                for _ in range(2):
                    inverse = np.float32(1.0) / scale if scale != 0.0 else np.float32(0.0)
                    codes = add(quantize_vector(weights, inverse, ZERO_POINT, MAX_CODE), -ZERO_POINT)
                    residual = fma(codes, -scale, weights)
                    error = reduce_add(mul(residual, residual))
                    if error < best_error:
                        best_error, best_scale = error, scale
                    squares = reduce_add(mul(codes, codes))
                    if squares > 0.0:
                        scale = reduce_add(mul(codes, weights)) / squares
            scales[row, g] = best_scale + reduce_add(mul(weights, 0.0))


def quantize(rows: Float32) -> GroupedRows:
    """Return float32 rows (rows, n) quantized to int3; copies of the last weight fill up the last block."""
    rows = fill_up_columns(rows, LAYOUT.block_columns)
    scales = np.empty((len(rows), rows.shape[1] // LAYOUT.group_size), np.float32)
    run_on_all_threads(fit_scales(scales, rows))
    groups = scales.reshape(len(rows), -1, LAYOUT.n_groups)
    largest = abs(groups).max(2, keepdims=True) / MAX_FACTOR
    params = np.minimum(largest, MAX_FP16).astype(np.float16)
    block_scales = params.astype(np.float32)
    has_scale = block_scales > 0.0  # not if it is NaN
    factors = np.rint(np.where(has_scale, groups, np.float32(0.0)) / np.where(has_scale, block_scales, np.float32(1.0)))
    factors = np.clip(factors, -MAX_FACTOR, MAX_FACTOR)
    codes = np.empty((len(rows), rows.shape[1] // BYTES_PER_WORD), np.float32)
    scales = (block_scales * factors).reshape(scales.shape)
    run_on_all_threads(quantize_groups(codes, scales, np.float32(-ZERO_POINT) * scales, rows, MAX_CODE))
    words = pack_codes(LAYOUT, codes.view(np.uint32).reshape(*groups.shape, -1))
    return GroupedRows(params.view(np.uint16), factors.astype(np.int8).view(np.uint8), words)


class Int3Format(GroupedFormat):
    """Panels of int3 weights that are quantized at load, with embedding and classifier in int4."""

    embedding_format = DRAFT_INT4

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats, group_size: int) -> None:
        """Quantize and pack rows of floats of any type; see `WeightFormat.pack`."""
        pack_grouped_rows(panels, first, stride, quantize(to_float32(rows)))


INT3 = Int3Format(**make_format_fields("int3", LAYOUT))
