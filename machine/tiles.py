"""The tile: a block of rows times a few tokens that stays in registers. Knows vectors, and no kind of weights but floats.

A matrix (rows, n) lies in strips of STRIP_ROWS rows, k innermost but for the rows, so that a vector holds LANES rows at one k.
Each accumulator is one chain, of one row and one token, whatever the number of tokens that share the tile: so bits do not depend
on it. R = STRIP_ROWS, P strips, T tokens.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cache import inlined, inner
from .threads import share
from .vectors import (
    CPU_FEATURES,
    F32,
    FP32_STORAGE,
    I32,
    I64,
    LANES,
    VECTOR,
    Storage,
    broadcast,
    ceil_div,
    element_pointer,
    llvm,
    multiply_add,
    offset,
    storage_of,
)  # fmt: skip

STRIP_ROWS = 2 * LANES  # divides 288, 512, 768, 1376, 2048 and 32000, so the known models carry no padding
# Accumulators of a tile are STRIP_ROWS x TILE_TOKENS floats and have to stay in registers: 16 of 32 with AVX-512, else 12 of 16.
TILE_TOKENS = 8 if "+avx512f" in CPU_FEATURES else 3
FEW_TOKENS = TILE_TOKENS // 2  # whose tile has registers for two strips
UNROLL = 2  # of k in a tile's loop: with one prefetch for both, 8 tokens of fp32 from DRAM 40 GB/s, else 33 (Zen 5)
# 8 KiB; of 4, 8 and 16 the best on Zen 5: 15M int8 from L3, 8 tokens 0.53 ms, else 0.61 and 0.56.
PREFETCH_WORDS = 2048
LINE_WORDS = 16  # of a cache line


def prefetch(builder: Any, array: Any, word: Any, write: bool = False) -> None:
    """Fetch the cache line of that word."""
    place = offset(builder, array, word, ir.IntType(8))
    keep, data = 3, 1
    llvm(builder, "llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(I32, c) for c in (int(write), keep, data)))


def const(value: int) -> Any:
    return ir.Constant(I64, value)


def _tile_function(module: Any, name: str, emit: Any, n_vectors: int, n_tokens: int) -> Any:
    """The LLVM function of one tile shape, n_vectors * LANES rows x n_tokens, whose body emit writes.

    Its arguments: out, out_stride, w, ahead, ahead_stride, x, x_stride, n, n_quads, accumulate.
    """
    name = f"specdec_{name}_{n_vectors}x{n_tokens}"
    if name in module.globals:
        return module.globals[name]
    words = F32.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [words, I64, words, words, I64, words, I64, I64, I64, ir.IntType(1)])
    fn = ir.Function(module, signature, name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    emit(ir.IRBuilder(fn.append_basic_block("entry")), n_vectors, n_tokens, *fn.args)
    return fn


def cells(builder: Any, out: Any, out_stride: Any, accumulate: Any, n_vectors: int, n_tokens: int) -> tuple[list[Any], list[Any]]:
    """Where a tile's vectors of out lie, those of a token side by side, and what each starts from.

    The next strip's are fetched: 64 rows of logits are as many streams, more than the hardware follows.
    """
    places = [
        offset(builder, out, builder.add(builder.mul(out_stride, const(t)), const(LANES * v)), VECTOR)
        for t in range(n_tokens)
        for v in range(n_vectors)
    ]
    for place in places:
        prefetch(builder, builder.bitcast(place, F32.as_pointer()), const(LANES * n_vectors), write=True)
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    return places, [builder.select(accumulate, builder.load(place, align=4), zero) for place in places]


def float_body(stored: Storage, n_strips: int = 1) -> Any:
    """The body of a tile over weights that are floats, stored so: all accumulators in registers.

    n_strips: 1, or 2 at a time, n_quads items from one to the other, which else is of no meaning: more chains for few tokens.
    """
    words = LANES * stored.item_bytes // 4  # of a vector

    def emit(
        builder: Any, n_vectors: int, n_tokens: int,
        out: Any, out_stride: Any, w: Any, ahead: Any, ahead_stride: Any, x: Any, x_stride: Any,
        n: Any, n_quads: Any, accumulate: Any,
    ) -> None:  # fmt: skip
        entry = builder.block
        strip_vectors = n_vectors // n_strips
        pairs, odd, last, done = (builder.append_basic_block(block) for block in ("pairs", "odd", "last", "done"))
        places, start = cells(builder, out, out_stride, accumulate, n_vectors, n_tokens)
        rows = [builder.gep(x, [builder.mul(x_stride, const(t))]) for t in range(n_tokens)]
        whole = builder.and_(n, const(-UNROLL))
        builder.cbranch(builder.icmp_signed(">", whole, const(0)), pairs, odd)

        def fetch(k: Any, n_rows: int) -> None:
            for strip in range(n_strips):
                place = builder.add(builder.mul(k, ahead_stride), builder.mul(n_quads, const(strip)))
                first = builder.gep(ahead, [place])
                for line in range(0, n_rows * words * strip_vectors, LINE_WORDS):
                    prefetch(builder, first, const(line))

        def step(k: Any, acc: list[Any]) -> list[Any]:
            row = builder.mul(k, const(words * strip_vectors))
            rows_of_k = [builder.add(row, builder.mul(n_quads, const(strip))) for strip in range(n_strips)]
            loaded = [
                builder.load(offset(builder, w, builder.add(row, const(words * v)), stored.type), align=4 * words)
                for row in rows_of_k
                for v in range(strip_vectors)
            ]
            weights = [stored.widen(builder, bits) for bits in loaded]
            result = []
            for t in range(n_tokens):
                x_k = broadcast(builder, builder.load(builder.gep(rows[t], [k])), VECTOR)
                for v in range(n_vectors):
                    result.append(multiply_add(builder, weights[v], x_k, acc[t * n_vectors + v]))
            return result

        def phis(*sources: tuple[list[Any], Any]) -> list[Any]:
            merged = []
            for i in range(len(places)):
                phi = builder.phi(VECTOR)
                for values, block in sources:
                    phi.add_incoming(values[i], block)
                merged.append(phi)
            return merged

        builder.position_at_end(pairs)
        k = builder.phi(I64)
        k.add_incoming(const(0), entry)
        acc = phis((start, entry))
        fetch(k, UNROLL)  # before the loads: behind them LLVM keeps what is loaded in registers that sums need
        new = acc
        for u in range(UNROLL):
            new = step(builder.add(k, const(u)), new)
        k_next = builder.add(k, const(UNROLL))
        k.add_incoming(k_next, pairs)
        for phi, value in zip(acc, new, strict=True):
            phi.add_incoming(value, pairs)
        builder.cbranch(builder.icmp_signed("<", k_next, whole), pairs, odd)

        builder.position_at_end(odd)
        so_far = phis((start, entry), (new, pairs))
        builder.cbranch(builder.icmp_signed("<", whole, n), last, done)

        builder.position_at_end(last)
        fetch(whole, 1)
        final = step(whole, so_far)
        builder.branch(done)

        builder.position_at_end(done)
        for place, value in zip(places, phis((so_far, odd), (final, last)), strict=True):
            builder.store(value, place, align=4)
        builder.ret_void()

    return emit


def _switch_tokens(builder: Any, n_tokens: Any, most_tokens: int, function_of: Any, call_args: list[Any]) -> None:
    """Call the tile function that function_of gives for that many tokens, 1 to most_tokens."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(n_tokens, end)
    for t in range(1, most_tokens + 1):
        block = builder.append_basic_block(f"tile.{t}")
        switch.add_case(ir.Constant(I64, t), block)
        builder.position_at_end(block)
        builder.call(function_of(t), call_args)
        builder.branch(end)
    builder.position_at_end(end)


def make_tile(name: str, emit: Any, n_vectors: int) -> Any:
    """`tile_by` of one body, which emit writes."""
    return tile_by(lambda array_type: (name, emit), n_vectors)


def tile_by(body_of: Callable[[Any], tuple[str, Any]], n_vectors: int, most_tokens: int = TILE_TOKENS) -> Any:
    """A tile over strips of n_vectors * LANES rows, for 1 to most_tokens tokens; indexes and strides are flat, in items.

    Floats: out[t, r] (+)= sum_k w[k, r] x[t, k] for k < n, ascending, fused; for n_quads see `float_body`. int8, n groups of
    n_quads: out[t, r] (+)= sum over groups of (sum_k w[r, k] x[t, k]) times both scales; see `Weights` and `quantize` for the
    layouts.
    ahead: the item of w that is fetched beside the first one; ahead_stride: the items behind it that are for each k, or quad.
    body_of: the name and the body for w's numba type.
    """

    @intrinsic
    def tile(
        typingctx, out, out_index, out_stride, w, w_index, ahead, ahead_stride, x, x_index, x_stride,
        n, n_quads, n_tokens, accumulate,
    ):  # fmt: skip
        index = types.intp
        signature = types.void(
            out, index, index, w, index, index, index, x, index, index, index, index, index, types.boolean
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (
                out, out_index, out_stride, w, w_index, ahead, ahead_stride, x, x_index, x_stride,
                n, n_quads, n_tokens, accumulate,
            ) = args  # fmt: skip
            out, w, ahead, x = [
                element_pointer(context, builder, signature.args[i], array, at, F32)
                for i, array, at in ((0, out, out_index), (3, w, w_index), (3, w, ahead), (7, x, x_index))
            ]
            name, emit = body_of(signature.args[3])
            items_per_word = const(FP32_STORAGE.item_bytes // storage_of(signature.args[3]).item_bytes)
            ahead_stride, n_quads = (builder.udiv(items, items_per_word) for items in (ahead_stride, n_quads))
            call_args = [out, out_stride, w, ahead, ahead_stride, x, x_stride, n, n_quads, accumulate]
            _switch_tokens(
                builder, n_tokens, most_tokens, lambda t: _tile_function(builder.module, name, emit, n_vectors, t), call_args
            )
            return context.get_dummy_value()

        return signature, codegen

    return tile


def float_tile(name: str, stored: Storage) -> Any:
    """The tile of a strip of floats that are stored so."""
    return make_tile(name, float_body(stored), STRIP_ROWS // LANES)


def _either(n_strips: int, most_tokens: int) -> Any:
    """The tile of so many strips of floats, or of halves: see `storage_of`."""

    def body_of(array_type: Any) -> tuple[str, Any]:
        storage = storage_of(array_type)
        return "fp32_tile" if storage is FP32_STORAGE else "fp16_tile", float_body(storage, n_strips)

    return tile_by(body_of, n_strips * STRIP_ROWS // LANES, most_tokens)


strip_tile = float_tile("fp32_tile", FP32_STORAGE)
either_tile, pair_tile = _either(1, TILE_TOKENS), _either(2, FEW_TOKENS)


@inner
def multiply_either(out, out_at, out_width, w, at, strip_items, n_strips, ahead, x, x_at, x_stride, n, n_tokens, accumulate):
    """out[t] (+)= strips of w, of floats or halves, times x[t] (n,); ahead: the items from what is read to what is fetched.

    One token's two chains of a strip would wait for each other: few tokens take two strips at a time.
    """
    strip = 0
    while strip < n_strips:
        here, out_here = at + strip * strip_items, out_at + strip * STRIP_ROWS
        if n_tokens <= FEW_TOKENS and strip + 1 < n_strips:
            pair_tile(
                out, out_here, out_width, w, here, here + ahead, STRIP_ROWS, x, x_at, x_stride,
                n, strip_items, n_tokens, accumulate,
            )  # fmt: skip
            strip += 2
        else:
            either_tile(
                out, out_here, out_width, w, here, here + ahead, STRIP_ROWS, x, x_at, x_stride, n, 0, n_tokens, accumulate
            )  # fmt: skip
            strip += 1


@inlined
def multiply_strips(tile, out, out_width, w, x, x_width, n, n_quads, n_tokens, first, last, accumulate):
    """out[t] (+)= W x[t] for the rows of strips first to last, by a tile over n, or n groups of n_quads.

    Where tokens take several tiles, the first finds its strip in the cache: each has fetched its part of it, so memory is never
    idle while they compute.
    """
    n_parts, words = ceil_div(n_tokens, TILE_TOKENS), w.shape[1] * w.shape[2]
    ahead_stride = ceil_div(w.shape[2] // (n_quads + 1), n_parts)
    for strip in range(first, last):
        here = strip * words
        for part in range(n_parts):
            t, end = share(n_tokens, part, n_parts)
            at = t * out_width + strip * STRIP_ROWS
            ahead = here + (PREFETCH_WORDS if n_parts == 1 else words + part * words // n_parts)
            tile(
                out, at, out_width, w, here, ahead, ahead_stride, x, t * x_width, x_width, n, n_quads, end - t, accumulate != 0
            )  # fmt: skip
