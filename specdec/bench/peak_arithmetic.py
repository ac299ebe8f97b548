"""A benchmark of peak arithmetic without memory: the upper limit of passes over many tokens."""

from collections.abc import Callable

import numpy as np

from specdec.runtime.code_cache import CompiledFunction
from specdec.runtime.op_program import Executor, Floats2, ForwardContext, Kernel
from specdec.runtime.simd import StorageDtype
from specdec.runtime.tile_simd import load_vector, make_pointer_getter, make_row_splitter, store_vector

N_STEPS = 1 << 19  # of each chain in a run: 1.2 ms on Zen 5, much longer than the start of a parallel region


def make_chains_kernel(
    prepare: CompiledFunction, step: CompiledFunction, storage: StorageDtype, rows: int, lanes: int, n_tokens: int
) -> Kernel:
    """Return a benchmark kernel that repeats sums = step(sums, w, sums) n times for as many sums as a tile has.

    Args:
        prepare: Compiled function: vector -> w.
        step: Compiled function (sums, w, x) -> sums, the arithmetic of a tile.
        storage: Type of the numbers.
        rows: Rows of the tile.
        lanes: Lanes of a register.
        n_tokens: Tokens of the tile.
    """
    get_pointer, split_tokens = make_pointer_getter(storage, rows, lanes), make_row_splitter(n_tokens)

    def run_all(run: ForwardContext, thread: int, words: Floats2, n: int) -> None:
        start = get_pointer(words, thread * words.shape[1])
        chains = split_tokens(start, rows)
        w, sums = prepare(load_vector(start, 0)), load_vector(chains, 0)
        for _ in range(n):
            sums = step(sums, w, sums)
        store_vector(chains, 0, sums, n_tokens)

    return Kernel(run_all, cache=False)


def make_peak_run(kernel: Kernel, rows: int, n_tokens: int, n_threads: int) -> Callable[[], None]:
    """Return a function without arguments that runs a kernel of `make_chains_kernel` once on n_threads threads.

    Each thread updates rows * n_tokens * N_STEPS lanes.
    """
    words = np.full((n_threads, rows * n_tokens), -2.0, np.float32)  # -2 x + x = -x: no float overflows
    executor = Executor([[kernel(words, N_STEPS)]])
    return lambda: executor(1, 0, 0, n_threads)
