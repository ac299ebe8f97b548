"""Weights of 2 to 8 bits in groups that share a scale and perhaps a minimum: code * scale + minimum, as in GGUF's block types.

Activations are int8 in groups of the same size, as `int8.quantize_activations` makes them. The integer sums of a group are exact,
so their order is free; its float terms enter their row's chain in order: sum (scale q + minimum) x = scale sum(q x) + minimum
sum(x).

A panel is (blocks, words). A block of columns holds for each of the R rows the fp16 scale and, with minima, the fp16 minimum. If
a block has several groups, the rows' int8 factors of the scale follow for each group, then those of the minimum; with codes of 2
bits, a byte holds both factors, of 4 bits each. A scale that is a power of two is one byte, the exponent of its float32.

Then follow the codes of each group: words of 4 bytes, the rows innermost. Code word k is the 4 codes from 4 k on as bytes, of
which byte b is made from bits of byte b of the stored words: see `get_bit_fields`. Codes without a minimum have the middle of
their range as zero point: 4, 8, 16, 32 or 128.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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

PANEL_FP16_WORDS = PANEL_ROWS // 2  # words of one fp16 number per row
PANEL_BYTE_WORDS = PANEL_ROWS // 4  # words of one byte per row
EACH_BYTE = 0x01010101  # 1 in every byte of a word
FP32_FRACTION_BITS = 23
POWERS_OF_TWO = (np.arange(256, dtype=np.uint32) << np.uint32(FP32_FRACTION_BITS)).view(np.float32)  # by exponent; 0 first


# Values of the 4-bit codes: twice the floats of one sign bit, two exponent bits and one mantissa bit (E2M1 of MX, OCP 2023), and
# ggml's kvalues_iq4nl.
CODEBOOKS = {
    "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}
CODEBOOK_BITS = {"e2m1": 5, "nl": 8}
CODEBOOK_CODES = {name: np.array(numbers) + (1 << (CODEBOOK_BITS[name] - 1)) for name, numbers in CODEBOOKS.items()}


class GroupLayout(NamedTuple):
    """The layout of weights in groups. A group of 5 bits has 32 codes, one of 2, 3 or 6 has 16.

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
    def has_exponents(self) -> bool:
        """Whether a scale is a power of two, stored as the exponent of its float32."""
        return self.codebook == "e2m1"

    @property
    def has_nibble_factors(self) -> bool:
        """Whether a byte holds a group's factors of the scale and, in the upper half, of the minimum."""
        return self.bits == 2

    @property
    def n_halves(self) -> int:
        """Numbers of a row's block that are stored as fp16."""
        return 0 if self.has_exponents else self.n_params

    @property
    def n_factor_bytes(self) -> int:
        """Bytes of a row's block that hold the exponent of its scale, or the groups' factors."""
        return self.n_groups * (1 if self.has_nibble_factors else self.n_params) * (self.n_groups > 1 or self.has_exponents)

    @property
    def factors_offset(self) -> int:
        """Offset of the exponents or factors in a block, in words; they follow the block's fp16 scales and minima."""
        return PANEL_FP16_WORDS * self.n_halves

    @property
    def codes_offset(self) -> int:
        """Offset of the codes in a block, in words; they follow the exponents or factors, if there are any."""
        return self.factors_offset + PANEL_BYTE_WORDS * self.n_factor_bytes

    @property
    def unit_groups(self) -> int:
        """Groups of a unit, whose codes of a row fill whole words."""
        return 2 if self.bits == 3 else 1

    @property
    def unit_words(self) -> int:
        """Words that the codes of one row take in a unit."""
        return self.unit_groups * self.group_size * self.bits // 32

    @property
    def n_units(self) -> int:
        """Units of a block."""
        return self.n_groups // self.unit_groups

    @property
    def block_words(self) -> int:
        """Words of a block for all rows of a panel."""
        return self.codes_offset + self.n_units * self.unit_words * PANEL_ROWS

    @property
    def zero_point(self) -> int:
        """The code of a weight of 0, if there are no minima."""
        return 0 if self.has_minima else 1 << (self.code_bits - 1)


class BitField(NamedTuple):
    """Bits of each byte of a stored word that become bits of the codes in a code word.

    Attributes:
        word: The stored word: one of the group's own, counted from 0, or else the one that the groups of a unit share.
        shift: The lowest of the bits, in the unit's first group.
        n_bits: Number of bits.
        to: The bit of the code that the lowest of them becomes.
    """

    word: int
    shift: int
    n_bits: int
    to: int

    @property
    def mask(self) -> int:
        """Mask of these bits in a code word."""
        return EACH_BYTE * ((1 << self.n_bits) - 1 << self.to)


def get_bit_fields(layout: GroupLayout) -> list[list[BitField]]:
    """Return the fields of each code word of a unit.

    Codes of 8 bits are bytes. Otherwise a byte holds 4 codes of 2 bits, or the lower 4 bits of 2 codes; these are a quarter or
    half of a group apart. The other 1 or 2 bits of codes 4 k to 4 k + 3 are in one word, from bit k or 2 k of each byte on.

    A unit of two groups of 3 bits has a word for each group and one for both. With 2 bits of a code in the one and 1 bit in the
    other, each code would take 5 instructions; this way only one in four does.
    """
    if layout.bits == 3:
        pairs = ((BitField(g, 6, 2, 0), BitField(2, 4 * g + 3, 1, 2)) for g in range(2))
        return [
            fields
            for g, pair in enumerate(pairs)
            for fields in ([BitField(g, 0, 3, 0)], [BitField(g, 3, 3, 0)], [BitField(2, 4 * g, 3, 0)], [*pair])
        ]
    lower_bits = min(layout.bits, 4) if layout.bits < 8 else 8
    n_words, n_upper, fields = layout.group_size * lower_bits // 32, layout.bits - lower_bits, list[list[BitField]]()
    for k in range(layout.group_size // BYTES_PER_WORD):
        part, word = divmod(k, n_words)
        upper = BitField(n_words, k * n_upper, n_upper, lower_bits)
        fields.append([BitField(word, part * lower_bits, lower_bits, 0), *[upper][:n_upper]])
    return fields


def make_group_tile_body(layout: GroupLayout, dot: Dot4) -> Any:
    """Return a function that emits the body of a tile over weights of a group layout, n blocks, with byte products by `dot`."""
    x_group_words, bit_fields = GROUP_HEADER_WORDS + layout.group_size // BYTES_PER_WORD, get_bit_fields(layout)

    def emit(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> None:
        lanes, n_vectors, n_tokens = shape
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        out_pointers, initial_sums = load_accumulators(builder, shape, row_block, tile)
        totals = [cgutils.alloca_once_value(builder, start) for start in initial_sums]
        row_block_words = layout.block_words // (layout.block_words // PANEL_ROWS)  # words that tile.prefetch_stride covers
        line_stride = builder.udiv(builder.mul(tile.prefetch_stride, const(LINE_WORDS)), const(row_block_words))
        n_lines = builder.udiv(builder.mul(tile.n, const(layout.block_words)), const(LINE_WORDS))
        align = BYTES_PER_WORD * min(lanes, LINE_WORDS // 2)  # a block with exponents may start in the middle of a line
        prefetch_at, prefetch_stride = row_block.split_prefetch(builder, tile.prefetch_at, line_stride, n_lines)

        def splat_int(value: int) -> Any:
            return make_constant_vector(integers, value)

        def load_params(block: Any, param: int, v: int) -> Any:
            """Load the scales or minima of a vector's rows, fp16 numbers or exponents."""
            if layout.has_exponents:
                exponents = builder.zext(load_bytes(block, const(layout.factors_offset), v), integers)
                return builder.bitcast(builder.shl(exponents, splat_int(FP32_FRACTION_BITS)), floats)
            at = builder.add(builder.udiv(row_block.first_row, const(2)), const(param * PANEL_FP16_WORDS + v * lanes // 2))
            at = offset_pointer(builder, block, at, FP16_STORAGE.vector(lanes))
            return FP16_STORAGE.widen(builder, builder.load(at, align=2 * lanes))

        def load_bytes(block: Any, offset: Any, v: int) -> Any:
            """Load the bytes of a vector's rows at word `offset` of a block."""
            word = builder.add(offset, builder.add(builder.udiv(row_block.first_row, const(4)), const(v * lanes // 4)))
            return builder.load(offset_pointer(builder, block, word, ir.VectorType(I8, lanes)), align=lanes)

        def load_factors(block: Any, g: Any, v: int) -> list[Any]:
            """Load the factors of a vector's rows in group g as floats: of the scale, and perhaps of the minimum."""

            def get_offset(i: int) -> Any:
                return builder.add(builder.mul(g, const(PANEL_BYTE_WORDS)), const(layout.factors_offset + i * PANEL_BYTE_WORDS))

            if layout.has_nibble_factors:
                both = builder.zext(load_bytes(block, get_offset(0), v), integers)
                factors = [builder.and_(both, splat_int(15)), builder.lshr(both, splat_int(4))]
            else:
                offsets = [get_offset(param * layout.n_groups) for param in range(layout.n_params)]
                factors = [builder.sext(load_bytes(block, offset, v), integers) for offset in offsets]
            return [builder.sitofp(each, floats) for each in factors]

        def make_first_sum(correction: Any) -> Any:
            """Return the start of a group's integer sum that makes it sum (code - zero_point) x; correction: -128 sum(x)."""
            correction = broadcast(builder, correction, integers)
            sum_of_zeros = builder.ashr(correction, splat_int(8 - layout.code_bits)) if layout.zero_point else splat_int(0)
            return builder.sub(sum_of_zeros, correction) if dot.is_signed else sum_of_zeros  # it multiplies codes - 128

        def look_up(nibbles: Any) -> Any:
            """Look up each byte in the layout's codebook."""
            byte_vector = ir.VectorType(I8, BYTES_PER_WORD * lanes)
            table = ir.Constant(ir.VectorType(I8, TABLE_BYTES), CODEBOOK_CODES[layout.codebook].tolist())
            lookup = choose_lookup(FEATURES, byte_vector.count)
            return builder.bitcast(emit_lookup(builder, table, builder.bitcast(nibbles, byte_vector), lookup), integers)

        def get_code_word(fields: Sequence[BitField], words: Mapping[int, list[Any]], v: int) -> Any:
            """Return a code word of a vector's rows, made from the words of their unit."""
            parts = []
            for field in fields:
                part, shift = words[field.word][v], field.shift - field.to
                part = builder.lshr(part, splat_int(shift)) if shift >= 0 else builder.shl(part, splat_int(-shift))
                parts.append(builder.and_(part, splat_int(field.mask)) if field.n_bits < 8 else part)
            code_word = functools.reduce(builder.or_, parts)
            return look_up(code_word) if layout.codebook else code_word

        def fetch(first: Any, n_lines: int) -> None:
            """Prefetch n_lines of the panel ahead of word `first`."""
            pointer = builder.gep(prefetch_at, [builder.mul(builder.udiv(first, const(LINE_WORDS)), prefetch_stride)])
            for _ in range(0, n_lines, row_block.n_blocks):
                prefetch(builder, pointer, const(0))
                pointer = builder.gep(pointer, [line_stride])

        def emit_group(unit: Any, i_group: int, rows: list[Any], scales: list[list[Any]]) -> None:
            """Add the sums of group i_group of a unit to the totals.

            unit: the unit's first word; rows: one pointer to x per token; scales: vectors per scale and minimum.
            """
            corrections = [builder.load(offset_pointer(builder, row, const(1), I32)) for row in rows]
            sums = [dot.start_sum(builder, make_first_sum(corrections[t])) for t in range(n_tokens) for _ in range(n_vectors)]
            unit_words = builder.gep(tile.w, [builder.add(unit, row_block.first_row)])
            n_code_words = layout.group_size // BYTES_PER_WORD
            group_fields = bit_fields[i_group * n_code_words : (i_group + 1) * n_code_words]
            words = {
                word: [
                    builder.load(offset_pointer(builder, unit_words, const(word * PANEL_ROWS + lanes * v), integers), align=align)
                    for v in range(n_vectors)
                ]
                for word in sorted({field.word for fields in group_fields for field in fields})
            }
            for first_word in words:
                code_words = {
                    i: [dot.prepare_weights(builder, get_code_word(fields, words, v)) for v in range(n_vectors)]
                    for i, fields in enumerate(group_fields)
                    if fields[0].word == first_word
                }
                for t, row in enumerate(rows):
                    for i_word, weights in code_words.items():
                        x_word = builder.load(offset_pointer(builder, row, const(GROUP_HEADER_WORDS + i_word), I32))
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
            fetch(first, ceil_div(layout.codes_offset if layout.n_groups > 1 else layout.block_words, LINE_WORDS))
            scales = [[load_params(block, param, v) for v in range(n_vectors)] for param in range(layout.n_params)]
            if layout.n_groups == 1:
                emit_group(codes, 0, rows, scales)
            else:
                with cgutils.for_range(builder, const(layout.n_units)) as units:
                    unit = builder.add(codes, builder.mul(units.index, const(layout.unit_words * PANEL_ROWS)))
                    fetch(unit, layout.unit_words * PANEL_ROWS // LINE_WORDS)
                    for i_group in range(layout.unit_groups):
                        g = builder.add(builder.mul(units.index, const(layout.unit_groups)), const(i_group))
                        group_rows = [builder.gep(row, [builder.mul(g, const(x_group_words))]) for row in rows]
                        factors = [load_factors(block, g, v) for v in range(n_vectors)]
                        group_scales = [
                            [builder.fmul(scales[param][v], factors[v][param]) for v in range(n_vectors)]
                            for param in range(layout.n_params)
                        ]
                        emit_group(unit, i_group, group_rows, group_scales)
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
    _, group_size, _, has_minima, codebook = layout
    columns, zero_point, codes_offset = layout.block_columns, layout.zero_point, layout.codes_offset
    unit_columns, unit_words = layout.unit_groups * group_size, layout.unit_words
    bit_fields = get_bit_fields(layout)
    n_fields = max(map(len, bit_fields))
    fields = np.array([[*own, *[BitField(0, 0, 0, 0)] * (n_fields - len(own))] for own in bit_fields])
    load_param = make_param_loader(layout)
    has_codebook, codes = bool(codebook), CODEBOOK_CODES.get(codebook, np.zeros(1, np.int64))

    @inlined
    def get_weight(w, panel, row, k, n, _group_size):
        i_block, i = divmod(k, columns)
        g, (unit, i) = i // group_size, divmod(i, unit_columns)
        block = (panel * w.shape[1] + i_block) * w.shape[2]
        # Byte of the code in the unit's first word
        at = (block + codes_offset + unit * unit_words * PANEL_ROWS + row) * BYTES_PER_WORD + i % BYTES_PER_WORD
        code = 0
        for j in range(n_fields):
            word, shift, n_bits, to = fields[i // BYTES_PER_WORD, j]
            byte = load_byte(w, at + word * PANEL_ROWS * BYTES_PER_WORD)
            code |= ((byte >> shift) & ((1 << n_bits) - 1)) << to
        if has_codebook:
            code = codes[code]
        weight = np.float32(code - zero_point) * load_param(w, block, 0, row, g)
        if has_minima:
            weight += load_param(w, block, 1, row, g)
        return weight

    return get_weight


def make_param_loader(layout: GroupLayout) -> Any:
    """Return an inlined function that reads a row's scale (param 0) or minimum (param 1) of a group layout, as float32.

    The group is g of the block that starts at word `block`.
    """
    n_groups, factors_offset = layout.n_groups, layout.factors_offset * BYTES_PER_WORD
    has_nibble_factors = layout.has_nibble_factors

    @inlined
    def load_exponent(w, block, param, row, g):
        return POWERS_OF_TWO[load_byte(w, block * BYTES_PER_WORD + factors_offset + row)]

    @inlined
    def load_param(w, block, param, row, g):
        at = 2 * block + param * PANEL_ROWS + row
        number = extract_lane(load_fp16(w, at - at % LANES), at % LANES)
        if n_groups > 1:
            i = g if has_nibble_factors else param * n_groups + g
            factor = load_byte(w, block * BYTES_PER_WORD + factors_offset + i * PANEL_ROWS + row)
            number *= np.float32((factor >> 4 * param) & 15 if has_nibble_factors else (factor ^ 128) - 128)
        return number

    return load_exponent if layout.has_exponents else load_param


class GroupedRows(NamedTuple):
    """Rows of weights of a `GroupLayout` before they are packed into panels: the parts of each block, row by row.

    Attributes:
        params: (rows, blocks, n_halves), scales and minima as the bits of fp16.
        factors: (rows, blocks, n_factor_bytes), exponents or factors as bytes.
        words: (rows, blocks, n_units, unit_words), the codes.
    """

    params: npt.NDArray[np.uint16]
    factors: npt.NDArray[np.uint8]
    words: npt.NDArray[np.uint32]

    def flatten(self) -> list[npt.NDArray[Any]]:
        """Return the arrays as matrices with a row for each row of weights."""
        return [part.reshape(len(part), math.prod(part.shape[1:])) for part in self]


def allocate_grouped_rows(layout: GroupLayout, n: int, n_blocks: int) -> GroupedRows:
    """Return uninitialized `GroupedRows` of n rows of n_blocks blocks."""
    return GroupedRows(
        np.empty((n, n_blocks, layout.n_halves), np.uint16),
        np.empty((n, n_blocks, layout.n_factor_bytes), np.uint8),
        np.empty((n, n_blocks, layout.n_units, layout.unit_words), np.uint32),
    )


def unpack_codes(layout: GroupLayout, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the codes of `GroupedRows.words` as words of four 8-bit codes, (rows, blocks, groups, words)."""
    if layout.codebook:
        codes = CODEBOOK_CODES[layout.codebook][unpack_codes(layout._replace(codebook=""), words)[..., None].view(np.uint8)]
        return codes.astype(np.uint8).view(np.uint32)[..., 0]
    unit_fields = get_bit_fields(layout)
    code_words = np.zeros((*words.shape[:3], len(unit_fields)), np.uint32)
    for k, fields in enumerate(unit_fields):
        for field in fields:
            code_words[..., k] |= words[..., field.word] >> field.shift << field.to & field.mask
    return code_words.reshape(*words.shape[:2], layout.n_groups, -1)


def pack_codes(layout: GroupLayout, code_words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return words of four 8-bit codes packed as the layout stores codes: the inverse of `unpack_codes`."""
    unit_fields = get_bit_fields(layout)
    code_words = code_words.reshape(*code_words.shape[:2], layout.n_units, len(unit_fields))
    words = np.zeros((*code_words.shape[:3], layout.unit_words), np.uint32)
    for k, fields in enumerate(unit_fields):
        for field in fields:
            words[..., field.word] |= (code_words[..., k] & field.mask) >> field.to << field.shift
    return words


def split_factors(layout: GroupLayout, factors: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Return the factors of `GroupedRows` as (rows, blocks, params, groups)."""
    if layout.has_nibble_factors:
        return np.stack([factors & 15, factors >> 4], 2).view(np.int8)
    return factors.view(np.int8).reshape(*factors.shape[:2], layout.n_params, -1)


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
    views = (panels.view(dtype) for dtype in (np.uint32, np.uint16, np.uint8))
    run_on_all_threads(pack_panels(*views, *rows.flatten(), first, stride))


def ungroup(layout: GroupLayout, rows: GroupedRows) -> Float32:
    """Return grouped rows as float32 (rows, columns), code * scale + minimum; each product and sum is rounded."""
    if layout.has_exponents:
        params = POWERS_OF_TWO[rows.factors][..., None]
    else:
        params = rows.params.view(np.float16).astype(np.float32)[..., None]
    if layout.n_groups > 1:
        params = params * split_factors(layout, rows.factors)
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

    rows = GroupedRows(
        get_part(0, layout.factors_offset, np.uint16, layout.n_halves),
        get_part(layout.factors_offset, layout.codes_offset, np.uint8, layout.n_factor_bytes),
        get_part(layout.codes_offset, layout.block_words, np.uint32, layout.n_units, layout.unit_words),
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
