"""A benchmark on the model's own matrices: whether bf16 packed in 12 bits is faster than 16 bits on this machine."""

import time
from collections.abc import Iterable
from dataclasses import replace

from specdec.quant.bf16_12bit import PACKED_BF16
from specdec.quant.fp16_bf16 import BF16
from specdec.quant.packed_matrix import Matrix, PackingOverflowError, Tensor, pack_matrix
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import round_up

MIN_MODEL_WEIGHTS = 16 << 20  # a smaller model may stay in a cache, where packing gains nothing
TRIAL_WEIGHTS, N_COPIES = 2 << 20, 8  # together 33 MB in 16 bits, more than one core's caches hold
MIN_SPEEDUP = 1.05  # relative to bf16, for one token
MAX_ROUNDS, MAX_TRIAL_S = 5, 0.05


def is_packing_faster(tensors: Iterable[Tensor], n_threads: int) -> bool:
    """Return whether a one-token pass over the first of some bf16 tensors is faster by MIN_SPEEDUP when packed in 12 bits.

    Measures it on n_threads threads, with TRIAL_WEIGHTS weights.
    """
    packed, plain = list[Matrix](), list[Matrix]()
    remaining = TRIAL_WEIGHTS
    for tensor in tensors:
        rows = tensor[: max(remaining // tensor.shape[1] // PANEL_ROWS, 1) * PANEL_ROWS]
        try:
            packed.append(pack_matrix([rows], PACKED_BF16))
        except PackingOverflowError:
            continue
        plain.append(pack_matrix([rows], BF16))
        remaining -= rows.size
        if remaining < PANEL_ROWS * tensor.shape[1]:
            break
    return bool(packed) and _is_faster(packed, plain, n_threads)


def _is_faster(packed: list[Matrix], plain: list[Matrix], n_threads: int) -> bool:
    """Return whether a pass over the packed matrices is faster by MIN_SPEEDUP than one over the same matrices in bf16.

    Compares the shortest times of a few alternating rounds over several copies of both.
    """
    out = zeros(1, max(matrix.n_rows for matrix in plain))
    x = zeros(1, 1, max(round_up(matrix.n, PANEL_ROWS) for matrix in plain))
    x[:] = 1.0
    scratch = zeros(n_threads, 1, max(matrix.scratch_words for matrix in packed))

    def copy_matrix(matrix: Matrix) -> Matrix:
        panels = zeros(*matrix.panels.shape)
        panels[:] = matrix.panels
        return replace(matrix, panels=panels)

    copies = [[copy_matrix(matrix) for _ in range(N_COPIES) for matrix in matrices] for matrices in (packed, plain)]
    executors = [Executor([[matrix.matmul(out, x, scratch) for matrix in matrices]]) for matrices in copies]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + MAX_TRIAL_S
    while len(times[0]) < 2 or (len(times[0]) < MAX_ROUNDS and time.perf_counter() < end):
        for executor, seconds in zip(executors, times, strict=True):
            begin = time.perf_counter()
            executor(1, 0, 0, n_threads)
            seconds.append(time.perf_counter() - begin)
    return min(times[1]) > MIN_SPEEDUP * min(times[0])
