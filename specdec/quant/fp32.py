"""fp32 weights: panels (P, n, R), one chain of fused multiply-adds in ascending k for each row and token."""

from functools import partial

import numpy as np

from specdec.quant.matmul import Tile, make_float_tile, make_kernels
from specdec.quant.packed_matrix import Floats, WeightFormat, to_float32
from specdec.runtime.code_cache import CompiledFunction, inlined
from specdec.runtime.op_program import Floats2, Floats3, ForwardContext, Halves2, Halves3, kernel, run_on_all_threads
from specdec.runtime.simd import FP32_STORAGE, LANES, PANEL_ROWS, Float32, ceil_div, extract_lane, load
from specdec.runtime.work_stealing import get_chunk_range

# Columns of a transposed block, a constant for the compiler: 135M weights on two threads take 0.04 s, else 0.1 s.
TRANSPOSE_COLUMNS = 32


@inlined
def get_float_activations(run, thread, p, n_tokens):
    """Return x as a tile over floats takes it, this thread's copy if there are several."""
    return p.x[thread if p.x.shape[0] > 1 else 0]


def make_weight_getter(load_weights):
    """Return an inlined function that reads one weight from a panel of floats; load_weights loads a vector of its rows."""

    @inlined
    def get_weight(w, panel, row, k, n, group_size):
        return extract_lane(load_weights(w, (panel * n + k) * PANEL_ROWS + row // LANES * LANES), row % LANES)

    return get_weight


@inlined
def transpose_rows(out, source):
    """out[k, r] = source[r, k]: rows (R or fewer, n) become columns (n, R)."""
    n = source.shape[1]
    whole = n // TRANSPOSE_COLUMNS * TRANSPOSE_COLUMNS
    for k in range(0, whole, TRANSPOSE_COLUMNS):
        for r in range(source.shape[0]):
            for j in range(TRANSPOSE_COLUMNS):
                out[k + j, r] = source[r, k + j]
    for k in range(whole, n):
        for r in range(source.shape[0]):
            out[k, r] = source[r, k]


@kernel
def pack_panels(run: ForwardContext, thread: int, panels: Floats3, first: int, stride: int, matrix: Floats2) -> None:
    """panels[first + stride * i, k, r] = matrix[R i + r, k]: pack rows (rows, n) into every stride-th of panels (P, n, R)."""
    begin, end = get_chunk_range(ceil_div(matrix.shape[0], PANEL_ROWS), run.chunk, run.n_chunks)
    for i in range(begin, end):
        transpose_rows(panels[first + stride * i], matrix[i * PANEL_ROWS : (i + 1) * PANEL_ROWS])


pack_half_panels = pack_panels.specialize("pack_half_panels", panels=Halves3, matrix=Halves2)  # for 16-bit weights


def pack_rows(panels: Floats, first: int, stride: int, rows: Floats) -> None:
    """Pack rows (rows, n) into every stride-th of panels (P, n, R), on all threads; rows that pad the last panel stay zero."""
    pack_kernel = pack_panels if panels.dtype == np.float32 else pack_half_panels
    run_on_all_threads(pack_kernel(panels, first, stride, np.ascontiguousarray(rows)))


class FP32Format(WeightFormat):
    """Panels of float32, as they are in the file."""

    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the columns and rows of a panel."""
        return n, PANEL_ROWS

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats, group_size: int) -> None:
        """Pack rows of floats of any type; see `WeightFormat.pack`."""
        pack_rows(panels, first, stride, to_float32(rows))


panel_tile: CompiledFunction = Tile(partial(make_float_tile, FP32_STORAGE))
FP32 = FP32Format(name="fp32", **make_kernels(__name__, "", panel_tile, get_float_activations, make_weight_getter(load)))
