"""The tile of dot products between queries and rows that lie in panels of columns, such as the values in a KV cache.

A row's numbers lie in panels of R = PANEL_ROWS columns, and the rows of a panel follow each other. A sum is one chain per lane,
over the vectors of a row in ascending order, and then a tree over lanes. So its bits do not depend on the other sums of a tile.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.code_cache import jitable
from specdec.runtime.matmul_tile import StridedRows, const
from specdec.runtime.simd import (
    F32,
    FLOAT_VECTOR,
    HAS_AVX512,
    I32,
    I64,
    LANES,
    PANEL_ROWS,
    StorageDtype,
    get_element_pointer,
    get_storage_dtype,
    make_constant_vector,
    multiply_add,
)

MAX_DOT_QUERIES = 4 if HAS_AVX512 else 2
# Rows of a tile of up to half of these, and of one of more: enough sums to hide an addition's time, few enough for registers.
DOT_ROWS, MANY_DOT_ROWS = (8, 4) if HAS_AVX512 else (4, 2)


@jitable
def count_tile_rows(n_queries: int) -> int:
    """Return the number of rows of a tile of n_queries queries."""
    return DOT_ROWS if n_queries <= MAX_DOT_QUERIES // 2 else MANY_DOT_ROWS


def _make_mask(lanes: list[int]) -> Any:
    """Return the LLVM constant that selects these lanes of two vectors."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)


def _reduce_add(builder: Any, vectors: list[Any]) -> Any:
    """Emit a vector of the sums of a power of two of vectors, at most LANES; each is a tree that adds the halves of a vector."""
    n = LANES  # lanes per sum
    while n > 1:
        halves, pairs = n // 2, [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = []
        for pair in pairs:
            starts = range(0, sum(vector.type.count for vector in pair), n)
            low, high = (
                builder.shuffle_vector(pair[0], pair[-1], _make_mask([start + at + i for start in starts for i in range(halves)]))
                for at in (0, halves)
            )
            vectors.append(builder.fadd(low, high))
        n = halves
    return vectors[0]


def _get_dot_function(module: Any, storage: StorageDtype, n_queries: int) -> Any:
    """Return a module's LLVM function of a tile of n_queries queries over rows stored as `storage`, created on first use."""
    n_rows = count_tile_rows(n_queries)
    name = f"specdec_dot{storage.item_bytes}_{n_rows}x{n_queries}"
    if name in module.globals:
        return module.globals[name]
    words, items = F32.as_pointer(), storage.item.as_pointer()
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [words, I64, items, I64, words, I64, I64]), name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    entry = fn.append_basic_block("entry")
    builder = ir.IRBuilder(entry)
    out, out_stride, w, w_stride, x, x_stride, n_panels = fn.args
    queries = [builder.gep(x, [builder.mul(x_stride, const(q))]) for q in range(n_queries)]
    loop, done = fn.append_basic_block("panels"), fn.append_basic_block("done")
    builder.branch(loop)

    def load(pointer: Any, vector: Any, align: int) -> Any:
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align)

    builder.position_at_end(loop)
    panel = builder.phi(I64)
    panel.add_incoming(const(0), entry)
    sums = [builder.phi(FLOAT_VECTOR) for _ in range(n_queries * n_rows)]
    new: list[Any] = list(sums)
    start, columns = builder.mul(panel, w_stride), builder.mul(panel, const(PANEL_ROWS))
    for half in range(0, PANEL_ROWS, LANES):
        rows = [
            storage.widen(
                builder,
                load(builder.gep(w, [builder.add(start, const(r * PANEL_ROWS + half))]), storage.full_vector, storage.item_bytes),
            )
            for r in range(n_rows)
        ]
        for q in range(n_queries):
            query = load(builder.gep(queries[q], [builder.add(columns, const(half))]), FLOAT_VECTOR, 4)
            for r in range(n_rows):
                new[q * n_rows + r] = multiply_add(builder, rows[r], query, new[q * n_rows + r])
    following = builder.add(panel, const(1))
    panel.add_incoming(following, loop)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(make_constant_vector(FLOAT_VECTOR, 0.0), entry)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, n_panels), loop, done)

    builder.position_at_end(done)
    for q in range(n_queries):
        dots = _reduce_add(builder, new[q * n_rows : (q + 1) * n_rows])
        target = builder.gep(out, [builder.mul(out_stride, const(q))])
        builder.store(dots, builder.bitcast(target, dots.type.as_pointer()), align=4)
    builder.ret_void()
    return fn


@intrinsic
def dot_tile(typingctx, out, w, x, n_panels, n_queries):
    """out[q, r] = x[q] . row r for 1 to MAX_DOT_QUERIES queries, and the `count_tile_rows` rows from w.at on.

    out, x: `StridedRows` of float32; w: `StridedRows` whose stride leads from a panel to the next; n_panels: panels of a row.
    """
    signature = types.void(out, w, x, types.intp, types.intp)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, w, x = (StridedRows(*cgutils.unpack_tuple(builder, rows)) for rows in args[:3])
        storage = get_storage_dtype(signature.args[1][0])

        def pointer(i: int, rows: StridedRows, item: Any) -> Any:
            return get_element_pointer(context, builder, signature.args[i][0], rows.array, rows.at, item)

        values = [
            pointer(0, out, F32), out.stride, pointer(1, w, storage.item), w.stride, pointer(2, x, F32), x.stride, args[3],
        ]  # fmt: skip
        end = builder.append_basic_block("dot.end")
        switch = builder.switch(args[4], end)
        for n in range(1, MAX_DOT_QUERIES + 1):
            block = builder.append_basic_block(f"dot.{n}")
            switch.add_case(ir.Constant(I64, n), block)
            builder.position_at_end(block)
            builder.call(_get_dot_function(builder.module, storage, n), values)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, codegen


@jitable
def compute_dots(out, w, x, n_panels, n_rows, n_queries):
    """out[q, r] = x[q] . row r for n_queries queries x and n_rows rows of w, a multiple of PANEL_ROWS; see `dot_tile`."""
    query = 0
    while query < n_queries:
        n = min(n_queries - query, MAX_DOT_QUERIES)
        step = count_tile_rows(n)
        for row in range(0, n_rows, step):
            dot_tile(
                StridedRows(out.array, out.at + query * out.stride + row, out.stride),
                StridedRows(w.array, w.at + row * PANEL_ROWS, w.stride),
                StridedRows(x.array, x.at + query * x.stride, x.stride), n_panels, n,
            )  # fmt: skip
        query += n
