"""Tiles: LLVM code that multiplies a block of rows by a few tokens and keeps the sums in registers; only float weights here.

A matrix (rows, n) lies in panels of PANEL_ROWS rows, columns (k) outermost, so a vector holds LANES rows at one k. Each
accumulator is one chain, of one row and one token, so the bits do not depend on the number of tokens that share the tile. R =
PANEL_ROWS, P panels, T tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.code_cache import inlined, jitable
from specdec.runtime.simd import (  # fmt: skip
    CPU_FEATURES,
    F32,
    FP32_STORAGE,
    I8,
    I32,
    I64,
    IS_ARM64,
    LANES,
    StorageDtype,
    broadcast,
    call_llvm_intrinsic,
    ceil_div,
    get_element_pointer,
    get_storage_dtype,
    make_constant_vector,
    multiply_add,
    offset_pointer,
)
from specdec.runtime.work_stealing import get_chunk_range

PANEL_ROWS = 2 * LANES  # divides 288, 512, 768, 1376, 2048 and 32000, so the known models need no padding
FEATURES = CPU_FEATURES.split(",")
HAS_AVX512 = "+avx512f" in FEATURES
REGISTER_LANES = 16 if HAS_AVX512 else 8 if "+avx" in FEATURES else 4  # int32 or float32
N_REGISTERS = 32 if HAS_AVX512 or IS_ARM64 else 16
MAX_TILE_TOKENS = 8 if HAS_AVX512 else 4 if IS_ARM64 else 6  # over floats; ARM: by llvm-mca, 6 keep fewer units busy
MAX_PANEL_PAIR_TOKENS = 4 if HAS_AVX512 else 1  # of a tile over two panels, which needs more registers
UNROLL = 2  # steps of k per iteration: with one prefetch for both, 8 tokens of fp32 from DRAM 40 GB/s, else 33 (Zen 5)
# 8 KiB, the best of 4, 8 and 16 on Zen 5: 15M int8 from L3, 8 tokens take 0.53 ms, with the others 0.61 and 0.56.
PREFETCH_WORDS = 2048
LINE_WORDS, LINE_BYTES = 16, 64  # cache line


def prefetch(builder: Any, array: Any, at: Any, write: bool = False) -> None:
    """Emit a prefetch of the cache line that holds item `at` of an array, for reading, or for writing if `write`."""
    pointer = builder.bitcast(builder.gep(array, [at]), I8.as_pointer())
    keep, data = 3, 1
    call_llvm_intrinsic(
        builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(I32, c) for c in (int(write), keep, data))
    )


def const(value: int) -> Any:
    """Return an LLVM constant of type int64."""
    return ir.Constant(I64, value)


class TileShape(NamedTuple):
    """The block of sums that a tile keeps in registers: n_vectors vectors of `lanes` rows each, for each of n_tokens tokens."""

    lanes: int
    n_vectors: int
    n_tokens: int

    @property
    def rows(self) -> int:
        """Matrix rows that the tile covers."""
        return self.lanes * self.n_vectors

    @property
    def is_weight_stationary(self) -> bool:
        """Whether a tile keeps its weight vectors in registers and iterates over tokens; otherwise it keeps the activations."""
        return self.n_vectors * (self.n_tokens + 1) < N_REGISTERS


def choose_tile_shape(rows: int, n_tokens: int, lanes: int = REGISTER_LANES, is_weight_stationary: bool = False) -> TileShape:
    """Return the tile shape with the most rows (`rows`, half of them and so on) for which all values fit in registers.

    The values are all sums, one more register, and the weights of one k if is_weight_stationary, otherwise the weights or the
    activations, whichever are fewer. So with 16 registers of 8 lanes a tile has a panel's rows for 1 to 3 tokens, and half of
    them for 4 to 6. One thread of Zen 3 reaches 35 to 37 GMAC/s with those, of a limit of 37, and 30 to 34 where 3 tokens of a
    whole panel need one more register.
    """
    n_vectors = rows // lanes
    while (
        n_vectors > 1
        and n_vectors * n_tokens + (n_vectors if is_weight_stationary else min(n_vectors, n_tokens)) + 1 > N_REGISTERS
    ):
        n_vectors //= 2
    return TileShape(lanes, n_vectors, n_tokens)


TileShapeChooser = Callable[[int, int], TileShape]


class StridedRows(NamedTuple):
    """Rows of floats: an array, the item where the first row starts, and the items from one row to the next."""

    array: Any
    at: Any
    stride: Any


class Panel(NamedTuple):
    """A panel of weights in an array, and where its tile prefetches.

    Attributes:
        array: Array that holds the panel.
        at: Item where the panel starts.
        prefetch_at: Item where the prefetch starts.
        prefetch_stride: Items to prefetch per k, or per word of a group.
    """

    array: Any
    at: Any
    prefetch_at: Any
    prefetch_stride: Any


class Panels(NamedTuple):
    """Several consecutive panels of floats in one array.

    Attributes:
        array: Array that holds the panels.
        at: Item where the first panel starts.
        panel_stride: Items of a panel.
        n_panels: Number of panels.
        prefetch_distance: Items from what is read to what is prefetched.
    """

    array: Any
    at: Any
    panel_stride: Any
    n_panels: Any
    prefetch_distance: Any


class TileLimits(NamedTuple):
    """The maximum number of tokens of a tile, and the maximum with which it still covers all rows of a panel at once."""

    max_tokens: int
    max_full_panel_tokens: int


class MatmulSlice(NamedTuple):
    """The part of a matmul to compute: panels first to last (exclusive) for n_tokens tokens.

    out_panel_offset: Panels of the output above the matrix's own.
    """

    first: int
    last: int
    n_tokens: int
    out_panel_offset: int


class TileArgs(NamedTuple):
    """The arguments of a tile's LLVM function: pointers, and numbers of items. See `make_tile_intrinsic`.

    prefetch_stride is in bytes.
    """

    out: Any
    out_stride: Any
    w: Any
    prefetch_at: Any
    prefetch_stride: Any
    x: Any
    x_stride: Any
    n: Any
    format_arg: Any
    accumulate: Any


class RowBlock(NamedTuple):
    """One of the row blocks, each as high as a tile's shape, that split a panel: its index, their number, and its first row."""

    block_index: Any
    n_blocks: int
    first_row: Any

    def split_prefetch(self, builder: Any, start: Any, stride: Any, n: Any) -> tuple[Any, Any]:
        """Emit the start and stride of this row block's share of a prefetch of n places, given those of the panel's prefetch."""
        if self.n_blocks > 1:
            stride = builder.udiv(stride, const(self.n_blocks))
            start = builder.gep(start, [builder.mul(self.block_index, builder.mul(stride, n))])
        return start, stride


def _get_tile_function(module: Any, name: str, emit: Any, rows: int, shape: TileShape) -> Any:
    """Return a module's LLVM function over `TileArgs` for a tile of `rows` rows x shape.n_tokens tokens, created on first use.

    It runs over row blocks of shape.rows; emit writes its body.
    """
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
        emit(builder, shape, RowBlock(const(0), 1, const(0)), TileArgs(*fn.args))
    else:
        with cgutils.for_range(builder, const(count)) as blocks:
            row_block = RowBlock(blocks.index, count, builder.mul(blocks.index, const(shape.rows)))
            emit(builder, shape, row_block, TileArgs(*fn.args))
    builder.ret_void()
    return fn


def load_accumulators(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> tuple[list[Any], list[Any]]:
    """Emit the start of a tile: return pointers to its vectors of out, token by token, and the initial values of their sums.

    The initial values are out's if the tile accumulates, else 0. Also prefetches the vectors of the next panel: 64 rows of logits
    are 64 streams, more than the hardware prefetcher follows.
    """
    floats, first = ir.VectorType(F32, shape.lanes), builder.gep(tile.out, [row_block.first_row])
    pointers = [
        offset_pointer(builder, first, builder.add(builder.mul(tile.out_stride, const(t)), const(shape.lanes * v)), floats)
        for t in range(shape.n_tokens)
        for v in range(shape.n_vectors)
    ]
    for pointer in pointers[:: max(1, LINE_WORDS // shape.lanes)] if shape.n_vectors > 1 else pointers:
        prefetch(builder, builder.bitcast(pointer, F32.as_pointer()), const(shape.rows * row_block.n_blocks), write=True)
    return pointers, [
        builder.select(tile.accumulate, builder.load(pointer, align=4), make_constant_vector(floats, 0.0)) for pointer in pointers
    ]


def make_float_tile_body(storage: StorageDtype, n_panels: int = 1) -> Any:
    """Return a function that emits the body of a tile over float weights stored as `storage`, with all accumulators in registers.

    n_panels: Panels at a time. 2 panels lie format_arg items apart (otherwise unused) and give more chains for few tokens.
    """

    def emit(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> None:
        entry, n, panel_stride = builder.block, tile.n, tile.format_arg
        lanes, n_vectors, n_tokens = shape
        floats, items = ir.VectorType(F32, lanes), storage.item.as_pointer()
        unrolled, after_unrolled, last, done = (builder.append_basic_block(block) for block in ("pairs", "odd", "last", "done"))
        pointers, start = load_accumulators(builder, shape, row_block, tile)
        rows = [builder.gep(tile.x, [builder.mul(tile.x_stride, const(t))]) for t in range(n_tokens)]
        panel, row = builder.udiv(row_block.first_row, const(PANEL_ROWS)), builder.urem(row_block.first_row, const(PANEL_ROWS))
        w = builder.gep(builder.bitcast(tile.w, items), [builder.add(builder.mul(panel, panel_stride), row)])
        prefetch_at, prefetch_stride = row_block.split_prefetch(builder, tile.prefetch_at, tile.prefetch_stride, n)
        n_unrolled = builder.and_(n, const(-UNROLL))
        builder.cbranch(builder.icmp_signed(">", n_unrolled, const(0)), unrolled, after_unrolled)

        def fetch(k: Any, n_rows: int) -> None:
            for i in range(n_panels):
                offset = builder.add(builder.mul(k, prefetch_stride), builder.mul(panel_stride, const(i * storage.item_bytes)))
                for line in range(0, max(n_rows * PANEL_ROWS * storage.item_bytes // row_block.n_blocks, 1), LINE_BYTES):
                    prefetch(builder, builder.gep(prefetch_at, [offset]), const(line))

        def step(k: Any, acc: list[Any]) -> list[Any]:
            result, first = list(acc), builder.mul(k, const(PANEL_ROWS))

            def load_weights(v: int) -> Any:
                panel, row = divmod(v * lanes, PANEL_ROWS)
                at = builder.add(first, builder.add(builder.mul(panel_stride, const(panel)), const(row)))
                pointer = builder.bitcast(builder.gep(w, [at]), storage.vector(lanes).as_pointer())
                return storage.widen(builder, builder.load(pointer, align=lanes * storage.item_bytes))

            def load_activations(t: int) -> Any:
                return broadcast(builder, builder.load(builder.gep(rows[t], [k])), floats)

            def accumulate(v: int, t: int, w_k: Any, x_k: Any) -> None:
                result[t * n_vectors + v] = multiply_add(builder, w_k, x_k, acc[t * n_vectors + v])

            if shape.is_weight_stationary:
                all_weights = [load_weights(v) for v in range(n_vectors)]
                for t in range(n_tokens):
                    x_k = load_activations(t)
                    for v in range(n_vectors):
                        accumulate(v, t, all_weights[v], x_k)
            else:
                all_activations = [load_activations(t) for t in range(n_tokens)]
                for v in range(n_vectors):
                    w_k = load_weights(v)
                    for t in range(n_tokens):
                        accumulate(v, t, w_k, all_activations[t])
            return result

        def merge(*sources: tuple[list[Any], Any]) -> list[Any]:
            merged = []
            for i in range(len(pointers)):
                phi = builder.phi(floats)
                for values, block in sources:
                    phi.add_incoming(values[i], block)
                merged.append(phi)
            return merged

        builder.position_at_end(unrolled)
        k = builder.phi(I64)
        k.add_incoming(const(0), entry)
        acc = merge((start, entry))
        fetch(k, UNROLL)  # before the loads: after them, LLVM would keep loaded values in registers that the sums need
        new = acc
        for u in range(UNROLL):
            new = step(builder.add(k, const(u)), new)
        k_next = builder.add(k, const(UNROLL))
        k.add_incoming(k_next, unrolled)
        for phi, value in zip(acc, new, strict=True):
            phi.add_incoming(value, unrolled)
        builder.cbranch(builder.icmp_signed("<", k_next, n_unrolled), unrolled, after_unrolled)

        builder.position_at_end(after_unrolled)
        sums = merge((start, entry), (new, unrolled))
        builder.cbranch(builder.icmp_signed("<", n_unrolled, n), last, done)

        builder.position_at_end(last)
        fetch(n_unrolled, 1)
        final = step(n_unrolled, sums)
        builder.branch(done)

        builder.position_at_end(done)
        for pointer, value in zip(pointers, merge((sums, after_unrolled), (final, last)), strict=True):
            builder.store(value, pointer, align=4)

    return emit


def _emit_token_switch(builder: Any, n_tokens: Any, max_tokens: int, get_function: Any, tile: TileArgs) -> None:
    """Emit a switch that calls the LLVM function get_function(n_tokens) with the arguments `tile`, for 1 to max_tokens tokens."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(n_tokens, end)
    for t in range(1, max_tokens + 1):
        block = builder.append_basic_block(f"tile.{t}")
        switch.add_case(ir.Constant(I64, t), block)
        builder.position_at_end(block)
        builder.call(get_function(t), tile)
        builder.branch(end)
    builder.position_at_end(end)


def make_tile(
    name: str, emit: Any, choose_shape: TileShapeChooser = choose_tile_shape, max_tokens: int = MAX_TILE_TOKENS
) -> tuple[Any, TileLimits]:
    """Return the intrinsic of a tile over one panel and its `TileLimits`.

    Args:
        name: Name of the tile's LLVM functions.
        emit: Function that writes the tile's body.
        choose_shape: See `make_tile_intrinsic`.
        max_tokens: See `make_tile_intrinsic`.
    """
    max_full_panel_tokens = max(
        (t for t in range(1, max_tokens + 1) if choose_shape(PANEL_ROWS, t).rows == PANEL_ROWS), default=0
    )
    return make_tile_intrinsic(lambda array_type: (name, emit), PANEL_ROWS, choose_shape, max_tokens), TileLimits(
        max_tokens, max_full_panel_tokens
    )


def make_tile_intrinsic(
    get_body: Callable[[Any], tuple[str, Any]],
    rows: int,
    choose_shape: TileShapeChooser = choose_tile_shape,
    max_tokens: int = MAX_TILE_TOKENS,
) -> Any:
    """Return the intrinsic of a tile over panels of `rows` rows, for 1 to max_tokens tokens.

    Its signature is tile(out: `StridedRows`, w: `Panel`, x: `StridedRows`, n, format_arg, n_tokens, accumulate).

    Floats: out[t, r] (+)= sum_k w[k, r] x[t, k] for k < n, ascending, fused; for format_arg see `make_float_tile_body`. int8, n
    groups of format_arg words: out[t, r] (+)= sum over groups of (sum_k w[r, k] x[t, k]) times both scales; see `int8` for the
    layouts.

    Args:
        get_body: numba type of w -> name and emit function of the body.
        rows: Rows of w.
        choose_shape: (rows, tokens) -> shape of the tile.
        max_tokens: Most tokens of a tile.
    """

    @intrinsic
    def tile(typingctx, out, w, x, n, format_arg, n_tokens, accumulate):
        index = types.intp
        signature = types.void(out, w, x, index, index, index, types.boolean)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, w, x, n, format_arg, n_tokens, accumulate = args
            out, x = (StridedRows(*cgutils.unpack_tuple(builder, rows)) for rows in (out, x))
            w = Panel(*cgutils.unpack_tuple(builder, w))

            def pointer(i: int, array: Any, at: Any) -> Any:
                return get_element_pointer(context, builder, signature.args[i][0], array, at, F32)

            name, emit = get_body(signature.args[1][0])
            prefetch_at = builder.bitcast(pointer(1, w.array, w.prefetch_at), I8.as_pointer())
            prefetch_stride = builder.mul(w.prefetch_stride, const(get_storage_dtype(signature.args[1][0]).item_bytes))
            tile = TileArgs(
                pointer(0, out.array, out.at), out.stride, pointer(1, w.array, w.at), prefetch_at, prefetch_stride,
                pointer(2, x.array, x.at), x.stride, n, format_arg, accumulate,
            )  # fmt: skip

            def get_function(t: int) -> Any:
                return _get_tile_function(builder.module, name, emit, rows, choose_shape(rows, t))

            _emit_token_switch(builder, n_tokens, max_tokens, get_function, tile)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def make_float_tile(name: str, storage: StorageDtype) -> tuple[Any, TileLimits]:
    """Return the intrinsic and the `TileLimits` of a tile over floats stored as `storage`; name is that of its LLVM functions."""
    return make_tile(name, make_float_tile_body(storage))


def _make_tile_by_dtype(n_panels: int, max_tokens: int) -> Any:
    """Return the intrinsic of a tile over n_panels panels of fp32, fp16 or int8 codes, chosen by the array's dtype.

    See `get_storage_dtype`.
    """

    def get_body(array_type: Any) -> tuple[str, Any]:
        storage = get_storage_dtype(array_type)
        return {4: "fp32_tile", 2: "fp16_tile", 1: "code_tile"}[storage.item_bytes], make_float_tile_body(storage, n_panels)

    return make_tile_intrinsic(get_body, n_panels * PANEL_ROWS, max_tokens=max_tokens)


panel_tile, FLOAT_TILE_LIMITS = make_float_tile("fp32_tile", FP32_STORAGE)
panel_tile_by_dtype, panel_pair_tile_by_dtype = (
    _make_tile_by_dtype(1, MAX_TILE_TOKENS),
    _make_tile_by_dtype(2, MAX_PANEL_PAIR_TOKENS),
)


@jitable
def multiply_panels_by_dtype(out, w, x, n, n_tokens, accumulate):
    """out[t] (+)= w x[t] for w (`Panels` of float32, fp16 or int8 codes), where out[t] and x[t] (n,) are `StridedRows`.

    With up to MAX_PANEL_PAIR_TOKENS tokens, a tile covers two panels: one has so few accumulators that each addition would wait
    for the previous one.
    """
    panel = 0
    while panel < w.n_panels:
        start = w.at + panel * w.panel_stride
        rows = StridedRows(out.array, out.at + panel * PANEL_ROWS, out.stride)
        if n_tokens <= MAX_PANEL_PAIR_TOKENS and panel + 1 < w.n_panels:
            panel_pair_tile_by_dtype(
                rows, Panel(w.array, start, start + w.prefetch_distance, PANEL_ROWS), x, n, w.panel_stride, n_tokens, accumulate
            )
            panel += 2
        else:
            panel_tile_by_dtype(
                rows, Panel(w.array, start, start + w.prefetch_distance, PANEL_ROWS), x, n, 0, n_tokens, accumulate
            )
            panel += 1


@inlined
def multiply_panels(tile, limits, out, w, x, group_words, matmul_slice, accumulate):
    """out[t] (+)= W x[t] for the panels and tokens of a `MatmulSlice`, by a tile with its `TileLimits`.

    The tile runs over k, or over groups of group_words. With several row blocks or tiles, the first finds its panel in the cache:
    each of the earlier ones has prefetched a share of it, so memory is never idle while they compute.
    """
    n_tiles, words = ceil_div(matmul_slice.n_tokens, limits.max_tokens), w.shape[1] * w.shape[2]
    prefetch_stride = ceil_div(w.shape[2] // (group_words + 1), n_tiles)
    for panel in range(matmul_slice.first, matmul_slice.last):
        start = panel * words
        for i in range(n_tiles):
            t, end = get_chunk_range(matmul_slice.n_tokens, i, n_tiles)
            prefetch_at = start + (
                PREFETCH_WORDS if matmul_slice.n_tokens <= limits.max_full_panel_tokens else words + i * words // n_tiles
            )
            tile(
                StridedRows(out, t * out.shape[1] + (matmul_slice.out_panel_offset + panel) * PANEL_ROWS, out.shape[1]),
                Panel(w, start, prefetch_at, prefetch_stride),
                StridedRows(x, t * x.shape[1], x.shape[1]), w.shape[1], group_words, end - t, accumulate != 0,
            )  # fmt: skip
