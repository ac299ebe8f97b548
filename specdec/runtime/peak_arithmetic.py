"""What the arithmetic reaches that needs no memory: the limit of passes over many tokens. Knows no kind of weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.program import Floats2, Operation, Pass, Runner
from specdec.runtime.simd import F32, LANES, element_pointer, multiply_add
from specdec.runtime.tile import STRIP_ROWS, TILE_TOKENS, Shape, const, shape_of

FLOATS = shape_of(STRIP_ROWS, TILE_TOKENS)  # of a tile over floats
STEPS = 1 << 19  # of each chain in a run: on Zen 5 1.2 ms, beside which the start of a region is little


def fma(builder: Any, acc: Any, w: Any, x: Any) -> Any:
    """The instruction of tiles over floats."""
    return multiply_add(builder, w, x, acc)


def chains(instruction: Callable[..., Any], lane: Any, shape: Shape) -> Operation:
    """An operation: n steps of acc = instruction(builder, acc, w, acc), as many side by side as a tile of that shape has sums.

    Of vectors of an LLVM type. w, what chains begin with, is the first of words[thread]; their sum goes to words[thread, LANES:].
    """
    vector = ir.VectorType(lane, shape.lanes)

    @intrinsic
    def run_chains(typingctx, words, start, n):
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = element_pointer(context, builder, signature.args[0], args[0], args[1], vector)
            w = builder.load(place, align=4)
            sums = [cgutils.alloca_once_value(builder, w) for _ in range(shape.n_vectors * shape.n_tokens)]
            with cgutils.for_range(builder, args[2]):
                for at in sums:
                    acc = builder.load(at)
                    builder.store(instruction(builder, acc, w, acc), at)
            total, *others = map(builder.load, sums)
            for value in others:
                total = builder.fadd(total, value) if lane == F32 else builder.add(total, value)
            builder.store(total, builder.gep(place, [const(LANES // shape.lanes)]), align=4)
            return context.get_dummy_value()

        return types.void(words, start, n), codegen

    def run_all(run: Pass, thread: int, words: Floats2, n: int) -> None:
        run_chains(words, thread * words.shape[1], n)

    return Operation(run_all, kept=False)


def arithmetic(instruction: Callable[..., Any], lane: Any, shape: Shape, n_threads: int) -> Callable[[], None]:
    """A run of `chains`: each thread does shape.rows * shape.n_tokens * STEPS times what the instruction does to a lane."""
    words = np.full((n_threads, 2 * LANES), -2.0, np.float32)  # -2 x + x = -x: no float ends
    runner = Runner([[chains(instruction, lane, shape)(words, STEPS)]])
    return lambda: runner(1, 0, 0, n_threads)
