"""bf16 weights packed in 12 bits without loss: the lower byte of each as it is, the upper byte as a code of 4 bits.

The upper byte, a sign and 7 bits of the exponent, takes few values in a panel; the 16 most common stand in the panel's table. So
unpacking is a byte lookup and an interleaving of both bytes. A shift and a mask turn each 32-bit word into two floats, in as many
instructions as widening bf16 takes. If a block of 4 columns has an upper byte that is not in the table, the upper bytes of the
block are stored as they are in an overflow pool: every weight is available in order for its chain of products.

A panel is a header and column blocks, in lines of 192 bytes. The header's words are counted back from the blocks: the table, the
panel's first slot in the overflow pool, and a byte for each block that is 1 if the block takes the next slot. A column block: 64
bytes of two codes each, the lower nibbles for rows 0 to 15; 64 lower bytes of these rows, then 64 of the others. Byte
16 l + 8 (k // 2) + 2 j + k % 2 belongs to row 4 l + j, column k of the block. The overflow pool is the space that all panels of a
matrix leave free at its end: slots of 128 bytes, from the end backwards.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specdec.quant.bf16_12bit_llvm import (  # fmt: skip
    BLOCK_COLUMNS,
    BLOCK_WORDS,
    FIRST_SLOT_WORD,
    FLAGS_END_BYTES,
    HALF_BLOCK_BYTES,
    SLOT_BYTES,
    USED_SLOTS_WORD,
    PanelBlocks,
    bf16_to_float,
    choose_packed_tile_shape,
    count_words_between,
    make_packed_tile_body,
    make_unpack_intrinsic,
    pack_blocks,
)
from specdec.quant.fp16_bf16 import BF16, HalfFormat, view_bits
from specdec.quant.fp32 import panel_tile, transpose_rows, unpack_rows
from specdec.quant.matmul import PREFETCH_WORDS, MatmulArgs, Rows, TileArgs, get_chunk_panels, point_to_bytes, point_to_floats
from specdec.quant.packed_matrix import ALL_PANELS, Floats, Matrix, PackingOverflowError, Tensor, pack_matrix
from specdec.runtime.code_cache import inlined, jitable
from specdec.runtime.matmul_tile import Panel, StridedRows, make_tile
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import (
    Bytes2,
    Executor,
    Floats2,
    Floats3,
    ForwardContext,
    Halves2,
    Halves3,
    Ints1,
    Words3,
    kernel,
    run_on_all_threads,
)
from specdec.runtime.parallel_region import get_available_threads
from specdec.runtime.simd import (
    FEATURES,
    HAS_AVX512,
    MAX_TILE_TOKENS,
    N_REGISTERS,
    PANEL_ROWS,
    Float32,
    ceil_div,
    load_byte,
    round_up,
)
from specdec.runtime.tile_simd import TABLE_BYTES, choose_lookup
from specdec.runtime.work_stealing import get_chunk_range

BLOCKS_PER_SLOT = 16  # 0.9% of the blocks of normal numbers need a slot, 2.4% in the worst matrix of SmolLM2
MAX_PACKED_TILE_TOKENS = 8 if N_REGISTERS == 32 else 5
# From this many tokens on, a chunk of columns is unpacked to floats once for all tokens: with AVX2 and 64 tokens it reaches 1.05
# of bf16's speed, else 0.88. AVX-512 reaches 1.1 without it.
MIN_UNPACK_TOKENS, CAN_UNPACK_CHUNKS = 9, not HAS_AVX512
MAX_COUNTED_COLUMNS = 1024  # that the table is built from
N_COUNTERS = 4  # used in turn, so that no increment waits for the one before
UNPACK_COLUMNS = 256  # columns that are unpacked at once: their floats stay in the cache


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


LOOKUP = choose_lookup(FEATURES)
unpack_blocks = make_unpack_intrinsic(LOOKUP)
packed_tile, PACKED_TILE_LIMITS = make_tile(
    "packed_tile", make_packed_tile_body(LOOKUP), choose_packed_tile_shape, MAX_PACKED_TILE_TOKENS
)


@inlined
def multiply_packed(tile, run, thread, p):
    """out[t] (+)= W x[t] for this chunk's panels of bf16 packed in 12 bits, by a tile that unpacks them; see `Matrix.matmul`."""
    first, last = get_chunk_panels(run, p)
    n_tokens = run.n_logits if p.logits_only else run.n_tokens
    x, n, n_tiles = p.x[thread if p.x.shape[0] > 1 else 0], p.n // BLOCK_COLUMNS, ceil_div(n_tokens, MAX_PACKED_TILE_TOKENS)
    words = locate_blocks(p.w, n, 1)[0] - locate_blocks(p.w, n, 0)[0]
    for panel in range(first, last):
        at, to_end = locate_blocks(p.w, n, panel)
        for i in range(n_tiles):
            t, end = get_chunk_range(n_tokens, i, n_tiles)
            prefetch_at = at + (
                PREFETCH_WORDS if n_tokens <= PACKED_TILE_LIMITS.max_full_panel_tokens else words + i * words // n_tiles
            )
            tile(
                StridedRows(p.out, t * p.out.shape[1] + (p.first_panel + panel) * PANEL_ROWS, p.out.shape[1]),
                Panel(p.w, at, prefetch_at, ceil_div(BLOCK_WORDS, n_tiles)),
                StridedRows(x, t * x.shape[1], x.shape[1]), n, to_end, end - t, p.accumulate != 0,
            )  # fmt: skip


@inlined
def multiply_unpacked(run, thread, p):
    """out[t] (+)= W x[t] for this chunk's panels and many tokens: unpack columns to floats once, then use the float tile."""
    first, last = get_chunk_panels(run, p)
    n_tokens = run.n_logits if p.logits_only else run.n_tokens
    x, n, n_tiles = p.x[thread if p.x.shape[0] > 1 else 0], p.n // BLOCK_COLUMNS, ceil_div(n_tokens, MAX_TILE_TOKENS)
    floats, step = p.scratch[thread], UNPACK_COLUMNS // BLOCK_COLUMNS
    distance, slot = count_words_between(floats, p.w), np.int64(0)
    for panel in range(first, last):
        at, to_end = locate_blocks(p.w, n, panel)
        for q in range(0, n, step):
            q_end = min(q + step, n)
            slot = unpack_blocks(floats, 0, PanelBlocks(p.w, at, n, to_end), q, q_end, slot)
            for i in range(n_tiles):
                t, end = get_chunk_range(n_tokens, i, n_tiles)
                prefetch_at = distance + at + q_end * BLOCK_WORDS + i * (step * BLOCK_WORDS) // n_tiles
                out = Rows(point_to_floats(p.out, t * p.out.shape[1] + (p.first_panel + panel) * PANEL_ROWS), p.out.shape[1])
                columns = Rows(point_to_floats(x, t * x.shape[1] + q * BLOCK_COLUMNS), x.shape[1])
                step_bytes = 4 * ceil_div(BLOCK_WORDS // BLOCK_COLUMNS, n_tiles)
                args = TileArgs(
                    out, point_to_floats(floats, 0), point_to_bytes(floats, prefetch_at), step_bytes, columns,
                    (q_end - q) * BLOCK_COLUMNS, 0, p.accumulate != 0 or q > 0,
                )  # fmt: skip
                panel_tile(end - t, args)


@kernel
def matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
    """out[t] (+)= W x[t] for bf16 packed in 12 bits; columns are unpacked once for all tokens if there are many."""
    if CAN_UNPACK_CHUNKS and (run.n_logits if p.logits_only else run.n_tokens) >= MIN_UNPACK_TOKENS:
        multiply_unpacked(run, thread, p)
    else:
        multiply_packed(packed_tile, run, thread, p)


@kernel
def embed(run: ForwardContext, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group_size: int) -> None:
    """out[t] = W[tokens[t]] for this chunk's columns of bf16 packed in 12 bits; see `Matrix.embed`."""
    first, last = get_chunk_range(n, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        panel, row = divmod(tokens[t], PANEL_ROWS)
        out[t, n:] = 0.0  # an earlier pass may have left NaN there
        at, to_end = locate_blocks(w, n // BLOCK_COLUMNS, panel)
        byte, slot = 4 * at, np.int64(0)
        for i in range(4):
            slot |= load_byte(w, byte - 4 * FIRST_SLOT_WORD + i) << 8 * i
        for q in range(ceil_div(last, BLOCK_COLUMNS)):
            has_slot = load_byte(w, byte - FLAGS_END_BYTES - n // BLOCK_COLUMNS + q)
            if BLOCK_COLUMNS * (q + 1) > first:
                block_byte = byte + 4 * BLOCK_WORDS * q
                for k in range(max(first - BLOCK_COLUMNS * q, 0), min(last - BLOCK_COLUMNS * q, BLOCK_COLUMNS)):
                    i = get_byte_index(row, k)
                    if has_slot:
                        upper = load_byte(w, byte + 4 * to_end - min((slot + 1) * SLOT_BYTES, 4 * to_end) + i)
                    else:
                        code = load_byte(w, block_byte + i % HALF_BLOCK_BYTES) >> i // HALF_BLOCK_BYTES * 4 & 15
                        upper = load_byte(w, byte - TABLE_BYTES + code)
                    out[t, BLOCK_COLUMNS * q + k] = bf16_to_float(upper, load_byte(w, block_byte + HALF_BLOCK_BYTES + i))
            slot += has_slot


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
    for i in range(TABLE_BYTES):
        best = 0
        for upper in range(1, counts.shape[1]):
            if counts[0, upper] > counts[0, best]:
                best = upper
        panel_bytes[0, at + i] = best
        counts[0, best] = 0


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
    n = p.rows.shape[1] // BLOCK_COLUMNS
    columns, first_column = p.columns[thread], thread * p.columns.shape[1] * PANEL_ROWS
    begin, end = get_chunk_range(p.slots.size, run.chunk, run.n_chunks)
    for i in range(begin, end):
        rows = p.rows[i * PANEL_ROWS : (i + 1) * PANEL_ROWS]
        transpose_rows(columns, rows)
        for k in range(columns.shape[0]):
            for r in range(rows.shape[0], PANEL_ROWS):
                columns[k, r] = 0
        at, _ = locate_blocks(p.panels, n, p.first + p.stride * i)
        build_exponent_table(p.panel_bytes, 4 * at - TABLE_BYTES, p.counts[thread], columns)
        p.slots[i] = pack_blocks(p.panels, at, n, p.columns, first_column)


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


@kernel
def unpack_panels(run: ForwardContext, thread: int, out: Floats3, panels: Floats3, first: int) -> None:
    """Unpack panels of 12-bit bf16, from panel `first` on, to floats out (P, n, R)."""
    n, first_slot = out.shape[1] // BLOCK_COLUMNS, np.int64(0)
    begin, end = get_chunk_range(out.shape[0], run.chunk, run.n_chunks)
    for i in range(begin, end):
        at, to_end = locate_blocks(panels, n, first + i)
        unpack_blocks(out, i * out.shape[1] * PANEL_ROWS, PanelBlocks(panels, at, n, to_end), 0, n, first_slot)


def count_slots(n: int) -> int:
    """Return the number of overflow slots that are reserved for each panel of n column blocks."""
    return int(ceil_div(n, BLOCKS_PER_SLOT))


class PackedBF16Format(HalfFormat):
    """Panels of bf16 in 12 bits, with an overflow pool that all panels of a matrix share; see the module."""

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
        run_on_all_threads(pack_panels(*args))
        used = panels.view(np.uint32).reshape(-1)[locate_blocks(panels, n, 0)[0] - USED_SLOTS_WORD :][:1]
        *slots[:], total = itertools.accumulate(slots.tolist(), initial=int(used[0]))  # counts to first slots
        if total > len(panels) * count_slots(n):
            raise PackingOverflowError
        used[0] = total
        run_on_all_threads(fill_overflow_pool(*args))

    def unpack(self, panels: Float32, n: int, group_size: int, block: slice = ALL_PANELS) -> Float32:
        """Return the rows of panels, widened to float32; see `WeightFormat.unpack`."""
        first, last, _ = block.indices(len(panels))
        floats = np.empty((last - first, n, PANEL_ROWS), np.float32)
        run_on_all_threads(unpack_panels(floats, panels, first))
        return unpack_rows(floats, n)


PACKED_BF16 = PackedBF16Format(
    name="bf16 in 12 bits", matmul=matmul, embed=embed, expert_matmul=BF16.expert_matmul, expert_format=BF16, fallback=BF16,
    column_multiple=BLOCK_COLUMNS,
)  # fmt: skip


# Benchmark on the model's own matrices: whether 12 bits are faster than 16 on this machine

TRIAL_WEIGHTS, N_COPIES = 2 << 20, 8  # together 33 MB in 16 bits, more than one core's caches hold
MIN_SPEEDUP = 1.05  # relative to bf16, for one token
MAX_ROUNDS, MAX_TRIAL_S = 5, 0.05


def is_packing_faster(tensors: Iterable[Tensor], n_threads: int) -> bool:
    """Return whether a one-token pass over the first of some bf16 tensors is faster by MIN_SPEEDUP when packed in 12 bits.

    Measures it on n_threads threads, with TRIAL_WEIGHTS weights.
    """
    packed, plain = list[Matrix](), list[Matrix]()
    remaining = TRIAL_WEIGHTS
    for tensor in tensors:
        rows = tensor[: max(remaining // tensor.shape[1] // PANEL_ROWS, 1) * PANEL_ROWS]
        try:
            packed.append(pack_matrix([rows], PACKED_BF16))
        except PackingOverflowError:
            continue
        plain.append(pack_matrix([rows], BF16))
        remaining -= rows.size
        if remaining < PANEL_ROWS * tensor.shape[1]:
            break
    return bool(packed) and _is_faster(packed, plain, n_threads)


def _is_faster(packed: list[Matrix], plain: list[Matrix], n_threads: int) -> bool:
    """Return whether a pass over the packed matrices is faster by MIN_SPEEDUP than one over the same matrices in bf16.

    Compares the shortest times of a few alternating rounds over several copies of both.
    """
    out = zeros(1, max(matrix.n_rows for matrix in plain))
    x = zeros(1, 1, max(round_up(matrix.n, PANEL_ROWS) for matrix in plain))
    x[:] = 1.0
    scratch = zeros(n_threads, 1, max(matrix.scratch_words for matrix in packed))

    def copy_matrix(matrix: Matrix) -> Matrix:
        panels = zeros(*matrix.panels.shape)
        panels[:] = matrix.panels
        return replace(matrix, panels=panels)

    copies = [[copy_matrix(matrix) for _ in range(N_COPIES) for matrix in matrices] for matrices in (packed, plain)]
    executors = [Executor([[matrix.matmul(out, x, scratch) for matrix in matrices]]) for matrices in copies]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + MAX_TRIAL_S
    while len(times[0]) < 2 or (len(times[0]) < MAX_ROUNDS and time.perf_counter() < end):
        for executor, seconds in zip(executors, times, strict=True):
            begin = time.perf_counter()
            executor(1, 0, 0, n_threads)
            seconds.append(time.perf_counter() - begin)
    return min(times[1]) > MIN_SPEEDUP * min(times[0])
