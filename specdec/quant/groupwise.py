"""Weights of 4 to 8 bits in groups that share a scale and perhaps a minimum: code * scale + minimum, as in GGUF's block types.

Activations are int8 in groups of the same size, as `int8.quantize_activations` makes them. The integer sums of a group are exact,
so their order is free; its float terms enter their row's chain in order: sum (scale q + minimum) x = scale sum(q x) + minimum
sum(x).

A panel is (blocks, words). A block of columns holds for each of the R rows the fp16 scale and, with minima, the fp16 minimum. If
a block has several groups, the rows' int8 factors of the scale follow for each group, then those of the minimum. Then follow the
codes of each group: words of 4 bytes, the rows innermost. A word holds 4 codes of 8 bits. With fewer bits, the lower 4 bits of
two codes share a byte; the code half a group later is in the byte's upper half. Then comes a word of the upper bits, if any: 1
bit of each of 32 codes or 2 bits of each of 16; byte b of code word k starts at bit 8 b + k or 8 b + 2 k. Codes without a minimum
have the middle of their range as zero point: 8, 16, 32 or 128.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from specdec.quant.bf16_12bit_llvm import TABLE_BYTES, choose_lookup, emit_lookup
from specdec.quant.int8 import (
    BYTES_PER_WORD,
    DOT4_NAME,
    GROUP_HEADER_WORDS,
    Dot4,
    get_dot4,
    get_quantized_activations,
    get_scratch_words,
)
from specdec.quant.matmul_kernels import make_embed_kernel, make_matmul_kernels
from specdec.quant.packed_matrix import ALL_PANELS, WeightFormat
from specdec.runtime.code_cache import inlined
from specdec.runtime.matmul_tile import (
    FEATURES,
    LINE_BYTES,
    LINE_WORDS,
    PANEL_ROWS,
    RowBlock,
    TileArgs,
    TileShape,
    const,
    load_accumulators,
    make_tile,
    prefetch,
)
from specdec.runtime.op_program import (
    Bytes2,
    Bytes3,
    ForwardContext,
    Halves2,
    Halves3,
    Words2,
    Words3,
    kernel,
    run_on_all_threads,
)
from specdec.runtime.simd import (  # fmt: skip
    F32,
    FP16_STORAGE,
    I8,
    I32,
    LANES,
    Float32,
    broadcast,
    ceil_div,
    extract_lane,
    load_byte,
    load_fp16,
    make_constant_vector,
    multiply_add,
    offset_pointer,
)
from specdec.runtime.work_stealing import get_chunk_range

# Code widths for which a tile over one token, which is memory-bound, prefetches a group's lines when it starts the group and
# leaves lines farther ahead to the CPU: Q4_K from DRAM 24.8 GB/s, with 8 KiB ahead 19.0; Q8_0 29.5 and 23.6 (Zen 5).
NEAR_PREFETCH_BITS = (4, 8)
PANEL_FP16_WORDS = PANEL_ROWS // 2  # words of one fp16 number per row
PANEL_BYTE_WORDS = PANEL_ROWS // 4  # words of one byte per row
EACH_BYTE = 0x01010101  # 1 in every byte of a word
NIBBLE_MASK = 15 * EACH_BYTE


# Values of the 4-bit codes: twice the floats of one sign bit, two exponent bits and one mantissa bit (E2M1 of MX, OCP 2023), and
# ggml's kvalues_iq4nl.
CODEBOOKS = {
    "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}
CODEBOOK_BITS = {"e2m1": 5, "nl": 8}
CODEBOOK_CODES = {name: np.array(numbers) + (1 << (CODEBOOK_BITS[name] - 1)) for name, numbers in CODEBOOKS.items()}


class GroupLayout(NamedTuple):
    """The layout of weights in groups. A group of 5 bits has 32 codes, one of 6 has 16: their upper bits fill a word.

    Attributes:
        bits: Bits of a code.
        group_size: Codes per group.
        n_groups: Groups per block. With several, a scale or minimum is an fp16 number of the block times an int8 factor of the
            group.
        has_minima: Whether groups have minima.
        codebook: Name of the `CODEBOOK_CODES` table that maps 4 bits to codes, or "".
    """

    bits: int
    group_size: int
    n_groups: int
    has_minima: bool
    codebook: str = ""

    @property
    def code_bits(self) -> int:
        """Bits of a code after the codebook lookup."""
        return CODEBOOK_BITS[self.codebook] if self.codebook else self.bits

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.group_size * self.n_groups

    @property
    def n_params(self) -> int:
        """Numbers per group: a scale and perhaps a minimum."""
        return 1 + self.has_minima

    @property
    def factors_offset(self) -> int:
        """Offset of the groups' int8 factors in a block, in words; they follow the block's fp16 scales and minima."""
        return PANEL_FP16_WORDS * self.n_params

    @property
    def codes_offset(self) -> int:
        """Offset of the codes in a block, in words; they follow the int8 factors, if there are any."""
        return self.factors_offset + PANEL_BYTE_WORDS * self.n_params * self.n_groups * (self.n_groups > 1)

    @property
    def row_words(self) -> int:
        """Words that the codes of one row take in a group."""
        return self.group_size * self.bits // 32

    @property
    def lower_words(self) -> int:
        """Words of a row's group that hold whole codes, or the lower bits of two codes per byte."""
        return self.group_size // (BYTES_PER_WORD if self.bits == 8 else 2 * BYTES_PER_WORD)

    @property
    def upper_bits(self) -> int:
        """Bits of a code that are stored in the word of upper bits."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def upper_mask(self) -> int:
        """Mask of the lowest `upper_bits` bits of each byte of a word."""
        return EACH_BYTE * ((1 << self.upper_bits) - 1)

    @property
    def block_words(self) -> int:
        """Words of a block for all rows of a panel."""
        return self.codes_offset + self.n_groups * self.row_words * PANEL_ROWS

    @property
    def zero_point(self) -> int:
        """The code of a weight of 0, if there are no minima."""
        return 0 if self.has_minima else 1 << (self.code_bits - 1)


def make_group_tile_body(layout: GroupLayout, dot: Dot4) -> Any:
    """Return a function that emits the body of a tile over weights of a group layout, n blocks, with byte products by `dot`."""
    x_group_words = GROUP_HEADER_WORDS + layout.group_size // BYTES_PER_WORD

    def emit(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> None:
        lanes, n_vectors, n_tokens = shape
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        out_pointers, initial_sums = load_accumulators(builder, shape, row_block, tile)
        totals = [cgutils.alloca_once_value(builder, start) for start in initial_sums]
        row_block_words = layout.block_words // (layout.block_words // PANEL_ROWS)  # words that tile.prefetch_stride covers
        line_stride = builder.udiv(builder.mul(tile.prefetch_stride, const(LINE_WORDS)), const(row_block_words))
        n_lines = builder.mul(tile.n, const(layout.block_words // LINE_WORDS))
        prefetch_at, prefetch_stride = row_block.split_prefetch(builder, tile.prefetch_at, line_stride, n_lines)

        def splat_int(value: int) -> Any:
            return make_constant_vector(integers, value)

        def load_params(block: Any, param: int, v: int) -> Any:
            """Load the fp16 scales or minima of a vector's rows."""
            at = builder.add(builder.udiv(row_block.first_row, const(2)), const(param * PANEL_FP16_WORDS + v * lanes // 2))
            at = offset_pointer(builder, block, at, FP16_STORAGE.vector(lanes))
            return FP16_STORAGE.widen(builder, builder.load(at, align=2 * lanes))

        def load_factors(block: Any, offset: Any, v: int) -> Any:
            """Load the int8 factors of a vector's rows as floats."""
            word = builder.add(offset, builder.add(builder.udiv(row_block.first_row, const(4)), const(v * lanes // 4)))
            factor_bytes = builder.load(offset_pointer(builder, block, word, ir.VectorType(I8, lanes)), align=lanes)
            return builder.sitofp(builder.sext(factor_bytes, integers), floats)

        def make_first_sum(correction: Any) -> Any:
            """Return the start of a group's integer sum that makes it sum (code - zero_point) x; correction: -128 sum(x)."""
            sum_of_zeros = builder.ashr(correction, I32(8 - layout.code_bits)) if layout.zero_point else I32(0)
            if dot.is_signed:  # multiplies codes - 128
                sum_of_zeros = builder.sub(sum_of_zeros, correction)
            return broadcast(builder, sum_of_zeros, integers)

        def look_up(nibbles: Any) -> Any:
            """Look up each byte in the layout's codebook."""
            byte_vector = ir.VectorType(I8, BYTES_PER_WORD * lanes)
            table = ir.Constant(ir.VectorType(I8, TABLE_BYTES), CODEBOOK_CODES[layout.codebook].tolist())
            lookup = choose_lookup(FEATURES, byte_vector.count)
            return builder.bitcast(emit_lookup(builder, table, builder.bitcast(nibbles, byte_vector), lookup), integers)

        def get_code_word(i: int, lower: Any, upper: Any) -> Any:
            """Return code word i of a vector's rows from the words of its lower and upper bits."""
            lower = builder.and_(builder.lshr(lower, splat_int(i // layout.lower_words * 4)), splat_int(NIBBLE_MASK))
            if layout.codebook:
                return look_up(lower)
            if not layout.upper_bits:
                return lower
            left_shift = 4 - i * layout.upper_bits
            upper = builder.shl(upper, splat_int(left_shift)) if left_shift > 0 else builder.lshr(upper, splat_int(-left_shift))
            return builder.or_(lower, builder.and_(upper, splat_int(layout.upper_mask << 4)))

        def fetch(first: Any, n_lines: int) -> None:
            """Prefetch n_lines of the panel ahead of word `first`, or at that word: see `NEAR_PREFETCH_BITS`."""
            if n_tokens == 1 and layout.bits in NEAR_PREFETCH_BITS:
                lines = builder.bitcast(builder.gep(tile.w, [first]), I8.as_pointer())
                for line in range(n_lines):
                    prefetch(builder, builder.gep(lines, [const(line * LINE_BYTES)]), const(0))
                return
            pointer = builder.gep(prefetch_at, [builder.mul(builder.udiv(first, const(LINE_WORDS)), prefetch_stride)])
            for _ in range(0, n_lines, row_block.n_blocks):
                prefetch(builder, pointer, const(0))
                pointer = builder.gep(pointer, [line_stride])

        def emit_group(codes: Any, rows: list[Any], scales: list[list[Any]]) -> None:
            """Add one group's sums to the totals.

            codes: the group's first word; rows: one pointer to x per token; scales: vectors per scale and minimum.
            """
            fetch(codes, layout.row_words * PANEL_ROWS // LINE_WORDS)
            corrections = [builder.load(offset_pointer(builder, row, const(1), I32)) for row in rows]
            sums = [dot.start_sum(builder, make_first_sum(corrections[t])) for t in range(n_tokens) for _ in range(n_vectors)]
            group_words = builder.gep(tile.w, [builder.add(codes, row_block.first_row)])

            def load_words(k: int) -> list[Any]:
                return [
                    builder.load(
                        offset_pointer(builder, group_words, const(k * PANEL_ROWS + lanes * v), integers), align=4 * lanes
                    )
                    for v in range(n_vectors)
                ]

            uppers = load_words(layout.lower_words) if layout.upper_bits else [None] * n_vectors
            for k in range(layout.lower_words):
                words = load_words(k)
                code_words = {k: words}
                if layout.bits < 8:
                    word_pairs = list(zip(words, uppers, strict=True))
                    code_words = {i: [get_code_word(i, *pair) for pair in word_pairs] for i in (k, k + layout.lower_words)}
                code_words = {i: [dot.prepare_weights(builder, codes) for codes in vectors] for i, vectors in code_words.items()}
                for t, row in enumerate(rows):
                    for word, weights in code_words.items():
                        x_word = builder.load(offset_pointer(builder, row, const(GROUP_HEADER_WORDS + word), I32))
                        x_word = broadcast(builder, x_word, integers)
                        for v in range(n_vectors):
                            i = t * n_vectors + v
                            sums[i] = dot.accumulate(builder, sums[i], weights[v], x_word)
            for t, row in enumerate(rows):
                x_scale = broadcast(builder, builder.load(row), floats)
                if layout.has_minima:
                    x_group_sum = broadcast(builder, builder.load(builder.gep(row, [const(2)])), floats)
                for v in range(n_vectors):
                    i = t * n_vectors + v
                    group_sum = builder.sitofp(dot.finish_sum(builder, sums[i]), floats)
                    total = multiply_add(builder, group_sum, builder.fmul(scales[0][v], x_scale), builder.load(totals[i]))
                    if layout.has_minima:
                        total = multiply_add(builder, scales[1][v], x_group_sum, total)
                    builder.store(total, totals[i])

        with cgutils.for_range(builder, tile.n) as blocks:
            first = builder.mul(blocks.index, const(layout.block_words))
            block = builder.gep(tile.w, [first])
            x_block = builder.mul(blocks.index, const(layout.n_groups * x_group_words))
            rows = [builder.gep(tile.x, [builder.add(builder.mul(tile.x_stride, const(t)), x_block)]) for t in range(n_tokens)]
            codes = builder.add(first, const(layout.codes_offset))
            fetch(first, layout.codes_offset // LINE_WORDS)
            scales = [[load_params(block, param, v) for v in range(n_vectors)] for param in range(layout.n_params)]
            if layout.n_groups == 1:
                emit_group(codes, rows, scales)
            else:
                with cgutils.for_range(builder, const(layout.n_groups)) as groups:
                    g = groups.index
                    group_rows = [builder.gep(row, [builder.mul(g, const(x_group_words))]) for row in rows]
                    group_scales = []
                    for param in range(layout.n_params):
                        at = builder.add(
                            builder.mul(g, const(PANEL_BYTE_WORDS)),
                            const(layout.factors_offset + param * layout.n_groups * PANEL_BYTE_WORDS),
                        )
                        group_scales.append(
                            [builder.fmul(scales[param][v], load_factors(block, at, v)) for v in range(n_vectors)]
                        )
                    emit_group(builder.add(codes, builder.mul(g, const(layout.row_words * PANEL_ROWS))), group_rows, group_scales)
        for pointer, total in zip(out_pointers, totals, strict=True):
            builder.store(builder.load(total), pointer, align=4)

    return emit


def make_group_tile(layout: GroupLayout, instruction_set: str) -> tuple[Any, Any]:
    """Return the intrinsic and the `TileLimits` of a tile over weights of a group layout, for a `choose_dot4` instruction set."""
    key = layout.bits, layout.group_size, layout.n_groups, int(layout.has_minima), *[layout.codebook] * bool(layout.codebook)
    name = "_".join(map(str, ("group_tile", *key, instruction_set)))
    dot = get_dot4(instruction_set, layout.code_bits)
    return make_tile(name, make_group_tile_body(layout, dot), dot.choose_tile_shape, dot.max_tokens)


def make_weight_getter(layout: GroupLayout) -> Any:
    """Return an inlined function that reads one weight of a group layout from panels, as float32."""
    bits, group_size, n_groups, has_minima, codebook = layout
    columns, zero_point = layout.block_columns, layout.zero_point
    factors_offset, codes_offset = layout.factors_offset, layout.codes_offset
    row_words, lower_words, upper_bits = layout.row_words, layout.lower_words, layout.upper_bits
    has_codebook, codes = bool(codebook), CODEBOOK_CODES.get(codebook, np.zeros(1, np.int64))

    @inlined
    def get_weight(w, panel, row, k, n, _group_size):
        i_block, i = divmod(k, columns)
        g, i = divmod(i, group_size)
        block = (panel * w.shape[1] + i_block) * w.shape[2]
        # Byte of the code in the group's first word
        at = (block + codes_offset + g * row_words * PANEL_ROWS + row) * BYTES_PER_WORD + i % BYTES_PER_WORD
        half, word = divmod(i // BYTES_PER_WORD, lower_words)
        code = load_byte(w, at + word * PANEL_ROWS * BYTES_PER_WORD)
        if bits < 8:
            code = (code >> (4 * half)) & 15
        if has_codebook:
            code = codes[code]
        if upper_bits > 0:
            upper = load_byte(w, at + lower_words * PANEL_ROWS * BYTES_PER_WORD) >> (i // BYTES_PER_WORD * upper_bits)
            code |= (upper << 4) & (2**bits - 16)
        weight = np.float32(code - zero_point) * load_group_param(w, block, 0, row, g, n_groups, factors_offset)
        if has_minima:
            weight += load_group_param(w, block, 1, row, g, n_groups, factors_offset)
        return weight

    return get_weight


@inlined
def load_group_param(w, block, param, row, g, n_groups, factors_offset):
    """Return a row's scale (param 0) or minimum (param 1) as float32, in group g of the block that starts at word `block`."""
    at = 2 * block + param * PANEL_ROWS + row
    number = extract_lane(load_fp16(w, at - at % LANES), at % LANES)
    if n_groups > 1:
        factor = load_byte(w, (block + factors_offset) * BYTES_PER_WORD + (param * n_groups + g) * PANEL_ROWS + row)
        number *= np.float32((factor ^ 128) - 128)
    return number


class GroupedRows(NamedTuple):
    """Rows of weights of a `GroupLayout` before they are packed into panels: the parts of each block, row by row.

    Attributes:
        params: (rows, blocks, params), scales and minima as the bits of fp16.
        factors: (rows, blocks, params, groups), no groups if a block has only one.
        words: (rows, blocks, groups, words), the codes.
    """

    params: npt.NDArray[np.uint16]
    factors: npt.NDArray[np.int8]
    words: npt.NDArray[np.uint32]


def unpack_codes(layout: GroupLayout, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the codes of packed words (A, blocks, groups, words, ...) as words of four 8-bit codes, in the same axes."""
    if layout.bits == 8:
        return words
    if layout.codebook:
        codes = CODEBOOK_CODES[layout.codebook][unpack_codes(layout._replace(codebook=""), words)[..., None].view(np.uint8)]
        return codes.astype(np.uint8).view(np.uint32)[..., 0]
    lower, upper = words[:, :, :, : layout.lower_words], words[:, :, :, layout.lower_words :]
    code_words = np.concatenate([lower & NIBBLE_MASK, lower >> 4 & NIBBLE_MASK], 3)
    if layout.upper_bits:
        for k in range(code_words.shape[3]):
            code_words[:, :, :, k] |= (upper[:, :, :, 0] >> k * layout.upper_bits & layout.upper_mask) << 4
    return code_words


def pack_codes(layout: GroupLayout, code_words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return words of four 8-bit codes packed as the layout stores codes: the inverse of `unpack_codes`."""
    if layout.bits == 8:
        return code_words
    words = np.zeros((*code_words.shape[:3], layout.row_words, *code_words.shape[4:]), np.uint32)
    words[:, :, :, : layout.lower_words] = code_words[:, :, :, : layout.lower_words] & NIBBLE_MASK
    words[:, :, :, : layout.lower_words] |= (code_words[:, :, :, layout.lower_words :] & NIBBLE_MASK) << 4
    if layout.upper_bits:
        for k in range(code_words.shape[3]):
            words[:, :, :, layout.lower_words] |= (code_words[:, :, :, k] >> 4 & layout.upper_mask) << k * layout.upper_bits
    return words


class PackArgs(NamedTuple):
    """Arguments of the kernel `pack_panels`.

    Attributes:
        panels: Panels as words.
        panel_halves: The same panels as 16-bit values.
        panel_bytes: The same panels as bytes.
        params, factors, words: A `GroupedRows`, each array flat from the second axis on.
        first: First panel to fill.
        stride: Panels from one to the next.
    """

    panels: Words3
    panel_halves: Halves3
    panel_bytes: Bytes3
    params: Halves2
    factors: Bytes2
    words: Words2
    first: int
    stride: int


@kernel
def pack_panels(run: ForwardContext, thread: int, p: PackArgs) -> None:
    """Pack rows of grouped weights (rows, ...) into every stride-th panel from `first` on."""
    rows, n_blocks = p.words.shape[0], p.panels.shape[1]
    block_params, block_factors = p.params.shape[1] // n_blocks, p.factors.shape[1] // n_blocks
    block_words = p.words.shape[1] // n_blocks
    factors_offset = 2 * block_params * PANEL_ROWS
    codes_offset = (factors_offset + block_factors * PANEL_ROWS) // BYTES_PER_WORD
    begin, end = get_chunk_range(ceil_div(rows, PANEL_ROWS), run.chunk, run.n_chunks)
    for i_panel in range(begin, end):
        panel = p.first + p.stride * i_panel
        for block in range(n_blocks):
            for r in range(min(PANEL_ROWS, rows - i_panel * PANEL_ROWS)):
                row = i_panel * PANEL_ROWS + r
                for i in range(block_params):
                    p.panel_halves[panel, block, i * PANEL_ROWS + r] = p.params[row, block * block_params + i]
                for i in range(block_factors):
                    p.panel_bytes[panel, block, factors_offset + i * PANEL_ROWS + r] = p.factors[row, block * block_factors + i]
                for i in range(block_words):
                    p.panels[panel, block, codes_offset + i * PANEL_ROWS + r] = p.words[row, block * block_words + i]


def pack_grouped_rows(panels: Float32, first: int, stride: int, rows: GroupedRows) -> None:
    """Pack a `GroupedRows` into every stride-th panel from `first` on, on all threads."""
    n = len(rows.words)
    flat = rows.params.reshape(n, -1), rows.factors.view(np.uint8).reshape(n, -1), rows.words.reshape(n, -1)
    run_on_all_threads(pack_panels(panels.view(np.uint32), panels.view(np.uint16), panels.view(np.uint8), *flat, first, stride))


def ungroup(layout: GroupLayout, rows: GroupedRows) -> Float32:
    """Return grouped rows as float32 (rows, columns), code * scale + minimum; each product and sum is rounded."""
    params = rows.params.view(np.float16).astype(np.float32)[..., None]
    if layout.n_groups > 1:
        params = params * rows.factors
    codes = unpack_codes(layout, rows.words)[..., None].view(np.uint8)  # (rows, blocks, groups, words, 4)
    values = codes.astype(np.float32) - np.float32(layout.zero_point)
    scales, *minima = (params[:, :, i, :, None, None] for i in range(layout.n_params))
    values *= scales
    for minimum in minima:
        values += minimum
    return values.reshape(len(values), -1)


def unpack(layout: GroupLayout, panels: Float32, n: int, group_size: int, block: slice = ALL_PANELS) -> Float32:
    """Return the rows of grouped weights as float32; implements `WeightFormat.unpack`."""
    panels = panels[block]
    size, n_blocks = panels.shape[:2]

    def get_part(first: int, last: int, dtype: Any, *shape: int) -> npt.NDArray[Any]:
        """Return words first to last - 1 of the blocks as an array (P R, blocks, ...) of the dtype."""
        part = panels[..., first:last].view(dtype).reshape(size, n_blocks, *shape, PANEL_ROWS)
        return np.ascontiguousarray(part.transpose(0, -1, *range(1, part.ndim - 1))).reshape(size * PANEL_ROWS, n_blocks, *shape)

    is_grouped, codes_offset = layout.n_groups > 1, layout.codes_offset
    rows = GroupedRows(
        get_part(0, layout.factors_offset, np.uint16, layout.n_params),
        get_part(layout.factors_offset, codes_offset, np.int8, layout.n_params, layout.n_groups * is_grouped),
        get_part(codes_offset, layout.block_words, np.uint32, layout.n_groups, layout.row_words),
    )
    return np.ascontiguousarray(ungroup(layout, rows)[:, :n])


def _get_group_size(layout: GroupLayout, n: int, file_group: int) -> int:
    """Return the group size of a layout; implements `WeightFormat.get_group_size`."""
    return layout.group_size


def _get_panel_shape(layout: GroupLayout, n: int, group_size: int) -> tuple[int, int]:
    """Return the blocks and words of a panel of a layout; implements `WeightFormat.get_panel_shape`."""
    return ceil_div(n, layout.block_columns), layout.block_words


def make_grouped_format(
    module: str, name: str, layout: GroupLayout, pack: Callable[[Float32, int, int, Any, int], None]
) -> WeightFormat:
    """Return the weight format of a group layout.

    Args:
        module: Module that creates the format, in which its kernels are registered.
        name: Name of the format, for users.
        layout: Layout of the groups.
        pack: Its `WeightFormat.pack`, which fills its panels.
    """
    prefix = f"{name.replace(' ', '_')}_"
    matmul, expert_matmul = make_matmul_kernels(module, prefix, *make_group_tile(layout, DOT4_NAME), get_quantized_activations)
    return WeightFormat(
        name,
        matmul,
        make_embed_kernel(module, prefix, make_weight_getter(layout)),
        expert_matmul,
        functools.partial(_get_group_size, layout),
        functools.partial(_get_panel_shape, layout),
        pack,
        functools.partial(unpack, layout),
        get_scratch_words,
    )
