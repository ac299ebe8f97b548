"""A benchmark of peak arithmetic without memory: the upper limit of passes over many tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.matmul_tile import MAX_TILE_TOKENS, PANEL_ROWS, TileShape, choose_tile_shape, const
from specdec.runtime.op_program import Executor, Floats2, ForwardContext, Kernel
from specdec.runtime.simd import F32, LANES, get_element_pointer, multiply_add

FLOAT_TILE_SHAPE = choose_tile_shape(PANEL_ROWS, MAX_TILE_TOKENS)
N_STEPS = 1 << 19  # of each chain in a run: 1.2 ms on Zen 5, much longer than the start of a parallel region


def fma(builder: Any, acc: Any, w: Any, x: Any) -> Any:
    """Emit acc + w x of vectors, the instruction of tiles over floats."""
    return multiply_add(builder, w, x, acc)


def make_chains_kernel(instruction: Callable[..., Any], lane: Any, shape: TileShape) -> Kernel:
    """Return a benchmark kernel that repeats acc = instruction(builder, acc, w, acc) n times in each of several chains.

    There are as many chains as a tile of that shape has sums, over vectors of the LLVM type `lane`. w, the start of all chains,
    is read from words[thread]; their sum goes to words[thread, LANES:].
    """
    vector = ir.VectorType(lane, shape.lanes)

    @intrinsic
    def run_chains(typingctx, words, start, n):
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = get_element_pointer(context, builder, signature.args[0], args[0], args[1], vector)
            w = builder.load(pointer, align=4)
            sums = [cgutils.alloca_once_value(builder, w) for _ in range(shape.n_vectors * shape.n_tokens)]
            with cgutils.for_range(builder, args[2]):
                for chain in sums:
                    acc = builder.load(chain)
                    builder.store(instruction(builder, acc, w, acc), chain)
            total, *others = map(builder.load, sums)
            for value in others:
                total = builder.fadd(total, value) if lane == F32 else builder.add(total, value)
            builder.store(total, builder.gep(pointer, [const(LANES // shape.lanes)]), align=4)
            return context.get_dummy_value()

        return types.void(words, start, n), codegen

    def run_all(run: ForwardContext, thread: int, words: Floats2, n: int) -> None:
        run_chains(words, thread * words.shape[1], n)

    return Kernel(run_all, cache=False)


def make_peak_run(instruction: Callable[..., Any], lane: Any, shape: TileShape, n_threads: int) -> Callable[[], None]:
    """Return a function without arguments that runs a `make_chains_kernel` kernel once on n_threads threads.

    Each thread applies the instruction to shape.rows * shape.n_tokens * N_STEPS lanes.
    """
    words = np.full((n_threads, 2 * LANES), -2.0, np.float32)  # -2 x + x = -x: no float overflows
    executor = Executor([[make_chains_kernel(instruction, lane, shape)(words, N_STEPS)]])
    return lambda: executor(1, 0, 0, n_threads)
