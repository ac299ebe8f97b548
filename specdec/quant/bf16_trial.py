"""Whether bf16 in 12 bits is faster than in 16 on this machine: a trial on matrices of the model's own."""

import time
from collections.abc import Iterable
from dataclasses import replace

from specdec.quant.bf16_packed import PACKED_BF16
from specdec.quant.half import BF16
from specdec.quant.matrix import Matrix, NoRoom, Tensor, pack
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

LEAST_WEIGHTS = 16 << 20  # of a model: fewer may stay in a cache, where nothing is to be gained
PACKED_WEIGHTS, COPIES = 2 << 20, 8  # together 33 MB in 16 bits, more than the caches of one core hold
WORTH_IT = 1.05  # the speed of bf16, for one token
ROUNDS, MOST_SECONDS = 5, 0.05


def pays(tensors: Iterable[Tensor], n_threads: int) -> bool:
    """Whether a pass of one token over the first of those tensors of bf16, so many threads at it, is faster by that much."""
    packed, plain = list[Matrix](), list[Matrix]()
    left = PACKED_WEIGHTS
    for tensor in tensors:
        rows = tensor[: max(left // tensor.shape[1] // STRIP_ROWS, 1) * STRIP_ROWS]
        try:
            packed.append(pack([rows], PACKED_BF16))
        except NoRoom:
            continue
        plain.append(pack([rows], BF16))
        left -= rows.size
        if left < STRIP_ROWS * tensor.shape[1]:
            break
    return bool(packed) and _are_faster(packed, plain, n_threads)


def _are_faster(packed: list[Matrix], plain: list[Matrix], n_threads: int) -> bool:
    """Whether the first ones are, by the shortest times of a few rounds by turns over several copies of both."""
    out = zeros(1, max(matrix.n_rows for matrix in plain))
    x = zeros(1, 1, max(round_up(matrix.n, STRIP_ROWS) for matrix in plain))
    x[:] = 1.0
    scratch = zeros(n_threads, 1, max(matrix.scratch_words for matrix in packed))

    def copied(matrix: Matrix) -> Matrix:
        strips = zeros(*matrix.strips.shape)
        strips[:] = matrix.strips
        return replace(matrix, strips=strips)

    copies = [[copied(matrix) for _ in range(COPIES) for matrix in matrices] for matrices in (packed, plain)]
    passes = [Runner([[matrix.product(out, x, scratch) for matrix in matrices]]) for matrices in copies]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + MOST_SECONDS
    while len(times[0]) < 2 or (len(times[0]) < ROUNDS and time.perf_counter() < end):
        for run, taken in zip(passes, times, strict=True):
            begin = time.perf_counter()
            run(1, 0, 0, n_threads)
            taken.append(time.perf_counter() - begin)
    return min(times[1]) > WORTH_IT * min(times[0])
