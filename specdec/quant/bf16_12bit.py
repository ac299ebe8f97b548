"""bf16 weights packed in 12 bits without loss: the lower byte of each as it is, the upper byte as a code of 4 bits.

The upper byte, a sign and 7 bits of the exponent, takes few values in a panel; the 16 most common stand in the panel's table. So
unpacking is a byte lookup and an interleaving of both bytes. A shift and a mask turn each 32-bit word into two floats, in as many
instructions as widening bf16 takes. If a block of 4 columns has an upper byte that is not in the table, the upper bytes of the
block are stored as they are in an overflow pool: every weight is available in order for its chain of products.

Models of 135M to 1.7B run 1.27 to 1.37 times as fast as in bf16 for one token, 1.12 to 1.19 times for 8, 1.0 to 1.16 times for
128 (AVX-512); see docs/experiments/bf16-12-bit.md.

A panel is a header and column blocks, in lines of 192 bytes. The header's words are counted back from the blocks: the table, the
panel's first slot in the overflow pool, and a byte for each block that is 1 if the block takes the next slot. A column block: 64
bytes of two codes each, the lower nibbles for rows 0 to 15; 64 lower bytes of these rows, then 64 of the others. Byte
16 l + 8 (k // 2) + 2 j + k % 2 belongs to row 4 l + j, column k of the block. The overflow pool is the space that all panels of a
matrix leave free at its end: slots of 128 bytes, from the end backwards.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.quant import matmul
from specdec.quant.fp16_bf16 import BF16, HalfFormat, view_bits
from specdec.quant.fp32 import panel_tile, transpose_rows
from specdec.quant.matmul import MatmulArgs, Tile, TileArgs, TileShape, get_number, get_rows, point_to_bytes, point_to_floats
from specdec.quant.packed_matrix import Floats, PackingOverflowError
from specdec.runtime import op_program, simd, tile_simd
from specdec.runtime.code_cache import CompiledFunction, inlined, jitable, make_dispatcher
from specdec.runtime.op_program import Bytes2, Floats2, Floats3, ForwardContext, Halves2, Halves3, Ints1, Words3, kernel
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import HAS_AVX512, LINE_BYTES, MAX_TILE_TOKENS, N_REGISTERS, PANEL_ROWS, Float32, ceil_div, fma
from specdec.runtime.work_stealing import get_chunk_range

BLOCK_COLUMNS = 4
BLOCK_ROWS = 4  # whose bytes lie together
HALF_ROWS, HALF_BLOCK_BYTES = 16, 64  # half of a block's rows
BLOCK_WORDS, BLOCK_BYTES, SLOT_BYTES = 48, 192, 2 * HALF_BLOCK_BYTES
FIRST_SLOT_WORD, USED_SLOTS_WORD = 5, 6  # words back from the blocks; the number of used slots is only in the first header
FLAGS_END_BYTES = 4 * USED_SLOTS_WORD  # bytes back from the blocks
UPPER_HALF = -1 << 16  # mask of a word's upper bf16, which is a float32
BLOCKS_PER_SLOT = 16  # 0.9% of the blocks of normal numbers need a slot, 2.4% in the worst matrix of SmolLM2
MAX_PACKED_TILE_TOKENS = 8 if N_REGISTERS == 32 else 5
# From this many tokens on, a chunk of columns is unpacked to floats once for all tokens: with AVX2 and 64 tokens it reaches 1.05
# of bf16's speed, else 0.88. AVX-512 reaches 1.1 without it.
MIN_UNPACK_TOKENS, CAN_UNPACK_CHUNKS = 9, not HAS_AVX512
MAX_COUNTED_COLUMNS = 1024  # that the table is built from
N_COUNTERS = 4  # used in turn, so that no increment waits for the one before, which would take 1 ns per weight
UNPACK_COLUMNS = 256  # columns that are unpacked at once: their floats stay in the cache


point_to_ints = tile_simd.make_pointer_getter(simd.INT32_STORAGE)


@jitable
def get_header_words(n):
    """Return the words of the header of a panel of n column blocks, rounded up to whole lines."""
    return ceil_div(FLAGS_END_BYTES + n, 4 * BLOCK_WORDS) * BLOCK_WORDS


@jitable
def locate_blocks(w, n, panel):
    """Return the word of w (P, lines, words) where a panel's column blocks start, and the number of words from there to w's end.

    n: Column blocks of a panel.
    """
    header = get_header_words(n)
    at = panel * (header + n * BLOCK_WORDS) + header
    return at, w.shape[0] * w.shape[1] * w.shape[2] - at


@jitable
def get_byte_index(row, k):
    """Return the index, among the 128 bytes of a column block, of the byte for a panel's row and a column k of the block."""
    half, row = divmod(row, 16)
    return half * HALF_BLOCK_BYTES + row // 4 * 16 + k // 2 * 8 + row % 4 * 2 + k % 2


class PanelBlocks(NamedTuple):
    """The column blocks of a packed panel.

    A damaged header reads at most what lies between the panel and the end of the matrix.

    Attributes:
        start: Pointer to the first byte.
        n: Number of blocks.
        to_end: Bytes from the start to the end of the matrix, where the overflow pool starts.
    """

    start: tile_simd.PointerType
    n: int
    to_end: int


@jitable
def locate_panel(w, n, panel):
    """Return the `PanelBlocks` of a panel of n column blocks."""
    at, to_end = locate_blocks(w, n, panel)
    return PanelBlocks(point_to_bytes(w, at), n, 4 * to_end)


@jitable
def get_first_slot(blocks):
    """Return the number of the overflow slot of the panel's first block that takes one."""
    return tile_simd.load_number(point_to_ints(blocks.start, -4 * FIRST_SLOT_WORD), 0) & 0xFFFFFFFF


@jitable
def has_slot(blocks, q):
    """Return 1 if block q takes an overflow slot, else 0, unless the header is damaged."""
    return tile_simd.load_number(blocks.start, q - FLAGS_END_BYTES - blocks.n)


@jitable
def locate_slot(blocks, slot):
    """Return a pointer to an overflow slot."""
    return tile_simd.advance(blocks.start, blocks.to_end - min((slot + 1) * SLOT_BYTES, blocks.to_end))


def make_column_reader(rows: int, look_up: CompiledFunction) -> CompiledFunction:
    """Return the compiled function read_columns(blocks, q, row, slot) -> the 4 columns of block q, as vectors of floats.

    Args:
        rows: Rows of a vector, from `row` on.
        look_up: (codes, table) -> bytes, one of `look_up_bytes` and its portable version.
    """
    get_words = tile_simd.make_pointer_getter(simd.INT32_STORAGE, rows)
    get_half = tile_simd.make_pointer_getter(simd.INT32_STORAGE, min(rows, HALF_ROWS))
    get_table = tile_simd.make_pointer_getter(simd.INT32_STORAGE, tile_simd.TABLE_BYTES // 4)
    has_both_halves = rows > HALF_ROWS

    @jitable
    def get_codes(block, row):
        codes = tile_simd.load_vector(get_half(block, row % HALF_ROWS * BLOCK_COLUMNS), 0)
        if has_both_halves:
            return tile_simd.join_parts(codes, tile_simd.shift_right(codes, 4))
        return tile_simd.shift_right(codes, row // HALF_ROWS * 4)

    def read_columns(blocks, q, row, slot):
        block = tile_simd.advance(blocks.start, q * BLOCK_BYTES)
        if has_slot(blocks, q):
            upper = tile_simd.load_vector(get_words(locate_slot(blocks, slot), row * BLOCK_COLUMNS), 0)
        else:
            upper = look_up(get_codes(block, row), tile_simd.load_vector(get_table(blocks.start, -tile_simd.TABLE_BYTES), 0))
        lower = tile_simd.load_vector(get_words(block, HALF_BLOCK_BYTES + row * BLOCK_COLUMNS), 0)
        first, last = tile_simd.join_first_bytes(lower, upper), tile_simd.join_last_bytes(lower, upper)
        return (
            tile_simd.view_as_float(tile_simd.shift_left(first, 16)),
            tile_simd.view_as_float(tile_simd.bit_and(first, UPPER_HALF)),
            tile_simd.view_as_float(tile_simd.shift_left(last, 16)),
            tile_simd.view_as_float(tile_simd.bit_and(last, UPPER_HALF)),
        )

    return make_dispatcher(read_columns, is_inlined=True)


def make_packed_tile(look_up: CompiledFunction, shape: TileShape) -> Callable[..., None]:
    """Return the tile of a shape over weights of 12 bits; for look_up see `make_column_reader`."""
    rows, max_tokens, _ = shape
    n_row_blocks = PANEL_ROWS // rows
    get_out, split_tokens = tile_simd.make_pointer_getter(simd.FP32_STORAGE, rows), tile_simd.make_row_splitter(max_tokens)
    read_columns = make_column_reader(rows, look_up)

    def tile(n_tokens, p):
        """out[t, r] (+)= sum over k of w[k, r] * x[t, k] for the rows r of a panel, and tokens t < n_tokens.

        p.n is the number of blocks, p.stride the number of bytes from the first to the end of the matrix. `xs`, `outs` and `sums`
        are tuples with an element for each token.
        """
        xs, step = split_tokens(p.x.start, p.x.stride), p.line_step * BLOCK_BYTES // (LINE_BYTES * n_row_blocks)
        blocks = PanelBlocks(point_to_bytes(p.w, 0), p.n, p.stride)
        for row in range(0, PANEL_ROWS, rows):
            outs = split_tokens(get_out(p.out.start, row), p.out.stride)
            ahead = tile_simd.advance(p.ahead, row // rows * step * p.n)
            sums = matmul.start_sums(outs, rows, n_tokens, p.accumulate)
            slot = get_first_slot(blocks)
            for q in range(p.n):
                matmul.prefetch_lines(ahead, q * step, BLOCK_BYTES // n_row_blocks)
                first, second, third, fourth = read_columns(blocks, q, row, slot)
                slot += has_slot(blocks, q)
                k = q * BLOCK_COLUMNS
                sums = fma(first, get_number(xs, k), sums)
                sums = fma(second, get_number(xs, k + 1), sums)
                sums = fma(third, get_number(xs, k + 2), sums)
                sums = fma(fourth, get_number(xs, k + 3), sums)
            tile_simd.store_vector(outs, 0, sums, n_tokens)

    return tile


def make_tile(look_up: CompiledFunction) -> Tile:
    """Return the tile over weights of 12 bits; for look_up see `make_column_reader`."""
    choose_shape = functools.partial(matmul.choose_tile_shape, is_weight_stationary=True)
    return Tile(functools.partial(make_packed_tile, look_up), choose_shape, MAX_PACKED_TILE_TOKENS)


packed_tile = make_tile(tile_simd.look_up_bytes)
PACKED_TILE_LIMITS = packed_tile.limits
read_panel_columns, read_row_columns = (make_column_reader(rows, tile_simd.look_up_bytes) for rows in (PANEL_ROWS, BLOCK_ROWS))
point_to_panel_columns = tile_simd.make_pointer_getter(simd.FP32_STORAGE, PANEL_ROWS)


@jitable
def unpack_blocks(out, blocks, first, last, slot):
    """Unpack the blocks first to last (exclusive) of a panel to floats (k, R) at a pointer, and return the next block's slot.

    slot: The overflow slot of the first block; block 0 takes it from the panel's header.
    """
    if first == 0:
        slot = get_first_slot(blocks)
    for q in range(first, last):
        to = point_to_panel_columns(out, (q - first) * BLOCK_COLUMNS * PANEL_ROWS)
        for k, column in enumerate(read_panel_columns(blocks, q, 0, slot)):
            tile_simd.store_vector(to, k * PANEL_ROWS, column, 1)
        slot += has_slot(blocks, q)
    return slot


@inlined
def multiply_packed(tile, limits, run, thread, p):
    """out[t] (+)= W x[t] for this chunk's panels of bf16 packed in 12 bits; see `multiply_panels`."""
    first, last = matmul.get_chunk_panels(run, p)
    n_tokens = run.n_logits if p.logits_only else run.n_tokens
    x, n, n_tiles = p.x[thread if p.x.shape[0] > 1 else 0], p.n // BLOCK_COLUMNS, ceil_div(n_tokens, limits[0])
    words = locate_blocks(p.w, n, 1)[0] - locate_blocks(p.w, n, 0)[0]
    line_step = matmul.get_line_step(n_tiles)
    for panel in range(first, last):
        at, to_end = locate_blocks(p.w, n, panel)
        for i in range(n_tiles):
            t, end = get_chunk_range(n_tokens, i, n_tiles)
            ahead = at + (matmul.PREFETCH_WORDS if n_tokens <= limits[1] else words + i * words // n_tiles)
            weights, ahead_start = point_to_floats(p.w, at), point_to_bytes(p.w, ahead)
            out = get_rows(p.out, t, (p.first_panel + panel) * PANEL_ROWS)
            tile(end - t, TileArgs(out, weights, ahead_start, line_step, get_rows(x, t, 0), n, 4 * to_end, p.accumulate != 0))


@inlined
def multiply_unpacked(run, thread, p):
    """out[t] (+)= W x[t] for this chunk's panels and many tokens: unpack columns to floats once, then use the float tile."""
    first, last = matmul.get_chunk_panels(run, p)
    n_tokens = run.n_logits if p.logits_only else run.n_tokens
    x, n, n_tiles = p.x[thread if p.x.shape[0] > 1 else 0], p.n // BLOCK_COLUMNS, ceil_div(n_tokens, MAX_TILE_TOKENS)
    floats, step, slot = point_to_floats(p.scratch[thread], 0), UNPACK_COLUMNS // BLOCK_COLUMNS, 0
    # Bytes of packed columns for a line of floats
    line_step = ceil_div(matmul.get_line_step(n_tiles) * BLOCK_WORDS, BLOCK_COLUMNS * PANEL_ROWS)
    for panel in range(first, last):
        blocks = locate_panel(p.w, n, panel)
        for q in range(0, n, step):
            q_end = min(q + step, n)
            slot = unpack_blocks(floats, blocks, q, q_end, slot)
            for i in range(n_tiles):
                t, end = get_chunk_range(n_tokens, i, n_tiles)
                ahead = tile_simd.advance(blocks.start, q_end * BLOCK_BYTES + i * (step * BLOCK_WORDS) // n_tiles * 4)
                out = get_rows(p.out, t, (p.first_panel + panel) * PANEL_ROWS)
                columns = get_rows(x, t, q * BLOCK_COLUMNS)
                n_columns = (q_end - q) * BLOCK_COLUMNS
                panel_tile(end - t, TileArgs(out, floats, ahead, line_step, columns, n_columns, 0, p.accumulate != 0 or q > 0))


@kernel
def packed_matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
    """out[t] (+)= W x[t] for bf16 packed in 12 bits; columns are unpacked once for all tokens if there are many."""
    if CAN_UNPACK_CHUNKS and (run.n_logits if p.logits_only else run.n_tokens) >= MIN_UNPACK_TOKENS:
        multiply_unpacked(run, thread, p)
    else:
        multiply_packed(packed_tile, PACKED_TILE_LIMITS, run, thread, p)


@kernel
def embed(run: ForwardContext, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group_size: int) -> None:
    """out[t] = W[tokens[t]] for this chunk's columns of bf16 packed in 12 bits; see `Matrix.embed`."""
    first, last = get_chunk_range(n, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        panel, row = divmod(tokens[t], PANEL_ROWS)
        out[t, n:] = 0.0  # an earlier pass may have left NaN there
        blocks = locate_panel(w, n // BLOCK_COLUMNS, panel)
        slot = get_first_slot(blocks)
        for q in range(ceil_div(last, BLOCK_COLUMNS)):
            columns = read_row_columns(blocks, q, row // BLOCK_ROWS * BLOCK_ROWS, slot)
            numbers = simd.extract_lane(columns, row % BLOCK_ROWS)
            for k in range(max(first - BLOCK_COLUMNS * q, 0), min(last - BLOCK_COLUMNS * q, BLOCK_COLUMNS)):
                out[t, BLOCK_COLUMNS * q + k] = numbers[k]
            slot += has_slot(blocks, q)


@jitable
def build_exponent_table(panel_bytes, at, counts, columns):
    """Write a panel's table, the 16 most common upper bytes of columns (n, R) or of a sample of them, from byte `at` on.

    counts: Scratch (N_COUNTERS, 256).
    """
    counts[:] = 0
    for k in range(0, columns.shape[0], max(columns.shape[0] // MAX_COUNTED_COLUMNS, 1)):
        for r in range(0, PANEL_ROWS, N_COUNTERS):
            for i in range(N_COUNTERS):
                counts[i, columns[k, r + i] >> 8] += np.uint32(1)
    for i in range(1, N_COUNTERS):
        for upper in range(counts.shape[1]):
            counts[0, upper] += counts[i, upper]
    for i in range(tile_simd.TABLE_BYTES):
        best = np.argmax(counts[0])
        panel_bytes[0, at + i] = best
        counts[0, best] = 0


@jitable
def pack_blocks(panel_bytes, at, n, codes, columns):
    """Pack columns (k, R) of bf16 bits into the n blocks from byte `at` on; return how many blocks need an overflow slot.

    Uses the table in front of the blocks, and sets each block's flag.

    codes: Scratch (256,) for the code of each upper byte.
    """
    codes[:] = tile_simd.TABLE_BYTES  # no code
    for i in range(tile_simd.TABLE_BYTES - 1, -1, -1):
        codes[panel_bytes[0, at - tile_simd.TABLE_BYTES + i]] = i
    n_slots = 0
    for q in range(n):
        block = panel_bytes[0, at + q * BLOCK_BYTES : at + (q + 1) * BLOCK_BYTES]
        block_columns = columns[q * BLOCK_COLUMNS : (q + 1) * BLOCK_COLUMNS]
        all_codes = np.uint32(0)
        for row in range(HALF_ROWS):
            for k in range(BLOCK_COLUMNS):
                i = get_byte_index(row, k)
                low, high = block_columns[k, row], block_columns[k, HALF_ROWS + row]
                low_code, high_code = codes[low >> 8], codes[high >> 8]
                all_codes |= low_code | high_code
                block[i] = low_code | high_code << 4
                block[i + HALF_BLOCK_BYTES] = low & 255
                block[i + 2 * HALF_BLOCK_BYTES] = high & 255
        needs_slot = int(all_codes >= tile_simd.TABLE_BYTES)
        panel_bytes[0, at - FLAGS_END_BYTES - n + q] = needs_slot
        n_slots += needs_slot
    return n_slots


class PackArgs(NamedTuple):
    """Arguments of the kernels `pack_panels` and `fill_overflow_pool`.

    Attributes:
        panels: The packed matrix; every stride-th panel from `first` on is filled.
        panel_bytes: The bytes (1, all) of panels.
        first: First panel to fill.
        stride: Panels from one to the next.
        rows: bf16 bits (rows, n) to pack.
        columns: Scratch (threads, n, R).
        counts: Scratch (threads, N_COUNTERS, 256).
        slots: For each panel, the number of slots that it needs (output of `pack_panels`) or its first slot (input of
            `fill_overflow_pool`).
    """

    panels: Floats3
    panel_bytes: Bytes2
    first: int
    stride: int
    rows: Halves2
    columns: Halves3
    counts: Words3
    slots: Ints1


@kernel
def pack_panels(run: ForwardContext, thread: int, p: PackArgs) -> None:
    """Pack rows of bf16 into panels of 12-bit weights, except for the overflow pool, and count the slots each panel needs."""
    n, columns, counts = p.rows.shape[1] // BLOCK_COLUMNS, p.columns[thread], p.counts[thread]
    begin, end = get_chunk_range(p.slots.size, run.chunk, run.n_chunks)
    for i in range(begin, end):
        rows = p.rows[i * PANEL_ROWS : (i + 1) * PANEL_ROWS]
        transpose_rows(columns, rows)
        columns[:, rows.shape[0] :] = 0
        at, _ = locate_blocks(p.panels, n, p.first + p.stride * i)
        build_exponent_table(p.panel_bytes, 4 * at - tile_simd.TABLE_BYTES, counts, columns)
        p.slots[i] = pack_blocks(p.panel_bytes, 4 * at, n, counts[0], columns)


@kernel
def fill_overflow_pool(run: ForwardContext, thread: int, p: PackArgs) -> None:
    """Write each panel's first slot into its header, and the upper bytes of blocks that need a slot into the overflow pool."""
    n = p.rows.shape[1] // BLOCK_COLUMNS
    begin, end = get_chunk_range(p.slots.size, run.chunk, run.n_chunks)
    for panel in range(begin, end):
        at, to_end = locate_blocks(p.panels, n, p.first + p.stride * panel)
        rows, slot = p.rows[panel * PANEL_ROWS : (panel + 1) * PANEL_ROWS], p.slots[panel]
        for i in range(4):
            p.panel_bytes[0, 4 * (at - FIRST_SLOT_WORD) + i] = slot >> 8 * i & 255
        for q in range(n):
            if p.panel_bytes[0, 4 * at - FLAGS_END_BYTES - n + q]:
                slot += 1
                slot_byte = 4 * (at + to_end) - slot * SLOT_BYTES
                for r in range(rows.shape[0]):
                    for k in range(BLOCK_COLUMNS):
                        p.panel_bytes[0, slot_byte + get_byte_index(r, k)] = rows[r, BLOCK_COLUMNS * q + k] >> 8


def count_slots(n: int) -> int:
    """Return the number of overflow slots that are reserved for each panel of n column blocks."""
    return int(ceil_div(n, BLOCKS_PER_SLOT))


class PackedBF16Format(HalfFormat):
    """Panels of bf16 in 12 bits, with an overflow pool that all panels of a matrix share; see the module."""

    expert_format = fallback = BF16
    column_multiple = BLOCK_COLUMNS

    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the lines of a panel's header, column blocks and share of the overflow pool, and the words of a line."""
        n_blocks = n // BLOCK_COLUMNS
        n_pool_lines = ceil_div(count_slots(n_blocks) * SLOT_BYTES, 4 * BLOCK_WORDS)
        return get_header_words(n_blocks) // BLOCK_WORDS + n_blocks + n_pool_lines, BLOCK_WORDS

    def get_scratch_words(self, n: int, group_size: int) -> int:
        """Return the scratch words per token; those of MIN_UNPACK_TOKENS tokens together hold the unpacked floats."""
        return int(ceil_div(UNPACK_COLUMNS * PANEL_ROWS, MIN_UNPACK_TOKENS)) if CAN_UNPACK_CHUNKS else 1

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats, group_size: int) -> None:
        """Pack rows of bf16; see `WeightFormat.pack`.

        Raises:
            ValueError: The rows are not bf16.
            PackingOverflowError: The overflow pool is full.
        """
        rows = np.ascontiguousarray(view_bits("bf16", rows))
        n, n_threads, panel_bytes = rows.shape[1] // BLOCK_COLUMNS, get_available_threads(), panels.view(np.uint8).reshape(1, -1)
        slots = np.zeros(ceil_div(len(rows), PANEL_ROWS), np.int64)
        columns = np.empty((n_threads, rows.shape[1], PANEL_ROWS), np.uint16)
        counts = np.empty((n_threads, N_COUNTERS, 256), np.uint32)
        args = panels, panel_bytes, first, stride, rows, columns, counts, slots
        op_program.run_on_all_threads(pack_panels(*args))
        used = panels.view(np.uint32).reshape(-1)[locate_blocks(panels, n, 0)[0] - USED_SLOTS_WORD :][:1]
        *slots[:], total = itertools.accumulate(slots.tolist(), initial=int(used[0]))  # counts to first slots
        if total > len(panels) * count_slots(n):
            raise PackingOverflowError
        used[0] = total
        op_program.run_on_all_threads(fill_overflow_pool(*args))


PACKED_BF16 = PackedBF16Format(name="bf16 in 12 bits", matmul=packed_matmul, embed=embed, expert_matmul=BF16.expert_matmul)
