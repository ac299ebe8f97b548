"""What the arithmetic reaches that needs no memory: the limit of passes over many tokens. Knows no kind of weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .programs import Floats2, Operation, Pass, Runner
from .tiles import STRIP_ROWS, TILE_TOKENS, Shape, const, shape_of
from .vectors import F32, I64, LANES, element_pointer, multiply_add

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
            w, before = builder.load(place, align=4), builder.block
            loop, done = builder.append_basic_block("chains"), builder.append_basic_block("chains.end")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(I64)
            accumulators = [builder.phi(vector) for _ in range(shape.n_vectors * shape.n_tokens)]
            new = [instruction(builder, acc, w, acc) for acc in accumulators]
            next_step = builder.add(step, const(1))
            for phi, first, value in (
                (step, const(0), next_step),
                *((acc, w, v) for acc, v in zip(accumulators, new, strict=True)),
            ):
                phi.add_incoming(first, before)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", next_step, args[2]), loop, done)
            builder.position_at_end(done)
            total = new[0]
            for value in new[1:]:
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
