"""The tile: a block of rows times a few tokens that stays in registers. Knows vectors, and no kind of weights but floats.

A matrix (rows, n) lies in strips of STRIP_ROWS rows, k innermost but for the rows, so that a vector holds LANES rows at one k.
Each accumulator is one chain, of one row and one token, whatever the number of tokens that share the tile: so bits do not depend
on it. R = STRIP_ROWS, P strips, T tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.code_cache import inlined, inner
from specdec.runtime.simd import (  # fmt: skip
    CPU_FEATURES,
    F32,
    FP32_STORAGE,
    I8,
    I32,
    I64,
    IS_ARM64,
    LANES,
    Storage,
    broadcast,
    ceil_div,
    constants,
    element_pointer,
    llvm,
    multiply_add,
    offset,
    storage_of,
)
from specdec.runtime.work_stealing import share

STRIP_ROWS = 2 * LANES  # divides 288, 512, 768, 1376, 2048 and 32000, so the known models carry no padding
FEATURES = CPU_FEATURES.split(",")
HAS_AVX512 = "+avx512f" in FEATURES
REGISTER_LANES = 16 if HAS_AVX512 else 8 if "+avx" in FEATURES else 4  # int32 or float32
REGISTERS = 32 if HAS_AVX512 or IS_ARM64 else 16
TILE_TOKENS = 8 if HAS_AVX512 else 4 if IS_ARM64 else 6  # of a tile over floats; ARM: by llvm-mca 6 keep fewer units busy
FEW_TOKENS = 4 if HAS_AVX512 else 1  # whose tile has registers for two strips
UNROLL = 2  # of k in a tile's loop: with one prefetch for both, 8 tokens of fp32 from DRAM 40 GB/s, else 33 (Zen 5)
# 8 KiB; of 4, 8 and 16 the best on Zen 5: 15M int8 from L3, 8 tokens 0.53 ms, else 0.61 and 0.56.
PREFETCH_WORDS = 2048
LINE_WORDS, LINE_BYTES = 16, 64  # of a cache line


def prefetch(builder: Any, array: Any, at: Any, write: bool = False) -> None:
    """Fetch the cache line of that item."""
    place = builder.bitcast(builder.gep(array, [at]), I8.as_pointer())
    keep, data = 3, 1
    llvm(builder, "llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(I32, c) for c in (int(write), keep, data)))


def const(value: int) -> Any:
    return ir.Constant(I64, value)


class Shape(NamedTuple):
    """What a tile keeps in registers: n_vectors of `lanes` rows, times n_tokens."""

    lanes: int
    n_vectors: int
    n_tokens: int

    @property
    def rows(self) -> int:
        return self.lanes * self.n_vectors

    @property
    def is_by_tokens(self) -> bool:
        """Whether a tile's vectors of weights stay in registers while tokens come and go; else the other way round."""
        return self.n_vectors * (self.n_tokens + 1) < REGISTERS


def shape_of(rows: int, n_tokens: int, lanes: int = REGISTER_LANES, is_by_tokens: bool = False) -> Shape:
    """Half of that many rows, a quarter and so on, until all sums fit in registers, with all weights or, unless the tile goes by
    tokens, all activations of a k, whichever are fewer, and one register more.

    So of 16 registers of 8 lanes a strip's rows with 1 to 3 tokens, half of them with 4 to 6: one thread of Zen 3 does
    35 to 37 GMAC/s with those, whose limit is 37, and 30 to 34 where 3 tokens of a whole strip need a register more.
    """
    n_vectors = rows // lanes
    while n_vectors > 1 and n_vectors * n_tokens + (n_vectors if is_by_tokens else min(n_vectors, n_tokens)) + 1 > REGISTERS:
        n_vectors //= 2
    return Shape(lanes, n_vectors, n_tokens)


Shapes = Callable[[int, int], Shape]


class Strided(NamedTuple):
    """Rows of floats: an array, the item where the first one begins, and the items from one to the next."""

    array: Any
    at: Any
    stride: Any


class Strip(NamedTuple):
    """A strip of weights: an array, the item where it begins, the one that is fetched beside it, and the items behind that one
    that are for each k, or quad."""

    array: Any
    at: Any
    ahead: Any
    ahead_stride: Any


class Strips(NamedTuple):
    """Strips of floats: an array, the item where the first begins, the items of each, their number, and the items from what is
    read to what is fetched."""

    array: Any
    at: Any
    n_items: Any
    n: Any
    ahead: Any


class Tokens(NamedTuple):
    """Of a tile: the most that it takes, and the most that it takes with all rows of a strip at once."""

    most: int
    whole: int


class Work(NamedTuple):
    """What is computed of a product: strips first to last, for so many tokens; above: strips of what is computed above them."""

    first: int
    last: int
    n_tokens: int
    above: int


class Tile(NamedTuple):
    """The arguments of a tile's LLVM function: pointers, and numbers of items; ahead_stride in bytes. See `tile_by`."""

    out: Any
    out_stride: Any
    w: Any
    ahead: Any
    ahead_stride: Any
    x: Any
    x_stride: Any
    n: Any
    n_quads: Any
    accumulate: Any


class Sweep(NamedTuple):
    """One of several over a strip, each of as many rows as the tile's shape has: its number, their total, its first row."""

    number: Any
    total: int
    row: Any

    def ahead(self, builder: Any, ahead: Any, stride: Any, n: Any) -> tuple[Any, Any]:
        """Its part of what all of them fetch at n places from `ahead` on, and the stride of that."""
        if self.total > 1:
            stride = builder.udiv(stride, const(self.total))
            ahead = builder.gep(ahead, [builder.mul(self.number, builder.mul(stride, n))])
        return ahead, stride


def _tile_function(module: Any, name: str, emit: Any, rows: int, shape: Shape) -> Any:
    """The LLVM function of one `Tile`, rows x shape.n_tokens in sweeps of shape.rows, whose body emit writes."""
    name = f"specdec_{name}_{rows}x{shape.n_tokens}"
    if name in module.globals:
        return module.globals[name]
    words = F32.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [words, I64, words, I8.as_pointer(), I64, words, I64, I64, I64, ir.IntType(1)])
    fn = ir.Function(module, signature, name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    builder, count = ir.IRBuilder(fn.append_basic_block("entry")), rows // shape.rows
    if count == 1:
        emit(builder, shape, Sweep(const(0), 1, const(0)), Tile(*fn.args))
    else:
        with cgutils.for_range(builder, const(count)) as sweeps:
            sweep = Sweep(sweeps.index, count, builder.mul(sweeps.index, const(shape.rows)))
            emit(builder, shape, sweep, Tile(*fn.args))
    builder.ret_void()
    return fn


def cells(builder: Any, shape: Shape, sweep: Sweep, tile: Tile) -> tuple[list[Any], list[Any]]:
    """Where a tile's vectors of out lie, those of a token side by side, and what each starts from.

    The next strip's are fetched: 64 rows of logits are as many streams, more than the hardware follows.
    """
    floats, first = ir.VectorType(F32, shape.lanes), builder.gep(tile.out, [sweep.row])
    places = [
        offset(builder, first, builder.add(builder.mul(tile.out_stride, const(t)), const(shape.lanes * v)), floats)
        for t in range(shape.n_tokens)
        for v in range(shape.n_vectors)
    ]
    for place in places[:: max(1, LINE_WORDS // shape.lanes)] if shape.n_vectors > 1 else places:
        prefetch(builder, builder.bitcast(place, F32.as_pointer()), const(shape.rows * sweep.total), write=True)
    return places, [builder.select(tile.accumulate, builder.load(place, align=4), constants(floats, 0.0)) for place in places]


def float_body(stored: Storage, n_strips: int = 1) -> Any:
    """The body of a tile over weights that are floats, stored so: all accumulators in registers.

    n_strips: 1, or 2 at a time, n_quads items from one to the other, which else is of no meaning: more chains for few tokens.
    """

    def emit(builder: Any, shape: Shape, sweep: Sweep, tile: Tile) -> None:
        entry, n, n_quads = builder.block, tile.n, tile.n_quads
        lanes, n_vectors, n_tokens = shape
        floats, items = ir.VectorType(F32, lanes), stored.item.as_pointer()
        pairs, odd, last, done = (builder.append_basic_block(block) for block in ("pairs", "odd", "last", "done"))
        places, start = cells(builder, shape, sweep, tile)
        rows = [builder.gep(tile.x, [builder.mul(tile.x_stride, const(t))]) for t in range(n_tokens)]
        strip, row = builder.udiv(sweep.row, const(STRIP_ROWS)), builder.urem(sweep.row, const(STRIP_ROWS))
        w = builder.gep(builder.bitcast(tile.w, items), [builder.add(builder.mul(strip, n_quads), row)])
        ahead, ahead_stride = sweep.ahead(builder, tile.ahead, tile.ahead_stride, n)
        whole = builder.and_(n, const(-UNROLL))
        builder.cbranch(builder.icmp_signed(">", whole, const(0)), pairs, odd)

        def fetch(k: Any, n_rows: int) -> None:
            for i in range(n_strips):
                place = builder.add(builder.mul(k, ahead_stride), builder.mul(n_quads, const(i * stored.item_bytes)))
                for line in range(0, max(n_rows * STRIP_ROWS * stored.item_bytes // sweep.total, 1), LINE_BYTES):
                    prefetch(builder, builder.gep(ahead, [place]), const(line))

        def step(k: Any, acc: list[Any]) -> list[Any]:
            result, first = list(acc), builder.mul(k, const(STRIP_ROWS))

            def weights(v: int) -> Any:
                strip, row = divmod(v * lanes, STRIP_ROWS)
                at = builder.add(first, builder.add(builder.mul(n_quads, const(strip)), const(row)))
                place = builder.bitcast(builder.gep(w, [at]), stored.vector(lanes).as_pointer())
                return stored.widen(builder, builder.load(place, align=lanes * stored.item_bytes))

            def activations(t: int) -> Any:
                return broadcast(builder, builder.load(builder.gep(rows[t], [k])), floats)

            def multiply(v: int, t: int, w_k: Any, x_k: Any) -> None:
                result[t * n_vectors + v] = multiply_add(builder, w_k, x_k, acc[t * n_vectors + v])

            if shape.is_by_tokens:
                all_weights = [weights(v) for v in range(n_vectors)]
                for t in range(n_tokens):
                    x_k = activations(t)
                    for v in range(n_vectors):
                        multiply(v, t, all_weights[v], x_k)
            else:
                all_activations = [activations(t) for t in range(n_tokens)]
                for v in range(n_vectors):
                    w_k = weights(v)
                    for t in range(n_tokens):
                        multiply(v, t, w_k, all_activations[t])
            return result

        def phis(*sources: tuple[list[Any], Any]) -> list[Any]:
            merged = []
            for i in range(len(places)):
                phi = builder.phi(floats)
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

    return emit


def _switch_tokens(builder: Any, n_tokens: Any, most_tokens: int, function_of: Any, tile: Tile) -> None:
    """Call the tile function that function_of gives for that many tokens, 1 to most_tokens."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(n_tokens, end)
    for t in range(1, most_tokens + 1):
        block = builder.append_basic_block(f"tile.{t}")
        switch.add_case(ir.Constant(I64, t), block)
        builder.position_at_end(block)
        builder.call(function_of(t), tile)
        builder.branch(end)
    builder.position_at_end(end)


def make_tile(name: str, emit: Any, shapes: Shapes = shape_of, most_tokens: int = TILE_TOKENS) -> tuple[Any, Tokens]:
    """`tile_by` of one body over a strip, which emit writes, and what it takes."""
    whole = max((t for t in range(1, most_tokens + 1) if shapes(STRIP_ROWS, t).rows == STRIP_ROWS), default=0)
    return tile_by(lambda array_type: (name, emit), STRIP_ROWS, shapes, most_tokens), Tokens(most_tokens, whole)


def tile_by(
    body_of: Callable[[Any], tuple[str, Any]], rows: int, shapes: Shapes = shape_of, most_tokens: int = TILE_TOKENS
) -> Any:
    """A tile over strips of so many rows, for 1 to most_tokens tokens: tile(out: `Strided`, w: `Strip`, x: `Strided`, n, n_quads,
    n_tokens, accumulate).

    Floats: out[t, r] (+)= sum_k w[k, r] x[t, k] for k < n, ascending, fused; for n_quads see `float_body`. int8, n groups of
    n_quads: out[t, r] (+)= sum over groups of (sum_k w[r, k] x[t, k]) times both scales; see `Weights` and `quantize` for the
    layouts.
    body_of: the name and the body for w's numba type. shapes: of the rows and some tokens, the shape that takes them.
    """

    @intrinsic
    def tile(typingctx, out, w, x, n, n_quads, n_tokens, accumulate):
        index = types.intp
        signature = types.void(out, w, x, index, index, index, types.boolean)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, w, x, n, n_quads, n_tokens, accumulate = args
            out, x = (Strided(*cgutils.unpack_tuple(builder, rows)) for rows in (out, x))
            w = Strip(*cgutils.unpack_tuple(builder, w))

            def pointer(i: int, array: Any, at: Any) -> Any:
                return element_pointer(context, builder, signature.args[i][0], array, at, F32)

            name, emit = body_of(signature.args[1][0])
            ahead = builder.bitcast(pointer(1, w.array, w.ahead), I8.as_pointer())
            ahead_stride = builder.mul(w.ahead_stride, const(storage_of(signature.args[1][0]).item_bytes))
            tile = Tile(
                pointer(0, out.array, out.at), out.stride, pointer(1, w.array, w.at), ahead, ahead_stride,
                pointer(2, x.array, x.at), x.stride, n, n_quads, accumulate,
            )  # fmt: skip

            def function_of(t: int) -> Any:
                return _tile_function(builder.module, name, emit, rows, shapes(rows, t))

            _switch_tokens(builder, n_tokens, most_tokens, function_of, tile)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def float_tile(name: str, stored: Storage) -> tuple[Any, Tokens]:
    """`make_tile` of floats that are stored so."""
    return make_tile(name, float_body(stored))


def _either(n_strips: int, most_tokens: int) -> Any:
    """The tile of so many strips of floats, halves or codes: see `storage_of`."""

    def body_of(array_type: Any) -> tuple[str, Any]:
        storage = storage_of(array_type)
        return {4: "fp32_tile", 2: "fp16_tile", 1: "code_tile"}[storage.item_bytes], float_body(storage, n_strips)

    return tile_by(body_of, n_strips * STRIP_ROWS, most_tokens=most_tokens)


strip_tile, FLOAT_TOKENS = float_tile("fp32_tile", FP32_STORAGE)
either_tile, pair_tile = _either(1, TILE_TOKENS), _either(2, FEW_TOKENS)


@inner
def multiply_either(out, w, x, n, n_tokens, accumulate):
    """out[t] (+)= `Strips` of floats or halves, times x[t] (n,): `Strided`.

    One token's two chains of a strip would wait for each other: few tokens take two strips at a time.
    """
    strip = 0
    while strip < w.n:
        here = w.at + strip * w.n_items
        rows = Strided(out.array, out.at + strip * STRIP_ROWS, out.stride)
        if n_tokens <= FEW_TOKENS and strip + 1 < w.n:
            pair_tile(rows, Strip(w.array, here, here + w.ahead, STRIP_ROWS), x, n, w.n_items, n_tokens, accumulate)
            strip += 2
        else:
            either_tile(rows, Strip(w.array, here, here + w.ahead, STRIP_ROWS), x, n, 0, n_tokens, accumulate)
            strip += 1


@inlined
def multiply_strips(tile, tokens, out, w, x, n_quads, work, accumulate):
    """out[t] (+)= W x[t] for the strips and tokens of `Work`, by a tile, which takes `Tokens`, over k, or groups of n_quads.

    Where there are several sweeps or tiles, the first finds its strip in the cache: each has fetched its part of it, so memory is
    never idle while they compute.
    """
    n_parts, words = ceil_div(work.n_tokens, tokens.most), w.shape[1] * w.shape[2]
    ahead_stride = ceil_div(w.shape[2] // (n_quads + 1), n_parts)
    for strip in range(work.first, work.last):
        here = strip * words
        for part in range(n_parts):
            t, end = share(work.n_tokens, part, n_parts)
            ahead = here + (PREFETCH_WORDS if work.n_tokens <= tokens.whole else words + part * words // n_parts)
            tile(
                Strided(out, t * out.shape[1] + (work.above + strip) * STRIP_ROWS, out.shape[1]),
                Strip(w, here, ahead, ahead_stride),
                Strided(x, t * x.shape[1], x.shape[1]), w.shape[1], n_quads, end - t, accumulate != 0,
            )  # fmt: skip
