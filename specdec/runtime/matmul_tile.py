"""A tile as LLVM code, for weights of 12 bits; all others are written as compiled functions (quant/matmul.py).

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

from specdec.runtime.simd import (
    F32,
    I8,
    I32,
    I64,
    LINE_WORDS,
    PANEL_ROWS,
    call_llvm_intrinsic,
    get_element_pointer,
    get_storage_dtype,
    make_constant_vector,
    offset_pointer,
)


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


class TileLimits(NamedTuple):
    """The maximum number of tokens of a tile, and the maximum with which it still covers all rows of a panel at once."""

    max_tokens: int
    max_full_panel_tokens: int


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


def make_tile(name: str, emit: Any, choose_shape: TileShapeChooser, max_tokens: int) -> tuple[Any, TileLimits]:
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
    choose_shape: TileShapeChooser,
    max_tokens: int,
) -> Any:
    """Return the intrinsic of a tile over panels of `rows` rows, for 1 to max_tokens tokens.

    Its signature is tile(out: `StridedRows`, w: `Panel`, x: `StridedRows`, n, format_arg, n_tokens, accumulate).

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
