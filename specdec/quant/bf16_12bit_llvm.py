"""LLVM code that reads and writes the column blocks of packed bf16 weights; `bf16_12bit` describes their layout."""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.matmul_tile import RowBlock, TileArgs, TileShape, const, load_accumulators, prefetch
from specdec.runtime.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    IS_ARM64,
    LINE_BYTES,
    N_REGISTERS,
    PANEL_ROWS,
    REGISTER_LANES,
    broadcast,
    call_llvm_intrinsic,
    get_element_pointer,
    make_constant_vector,
    make_intrinsic,
    multiply_add,
    shuffle,
)
from specdec.runtime.tile_simd import TABLE_BYTES, Lookup, emit_lookup, interleave

BLOCK_COLUMNS = 4
HALF_BLOCK_BYTES = 64  # 16 rows of a block
BLOCK_WORDS, SLOT_BYTES = 48, 2 * HALF_BLOCK_BYTES
FIRST_SLOT_WORD, USED_SLOTS_WORD = 5, 6  # words back from the blocks; the number of used slots is only in the first header
FLAGS_END_BYTES = 4 * USED_SLOTS_WORD  # bytes back from the blocks
MAX_UNPACKED_VECTORS = N_REGISTERS // 8  # vectors that are unpacked before they are multiplied


class ColumnBlock(NamedTuple):
    """A column block of a packed panel: a pointer to the block, whether it has an overflow slot, and the number of the slot."""

    pointer: Any
    has_slot: Any
    slot: Any


class PanelBlocks(NamedTuple):
    """The column blocks of a packed panel: the array, the word where they start, their number, and the words to its end."""

    array: Any
    at: Any
    n: Any
    words_to_end: Any


class PackedPanelReader:
    """A generator of LLVM code that reads a panel of 12-bit bf16 weights, block by block, in vectors of `lanes` rows.

    A damaged header reads at most what lies between the panel and the end of the matrix.
    """

    def __init__(
        self, builder: Any, blocks: Any, n: Any, to_end: Any, lanes: int, lookup: Lookup, get_next_slot: Any = None
    ) -> None:
        """Emit the code that reads the panel's header: its table and its first overflow slot.

        Args:
            builder: LLVM IR builder.
            blocks: Pointer to the panel's first block.
            n: Number of blocks.
            to_end: Words from the blocks to the end of the matrix, where the overflow pool starts.
            lanes: Rows per vector.
            lookup: See `choose_lookup`.
            get_next_slot: Emits the next slot, given the panel's first slot; None: that slot.
        """
        self.builder, self.lanes, self.lookup = builder, lanes, lookup
        self.byte_vector, self.word_vector, self.float_vector = (
            ir.VectorType(item_type, n) for item_type, n in ((I8, BLOCK_COLUMNS * lanes), (I32, lanes), (F32, lanes))
        )
        self.blocks, self.bytes_to_end = builder.bitcast(blocks, I8.as_pointer()), builder.shl(to_end, const(2))
        self.flags = builder.gep(self.blocks, [builder.sub(const(-FLAGS_END_BYTES), n)])
        self.table = self.load(self.blocks, const(-TABLE_BYTES), ir.VectorType(I8, TABLE_BYTES), TABLE_BYTES)
        first = builder.zext(self.load(self.blocks, const(-4 * FIRST_SLOT_WORD), I32, 4), I64)
        self.slot = cgutils.alloca_once_value(builder, first if get_next_slot is None else get_next_slot(first))

    def load(self, pointer: Any, at: Any, value_type: Any, align: int) -> Any:
        """Emit the load of a value of value_type that lies `at` bytes after a pointer."""
        address = self.builder.gep(pointer, [at])
        return self.builder.load(self.builder.bitcast(address, value_type.as_pointer()), align=align)

    def read_block(self, number: Any) -> ColumnBlock:
        """Emit the code that reads the flag of block `number`, and return the block; blocks must be read in order."""
        builder, slot = self.builder, self.builder.load(self.slot)
        flag = builder.load(builder.gep(self.flags, [number]))
        builder.store(builder.add(slot, builder.zext(flag, I64)), self.slot)
        pointer = builder.gep(self.blocks, [builder.mul(number, const(4 * BLOCK_WORDS))])
        return ColumnBlock(pointer, builder.icmp_unsigned("!=", flag, I8(0)), slot)

    def unpack_weights(self, block: ColumnBlock, rows: list[Any]) -> list[list[Any]]:
        """Emit a block's weights as floats: for each column, a list with one vector of `lanes` rows from each given row on."""
        builder, align = self.builder, BLOCK_COLUMNS * self.lanes
        uppers = [cgutils.alloca_once(builder, self.byte_vector) for _ in rows]
        halves = [builder.lshr(row, const(4)) for row in rows]
        offsets = [builder.shl(builder.and_(row, const(15)), const(2)) for row in rows]
        byte_offsets = [
            builder.add(builder.mul(half, const(HALF_BLOCK_BYTES)), at) for half, at in zip(halves, offsets, strict=True)
        ]
        with builder.if_else(block.has_slot, likely=False) as (in_overflow, coded):
            with in_overflow:
                back = builder.mul(builder.add(block.slot, const(1)), const(SLOT_BYTES))
                back = builder.select(builder.icmp_unsigned("<", back, self.bytes_to_end), back, self.bytes_to_end)
                slot = builder.gep(self.blocks, [builder.sub(self.bytes_to_end, back)])
                for upper, byte_offset in zip(uppers, byte_offsets, strict=True):
                    builder.store(self.load(slot, byte_offset, self.byte_vector, align), upper)
            with coded:
                for upper, half, at in zip(uppers, halves, offsets, strict=True):
                    shift = broadcast(builder, builder.trunc(builder.shl(half, const(2)), I32), self.word_vector)
                    codes = builder.lshr(self.load(block.pointer, at, self.word_vector, align), shift)
                    codes = builder.bitcast(codes, self.byte_vector)
                    builder.store(emit_lookup(builder, self.table, codes, self.lookup), upper)
        columns: list[list[Any]] = [[] for _ in range(BLOCK_COLUMNS)]
        for upper, byte_offset in zip(uppers, byte_offsets, strict=True):
            lower = self.load(block.pointer, builder.add(byte_offset, const(HALF_BLOCK_BYTES)), self.byte_vector, align)
            for pair in range(2):
                first = [16 * i + 8 * pair + j for i in range(self.lanes // 4) for j in range(8)]
                lanes = [lane for j in first for lane in (j, j + align)]
                both = builder.bitcast(interleave(builder, lower, builder.load(upper), lanes), self.word_vector)
                even, odd = (
                    builder.shl(both, make_constant_vector(self.word_vector, 16)),
                    builder.and_(both, make_constant_vector(self.word_vector, -1 << 16)),
                )
                columns[2 * pair].append(builder.bitcast(even, self.float_vector))
                columns[2 * pair + 1].append(builder.bitcast(odd, self.float_vector))
        return columns


def choose_packed_tile_shape(rows: int, n_tokens: int) -> TileShape:
    """Return the tile shape with the most rows (`rows`, half of them and so on) for which all values fit in registers.

    The values are the sums and the words of a few vectors of 12-bit weights.
    """
    n_vectors = rows // REGISTER_LANES
    while n_vectors > 1 and n_vectors * n_tokens + 2 * min(n_vectors, MAX_UNPACKED_VECTORS) + 2 > N_REGISTERS:
        n_vectors //= 2
    return TileShape(REGISTER_LANES, n_vectors, n_tokens)


def make_packed_tile_body(lookup: Lookup) -> Any:
    """Return a function that emits the body of a tile over weights of 12 bits: n blocks, format_arg words to the matrix's end."""

    def emit(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> None:
        lanes, n_vectors, n_tokens = shape
        out_pointers, initial_sums = load_accumulators(builder, shape, row_block, tile)
        totals = [cgutils.alloca_once_value(builder, initial) for initial in initial_sums]
        panel = PackedPanelReader(builder, tile.w, tile.n, tile.format_arg, lanes, lookup)
        prefetch_at, prefetch_stride = row_block.split_prefetch(builder, tile.prefetch_at, tile.prefetch_stride, tile.n)
        x_pointers = [builder.gep(tile.x, [builder.mul(tile.x_stride, const(t))]) for t in range(n_tokens)]
        n_unpacked = min(n_vectors, MAX_UNPACKED_VECTORS)

        def activations(t: int, k: int, at: Any) -> Any:
            pointer = builder.gep(x_pointers[t], [at])
            if not IS_ARM64:
                return broadcast(builder, builder.load(builder.gep(pointer, [const(k)])), panel.float_vector)
            four = builder.load(builder.bitcast(pointer, panel.float_vector.as_pointer()), align=4)  # fmla takes single lanes
            return shuffle(builder, four, [k] * lanes)

        with cgutils.for_range(builder, tile.n) as blocks:
            block, at = panel.read_block(blocks.index), builder.shl(blocks.index, const(2))
            block_prefetch = builder.gep(prefetch_at, [builder.mul(blocks.index, prefetch_stride)])
            for line in range(0, 4 * BLOCK_WORDS // row_block.n_blocks, LINE_BYTES):
                prefetch(builder, block_prefetch, const(line))
            for first in range(0, n_vectors, n_unpacked):
                vectors = range(first, first + n_unpacked)
                weights = panel.unpack_weights(block, [builder.add(row_block.first_row, const(lanes * v)) for v in vectors])
                for k in range(BLOCK_COLUMNS):
                    for t in range(n_tokens):
                        x_k = activations(t, k, at)
                        for v in vectors:
                            total = totals[t * n_vectors + v]
                            builder.store(multiply_add(builder, weights[k][v - first], x_k, builder.load(total)), total)
        for pointer, total in zip(out_pointers, totals, strict=True):
            builder.store(builder.load(total), pointer, align=4)

    return emit


def get_argument_pointer(context: Any, builder: Any, signature: Any, args: Any, i: int, at: Any, item_type: Any = F32) -> Any:
    """Emit a pointer to item `at` of the array that is argument i of an intrinsic, as a pointer to item_type."""
    return get_element_pointer(context, builder, signature.args[i], args[i], at, item_type)


def make_unpack_intrinsic(lookup: Lookup) -> Any:
    """Return the intrinsic unpack(out, out_at, panel: `PanelBlocks`, first, last, slot), which unpacks 12-bit weights to floats.

    It unpacks a panel's blocks first to last (exclusive) to floats (k, R), from item out_at of out on. slot: the overflow slot of
    the first block; block 0 takes it from the panel's header. Returns the next block's slot.
    """

    @intrinsic
    def unpack(typingctx, out, out_at, panel, first, last, slot):
        signature = types.int64(out, types.int64, panel, *[types.int64] * 3)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            begin = get_argument_pointer(context, builder, signature, args, 0, args[1])
            source, (first, last, slot) = PanelBlocks(*cgutils.unpack_tuple(builder, args[2])), args[3:]
            blocks = get_element_pointer(context, builder, signature.args[2][0], source.array, source.at, F32)

            def get_slot(header_slot: Any) -> Any:
                return builder.select(builder.icmp_signed("==", first, const(0)), header_slot, slot)

            lanes = REGISTER_LANES
            panel = PackedPanelReader(builder, blocks, source.n, source.words_to_end, lanes, lookup, get_slot)
            with cgutils.for_range(builder, builder.sub(last, first)) as indexes:
                block = panel.read_block(builder.add(first, indexes.index))
                pointer = builder.gep(begin, [builder.mul(indexes.index, const(BLOCK_COLUMNS * PANEL_ROWS))])
                for row in range(0, PANEL_ROWS, MAX_UNPACKED_VECTORS * lanes):
                    rows = [row + lanes * v for v in range(min(MAX_UNPACKED_VECTORS, PANEL_ROWS // lanes))]
                    for k, vectors in enumerate(panel.unpack_weights(block, [const(r) for r in rows])):
                        for r, floats in zip(rows, vectors, strict=True):
                            target = builder.gep(pointer, [const(k * PANEL_ROWS + r)])
                            builder.store(floats, builder.bitcast(target, panel.float_vector.as_pointer()), align=4)
            return builder.load(panel.slot)

        return signature, codegen

    return unpack


@intrinsic
def count_words_between(typingctx, a, b):
    """Return the number of 4-byte words from the start of array a to the start of array b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        begin, end = (get_argument_pointer(context, builder, signature, args, i, const(0)) for i in range(2))
        return builder.ashr(builder.sub(builder.ptrtoint(end, I64), builder.ptrtoint(begin, I64)), const(2))

    return types.int64(a, b), codegen


def _emit_bf16_to_float(builder: Any, upper: Any, lower: Any) -> Any:
    """Emit the float32 of a bf16 that is given by its upper and its lower byte."""
    bits = builder.or_(builder.shl(upper, const(24)), builder.shl(lower, const(16)))
    return builder.bitcast(builder.trunc(bits, I32), F32)


bf16_to_float = make_intrinsic(types.float32, *[types.int64] * 2, emit=_emit_bf16_to_float)


@intrinsic
def pack_blocks(typingctx, panels, blocks_at, n, columns, columns_at):
    """Pack columns (k, R) of bf16 bits into n column blocks of 12-bit weights, and return how many need an overflow slot.

    The blocks start at word blocks_at of panels, the columns at item columns_at. Uses the table in front of the blocks. Sets each
    block's flag if it needs a slot.
    """
    signature = types.int64(panels, types.int64, types.int64, columns, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n, byte_vector, half_vector = args[2], ir.VectorType(I8, HALF_BLOCK_BYTES), ir.VectorType(I16, PANEL_ROWS // 2)
        blocks = builder.bitcast(get_argument_pointer(context, builder, signature, args, 0, args[1]), I8.as_pointer())
        source = get_argument_pointer(context, builder, signature, args, 3, args[4], I16)
        table = builder.load(
            builder.bitcast(builder.gep(blocks, [const(-TABLE_BYTES)]), ir.VectorType(I8, TABLE_BYTES).as_pointer()), align=1
        )
        n_slots = cgutils.alloca_once_value(builder, const(0))
        lanes = [k * 16 + 4 * i + j for i in range(4) for pair in range(2) for j in range(4) for k in (2 * pair, 2 * pair + 1)]
        with cgutils.for_range(builder, n) as indexes:
            q, codes, known_bytes = indexes.index, [], []
            block = builder.gep(blocks, [builder.mul(q, const(4 * BLOCK_WORDS))])
            block_source = builder.gep(source, [builder.mul(q, const(BLOCK_COLUMNS * PANEL_ROWS))])
            for half in range(2):
                items = [builder.gep(block_source, [const(k * PANEL_ROWS + half * 16)]) for k in range(BLOCK_COLUMNS)]
                columns = [builder.load(builder.bitcast(item, half_vector.as_pointer()), align=2) for item in items]
                first_columns, last_columns = (interleave(builder, columns[k], columns[k + 1], range(PANEL_ROWS)) for k in (0, 2))
                both = interleave(builder, first_columns, last_columns, lanes)
                upper = builder.trunc(builder.lshr(both, make_constant_vector(both.type, 8)), byte_vector)
                code, is_known = make_constant_vector(byte_vector, 0), make_constant_vector(byte_vector, 0)
                for i in reversed(range(TABLE_BYTES)):
                    is_match = builder.icmp_unsigned("==", upper, shuffle(builder, table, [i] * HALF_BLOCK_BYTES))
                    code = builder.select(is_match, make_constant_vector(byte_vector, i), code)
                    is_known = builder.or_(is_known, builder.sext(is_match, byte_vector))
                target = builder.gep(block, [const(HALF_BLOCK_BYTES + half * HALF_BLOCK_BYTES)])
                builder.store(builder.trunc(both, byte_vector), builder.bitcast(target, byte_vector.as_pointer()), align=1)
                codes.append(code)
                known_bytes.append(is_known)
            code_bytes = builder.or_(codes[0], builder.shl(codes[1], make_constant_vector(byte_vector, 4)))
            builder.store(code_bytes, builder.bitcast(block, byte_vector.as_pointer()), align=1)
            all_known = call_llvm_intrinsic(
                builder, f"llvm.vector.reduce.and.v{HALF_BLOCK_BYTES}i8", I8, builder.and_(*known_bytes)
            )
            needs_slot = builder.zext(builder.icmp_signed("!=", all_known, I8(-1)), I64)
            flag = builder.gep(blocks, [builder.add(builder.sub(const(-FLAGS_END_BYTES), n), q)])
            builder.store(builder.trunc(needs_slot, I8), flag)
            builder.store(builder.add(builder.load(n_slots), needs_slot), n_slots)
        return builder.load(n_slots)

    return signature, codegen
