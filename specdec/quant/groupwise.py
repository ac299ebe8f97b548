"""Weights of 1 to 8 bits in groups that share a scale and perhaps a minimum: code * scale + minimum, as in GGUF's block types.

Activations are int8 in groups of the same size, as `int8.quantize_activations` makes them. The integer sums of a group are exact,
so their order is free; its float terms enter their row's chain in order: sum (scale q + minimum) x = scale sum(q x) + minimum
sum(x).

A panel is (blocks, words). A block of columns holds for each of the R rows the fp16 scale and, with minima, the fp16 minimum. If
a block has several groups, the rows' int8 factors of the scale follow for each group, then those of the minimum; with codes of 2
bits, a byte holds both factors, of 4 bits each. With the codebook "e2m1", each group has a scale of one byte instead: the
exponent of a float32, or 5 bits of exponent and 3 of fraction. In the second case, one more block ends the panel: it begins with
an fp32 factor of each row's scales.

Then follow the codes of each group: words of 4 bytes, the rows innermost. Code word k is the 4 codes from 4 k on as bytes, of
which byte b is made from bits of byte b of the stored words: see `get_bit_fields`. Codes without a minimum have the middle of
their range as zero point: 4, 8, 16, 32 or 128. It is 1 for the codes 0 to 3 of 2 bits, and for the codes 0 and 2 of 1 bit.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.quant.dot4 import DOT4_BY_NAME, Dot4
from specdec.quant.int8 import BYTES_PER_WORD, GROUP_HEADER_WORDS, QuantizedFormat, make_activation_getter
from specdec.quant.matmul import Tile, TileShape, get_number, prefetch_lines, start_sums
from specdec.runtime import op_program, simd, tile_simd
from specdec.runtime.code_cache import CompiledFunction, inlined, jitable, make_dispatcher
from specdec.runtime.op_program import Bytes3, ForwardContext, Halves3, Words3, kernel
from specdec.runtime.simd import LANES, LINE_WORDS, PANEL_ROWS, Array, Float32, add, ceil_div, extract_lane, fma, load_byte, mul
from specdec.runtime.work_stealing import get_chunk_range

PANEL_FP16_WORDS = PANEL_ROWS // 2  # words of one fp16 number per row
PANEL_BYTE_WORDS = PANEL_ROWS // 4  # words of one byte per row
EACH_BYTE = 0x01010101  # 1 in every byte of a word
FP32_FRACTION_BITS = 23
SCALE_FRACTION_BITS = 3  # of a scale of one byte in a block of several groups
ROW_SCALE_FACTOR = np.float32(2.0**116)  # of row scales: exponents 1 to 31 of a scale of one byte are 2^-10 to 2^20
# With AVX-512, tiles of few tokens read memory faster in registers of 8 lanes than of 16: Qwen2.5 1.5B Q4_K_M takes 0.89 to 0.97
# of the time for one token and 0.94 to 0.98 for two (Zen 4). Four tokens would take 1.05, one from a cache takes 1.04 to 1.14.
HALF_REGISTER_LANES, MAX_HALF_REGISTER_TOKENS = 8, 2

# Values of the 4-bit codes: twice the floats of one sign bit, two exponent bits and one mantissa bit (E2M1 of MX, OCP 2023), and
# ggml's kvalues_iq4nl.
CODEBOOKS = {
    "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}
CODEBOOK_BITS = {"e2m1": 5, "nl": 8}
CODEBOOK_CODES = {name: np.array(numbers) + (1 << (CODEBOOK_BITS[name] - 1)) for name, numbers in CODEBOOKS.items()}


class GroupLayout(NamedTuple):
    """The layout of weights in groups. A group of 5 bits has 32 codes, one of 3 or 6 has 16.

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
        """Bits of a code in a code word."""
        return CODEBOOK_BITS[self.codebook] if self.codebook else max(self.bits, 2)

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return self.group_size * self.n_groups

    @property
    def n_params(self) -> int:
        """Numbers per group: a scale and perhaps a minimum."""
        return 1 + self.has_minima

    @property
    def has_byte_scales(self) -> bool:
        """Whether a group's scale is one byte: see `byte_scales`."""
        return self.codebook == "e2m1"

    @property
    def scale_shift(self) -> int:
        """The bit of a float32 that the lowest bit of a scale of one byte is."""
        return FP32_FRACTION_BITS - (SCALE_FRACTION_BITS if self.n_groups > 1 else 0)

    @property
    def has_row_scales(self) -> bool:
        """Whether one more block ends a panel and begins with an fp32 factor of each row's scales, times `ROW_SCALE_FACTOR`."""
        return self.has_byte_scales and self.n_groups > 1

    @property
    def byte_scales(self) -> Float32:
        """The scale of each byte, (256,), without the row's factor."""
        return (np.arange(256, dtype=np.uint32) << np.uint32(self.scale_shift)).view(np.float32)

    @property
    def has_nibble_factors(self) -> bool:
        """Whether a byte holds a group's factors of the scale and, in the upper half, of the minimum."""
        return self.bits == 2 and self.n_groups > 1

    @property
    def n_halves(self) -> int:
        """Numbers of a row's block that are stored as fp16."""
        return 0 if self.has_byte_scales else self.n_params

    @property
    def n_factor_bytes(self) -> int:
        """Bytes of a row's block that hold the groups' scales or factors."""
        return self.n_groups * (1 if self.has_nibble_factors else self.n_params) * (self.n_groups > 1 or self.has_byte_scales)

    @property
    def factors_offset(self) -> int:
        """Offset of the scales of one byte or the factors in a block, in words; they follow the block's fp16 numbers."""
        return PANEL_FP16_WORDS * self.n_halves

    @property
    def codes_offset(self) -> int:
        """Offset of the codes in a block, in words; they follow the scales of one byte or the factors, if there are any."""
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
    def has_long_groups(self) -> bool:
        """Whether a loop adds a group's products, one stored word after another."""
        return self.bits <= 2 and self.n_groups == 1

    @property
    def zero_point(self) -> int:
        """The code of a weight of 0, if there are no minima."""
        if self.has_minima:
            return 0
        return 1 if self.bits <= 2 else 1 << (self.code_bits - 1)


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

    Codes of 8 bits are bytes. A byte holds 8 consecutive codes of 1 bit, 4 of 2 bits, or the lower 4 bits of 2 codes, which are
    half a group apart. The other 1 or 2 bits of codes 4 k to 4 k + 3 are in one word, from bit k or 2 k of each byte on.

    A unit of two groups of 3 bits has a word for each group and one for both. With 2 bits of a code in the one and 1 bit in the
    other, each code would take 5 instructions; this way only one in four does.
    """
    bits, n_code_words = layout.bits, layout.group_size // BYTES_PER_WORD
    if bits == 3:
        pairs = ((BitField(g, 6, 2, 0), BitField(2, 4 * g + 3, 1, 2)) for g in range(2))
        return [
            fields
            for g, pair in enumerate(pairs)
            for fields in ([BitField(g, 0, 3, 0)], [BitField(g, 3, 3, 0)], [BitField(2, 4 * g, 3, 0)], [*pair])
        ]
    if bits <= 2:
        places = (divmod(k, 8 // bits) for k in range(n_code_words))
        return [[BitField(word, bits * part, bits, 2 - bits)] for word, part in places]
    lower_bits = 8 if bits == 8 else 4
    n_words, n_upper, fields = layout.group_size * lower_bits // 32, bits - lower_bits, list[list[BitField]]()
    for k in range(n_code_words):
        part, word = divmod(k, n_words)
        upper = BitField(n_words, k * n_upper, n_upper, lower_bits)
        fields.append([BitField(word, part * lower_bits, lower_bits, 0), *[upper][:n_upper]])
    return fields


def get_code_source(fields: list[BitField], pointer: str = "words") -> str:
    """Return an expression for the code word of these fields, for the rows of a tile.

    pointer: Name of the variable that points to stored word 0.
    """
    parts = []
    for field in fields:
        part = f"load_vector({pointer}, {field.word * PANEL_ROWS})"
        if field.shift > field.to:
            part = f"shift_right({part}, {field.shift - field.to})"
        elif field.shift < field.to:
            part = f"shift_left({part}, {field.to - field.shift})"
        parts.append(part if field.n_bits == 8 else f"bit_and({part}, {field.mask:#010x})")
    return functools.reduce(lambda lower, upper: f"bit_or({lower}, {upper})", parts)


GROUP_SUM_TEMPLATE = """
def sum_group(words, i_group, xs, at, ahead, ahead_step):
    sums = {start}
    {lines}
    return {end}
"""


def count_words_in_16_bits(layout: GroupLayout) -> int:
    """Return the number of code words of a group whose products fit 16-bit sums, two products of a word in each sum."""
    max_words = (2**15 - 1) // (2 * (2**layout.code_bits - 1) * 127)
    return int(max(min(max_words, layout.group_size // BYTES_PER_WORD), 1))


def is_token_major(layout: GroupLayout, dot: Dot4, rows: int) -> bool:
    """Return whether a tile of this many rows adds all words of a token before those of the next.

    With AVX2 and one register of rows for each of up to 8 tokens it does: Q3_K with 8 tokens takes 0.86 of the time. With more
    registers for each of few tokens, or in groups of more than 32 columns, the words would not fit.
    """
    return dot.pairs is not None and layout.code_bits < 8 and rows <= dot.lanes and layout.group_size <= 32


def get_zero_point(layout: GroupLayout, dot: Dot4) -> int:
    """Return the code of a weight of 0 as `dot` multiplies it: signed products of 8 bits are those of code - 128."""
    return layout.zero_point - 128 * (dot.is_signed and layout.code_bits == 8)


def make_group_sum_source(layout: GroupLayout, dot: Dot4, rows: int) -> str:
    """Return the source of sum_group, which returns the sum of (code - zero point) * x over a group, exactly.

    words points to the unit of the group, i_group is the group's number in the unit. xs are pointers to the activations of each
    token, whose group begins at word `at`. A line adds the products of one code word: LLVM would not unroll a loop over them if a
    tile has many tokens. A long group has a loop, which prefetches from `ahead` on, ahead_step bytes for each stored word.
    """
    start, end = "fill_vector(words, 0)", "sums"
    if get_zero_point(layout, dot):
        start = "fill_vector(words, get_number(xs, at + 1))"
    if get_zero_point(layout, dot) and is_token_major(layout, dot, rows):  # no register holds each token's correction meanwhile
        start, end = "fill_vector(words, 0)", "add(sums, advance(xs, at + 1))"
    fields, n = get_bit_fields(layout), layout.group_size // BYTES_PER_WORD
    get_lines = get_long_group_lines if layout.has_long_groups else get_product_lines
    lines = get_lines(layout, dot, rows, fields[:n])
    if layout.unit_groups > 1:
        last_lines = get_product_lines(layout, dot, rows, fields[n:])
        lines = ["if i_group == 0:", *(f"    {line}" for line in lines), "else:", *(f"    {line}" for line in last_lines)]
    return GROUP_SUM_TEMPLATE.format(start=start, lines="\n    ".join(lines), end=end)


def get_long_group_lines(layout: GroupLayout, dot: Dot4, rows: int, fields: list[list[BitField]]) -> list[str]:
    """Return the lines of sum_group for a long group: a loop over its stored words.

    Without a loop, LLVM adds all words of one register of rows or one token before those of the next, keeps what it loaded or
    unpacked on the stack meanwhile, and prefetches a block at once: TQ2_0 with AVX2 takes 1.75 and 1.45 times as long for 1 and 8
    tokens.
    """
    n_codes = 8 // layout.bits  # code words of a stored word
    n_words = min(layout.unit_words, 32 // n_codes)  # whose products fit 16-bit sums; see `count_words_in_16_bits`
    lines = [
        f"prefetch_lines(ahead, i * ahead_step, {rows * BYTES_PER_WORD})",
        f"word, x = advance(words, i * {PANEL_ROWS}), advance(xs, at + {GROUP_HEADER_WORDS} + i * {n_codes})",
    ]
    for k in range(n_codes):
        factors = f"{get_code_source(fields[k], 'word')}, advance(x, {k})"
        lines.append(f"pairs = add_pairs(pairs, {factors})" if dot.pairs else f"sums = dot4(sums, {factors})")
    lines = [f"for i in range(first, first + {n_words}):", *(f"    {line}" for line in lines)]
    if dot.pairs:  # the first product makes 16-bit zeros
        lines = ["pairs = multiply_pairs(fill_vector(words, 0), advance(xs, at))", *lines, "sums = widen_pairs(sums, pairs)"]
    return [f"for first in range(0, {layout.unit_words}, {n_words}):", *(f"    {line}" for line in lines)]


def get_product_lines(layout: GroupLayout, dot: Dot4, rows: int, fields: list[list[BitField]]) -> list[str]:
    """Return the lines of sum_group that add the products of code words with these fields."""
    n_words = count_words_in_16_bits(layout)
    order = sorted(range(len(fields)), key=lambda k: fields[k][0].word)  # so that a stored word is loaded once and not kept
    lines, factors = list[str](), list[str]()
    for i, k in enumerate(order):
        codes, x = get_code_source(fields[k]), f"advance(xs, at + {GROUP_HEADER_WORDS + k})"
        if layout.codebook:
            codes = f"look_up({codes})"
        factors.append(f"{codes}, {x}")
        if layout.code_bits == 8:
            lines.append(f"sums = dot4(sums, prepare({codes}), {x})")
        elif not dot.pairs:
            lines.append(f"sums = dot4(sums, {codes}, {x})")
        elif not is_token_major(layout, dot, rows):
            lines.append(f"pairs = add_pairs(pairs, {codes}, {x})" if i % n_words else f"pairs = multiply_pairs({codes}, {x})")
            if (i + 1) % n_words == 0 or i + 1 == len(order):
                lines.append("sums = widen_pairs(sums, pairs)")
    if is_token_major(layout, dot, rows):
        return [f"sums = add_words(sums, {', '.join(factors[i : i + n_words])})" for i in range(0, len(factors), n_words)]
    return lines


def make_group_sum(layout: GroupLayout, dot: Dot4, rows: int) -> CompiledFunction:
    """Return the compiled function of `make_group_sum_source`."""
    names = vars(tile_simd) | dot._asdict() | {"get_number": get_number, "add": add, "prefetch_lines": prefetch_lines}
    if dot.pairs:
        names |= dot.pairs._asdict() | {"add_words": dot.pairs.make_word_adder(count_words_in_16_bits(layout))}
    if layout.codebook:
        names["look_up"] = tile_simd.make_lookup(CODEBOOK_CODES[layout.codebook].tolist())
    exec(make_group_sum_source(layout, dot, rows), names)
    return make_dispatcher(names["sum_group"], is_inlined=True)


def make_param_reader(layout: GroupLayout, rows: int, lanes: int) -> CompiledFunction:
    """Return the compiled function get_params(block, first_row, g) -> scales and minima of group g for the rows of a tile.

    block points to the block's first word. Without minima, the second vector is unused.
    """
    get_halves, get_codes, get_bytes = (
        tile_simd.make_pointer_getter(storage, rows, lanes)
        for storage in (simd.FP16_STORAGE, simd.INT8_STORAGE, simd.UINT8_STORAGE)
    )
    factors_offset, to_minimum = layout.factors_offset, (layout.n_params - 1) * PANEL_FP16_WORDS
    to_minimum_factors = (layout.n_params - 1) * layout.n_groups * PANEL_BYTE_WORDS
    has_byte_scales, has_factors, has_nibble_factors = layout.has_byte_scales, layout.n_groups > 1, layout.has_nibble_factors
    scale_shift = layout.scale_shift

    @jitable
    def get_params(block, first_row, g):
        at = factors_offset + g * PANEL_BYTE_WORDS
        if has_byte_scales:
            scale_bytes = tile_simd.load_vector(get_bytes(block, at), first_row)
            scales = tile_simd.view_as_float(tile_simd.shift_left(scale_bytes, scale_shift))
            return scales, scales
        scales = tile_simd.load_vector(get_halves(block, 0), first_row)
        minima = tile_simd.load_vector(get_halves(block, to_minimum), first_row)
        if has_nibble_factors:
            factors = tile_simd.load_vector(get_bytes(block, at), first_row)
            scales = mul(scales, tile_simd.to_float(tile_simd.bit_and(factors, 15)))
            minima = mul(minima, tile_simd.to_float(tile_simd.shift_right(factors, 4)))
        elif has_factors:
            scales = mul(scales, tile_simd.load_vector(get_codes(block, at), first_row))
            minima = mul(minima, tile_simd.load_vector(get_codes(block, at + to_minimum_factors), first_row))
        return scales, minima

    return get_params


def make_group_tile(layout: GroupLayout, dot: Dot4, shape: TileShape) -> Callable[..., None]:
    """Return the tile of a shape over weights of a group layout, with byte products by `dot`."""
    rows, max_tokens, lanes = shape
    n_row_blocks = PANEL_ROWS // rows
    get_words, get_out = (
        tile_simd.make_pointer_getter(storage, rows, lanes) for storage in (simd.INT32_STORAGE, simd.FP32_STORAGE)
    )
    split_tokens = tile_simd.make_row_splitter(max_tokens)
    get_params, sum_group = make_param_reader(layout, rows, lanes), make_group_sum(layout, dot, rows)
    _, group_size, n_groups, has_minima, _ = layout
    n_units, unit_groups, unit_words = layout.n_units, layout.unit_groups, layout.unit_words * PANEL_ROWS
    x_words = GROUP_HEADER_WORDS + group_size // BYTES_PER_WORD
    block_words, codes_offset = layout.block_words, layout.codes_offset
    n_scale_blocks = int(layout.has_row_scales)
    header_lines = ceil_div(codes_offset if n_groups > 1 or layout.has_long_groups else block_words, LINE_WORDS)
    unit_lines = unit_words // LINE_WORDS if n_groups > 1 else 0

    def tile(n_tokens, p):
        """out[t, r] (+)= sum over groups g of scale[r, g] * sum over g of code * x[t] + minimum[r, g] * sum over g of x[t].

        Each group adds one or two terms to its row's chain. p.n is the number of blocks, with that of the row scales. The tuples
        `xs`, `sums` and `totals` have an element for each token.
        """
        row_scales_at = (p.n - 1) * block_words
        xs, x_floats = split_tokens(get_words(p.x.start, 0), p.x.stride), split_tokens(get_out(p.x.start, 0), p.x.stride)
        share = p.line_step // n_row_blocks  # bytes that the prefetch advances by for a line, in one row block
        word_share = PANEL_ROWS // LINE_WORDS * share
        for row in range(0, PANEL_ROWS, rows):
            outs = split_tokens(get_out(p.out.start, row), p.out.stride)
            ahead = tile_simd.advance(p.ahead, row // rows * share * (p.n * block_words // LINE_WORDS))
            totals = start_sums(outs, rows, n_tokens, p.accumulate)
            row_scales = tile_simd.load_vector(get_out(p.w, row_scales_at), row)
            for block in range(p.n - n_scale_blocks):
                at = block * block_words
                block_start = tile_simd.advance(p.w, at)
                for line in range(0, header_lines, n_row_blocks):
                    tile_simd.prefetch(ahead, at // LINE_WORDS * share + line * share, 1)
                for unit in range(n_units):
                    unit_at = at + codes_offset + unit * unit_words
                    for line in range(0, unit_lines, n_row_blocks):
                        tile_simd.prefetch(ahead, unit_at // LINE_WORDS * share + line * share, 1)
                    words = get_words(p.w, unit_at + row)
                    unit_ahead = tile_simd.advance(ahead, unit_at // LINE_WORDS * share)
                    for i_group in range(unit_groups):
                        g = unit * unit_groups + i_group
                        x_at = (block * n_groups + g) * x_words
                        sums = sum_group(words, i_group, xs, x_at, unit_ahead, word_share)
                        scales, minima = get_params(block_start, row, g)
                        if n_scale_blocks:
                            scales = mul(scales, row_scales)
                        totals = fma(tile_simd.to_float(sums), mul(scales, get_number(x_floats, x_at)), totals)
                        if has_minima:
                            totals = fma(minima, get_number(x_floats, x_at + 2), totals)
            tile_simd.store_vector(outs, 0, totals, n_tokens)

    return tile


def choose_group_tile_shape(layout: GroupLayout, dot: Dot4, rows: int, n_tokens: int) -> TileShape:
    """Return the tile shape of `dot`, but with registers of 8 lanes for up to MAX_HALF_REGISTER_TOKENS tokens with AVX-512.

    Codes of 1 or 2 bits keep whole registers: their arithmetic takes longer than their memory.
    """
    if dot.lanes == 2 * HALF_REGISTER_LANES and n_tokens <= MAX_HALF_REGISTER_TOKENS and layout.bits > 2:
        dot = dot._replace(lanes=HALF_REGISTER_LANES)
    return dot.choose_tile_shape(rows, n_tokens)


def make_tile(layout: GroupLayout, instruction_set: str) -> tuple[Tile, CompiledFunction]:
    """Return the tile over weights of a group layout for a `choose_dot4` instruction set, and its function get_activations."""
    dot = DOT4_BY_NAME[instruction_set]
    choose_shape = functools.partial(choose_group_tile_shape, layout, dot)
    tile = Tile(functools.partial(make_group_tile, layout, dot), choose_shape, dot.max_tokens)
    return tile, make_activation_getter(get_zero_point(layout, dot), layout.n_groups)


def make_weight_getter(layout: GroupLayout) -> CompiledFunction:
    """Return an inlined function that reads one weight of a group layout from panels, as float32."""
    _, group_size, _, has_minima, codebook = layout
    columns, zero_point, codes_offset = layout.block_columns, layout.zero_point, layout.codes_offset
    unit_columns, unit_words = layout.unit_groups * group_size, layout.unit_words
    bit_fields = get_bit_fields(layout)
    n_fields = max(map(len, bit_fields))
    fields = np.array([[*own, *[BitField(0, 0, 0, 0)] * (n_fields - len(own))] for own in bit_fields])
    get_words, get_params = tile_simd.make_pointer_getter(simd.INT32_STORAGE), make_param_reader(layout, LANES, LANES)
    has_codebook, codes = bool(codebook), CODEBOOK_CODES.get(codebook, np.zeros(1, np.int64))
    has_row_scales = layout.has_row_scales

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
        scales, minima = get_params(get_words(w, block), row // LANES * LANES, g)
        scale = extract_lane(scales, row % LANES)
        if has_row_scales:
            scale *= w[panel, w.shape[1] - 1, row]
        weight = np.float32(code - zero_point) * scale
        if has_minima:
            weight += extract_lane(minima, row % LANES)
        return weight

    return get_weight


class GroupedRows(NamedTuple):
    """Rows of weights of a `GroupLayout` before they are packed into panels: the parts of each block, row by row.

    Attributes:
        params: (rows, blocks, n_halves), scales and minima as the bits of fp16.
        factors: (rows, blocks, n_factor_bytes), exponents or factors as bytes.
        words: (rows, blocks, n_units * unit_words), the codes.
    """

    params: npt.NDArray[np.uint16]
    factors: npt.NDArray[np.uint8]
    words: npt.NDArray[np.uint32]


def unpack_codes(layout: GroupLayout, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return the codes of `GroupedRows.words` as words of four 8-bit codes, (rows, blocks, groups, words)."""
    if layout.codebook:
        codes = CODEBOOK_CODES[layout.codebook][unpack_codes(layout._replace(codebook=""), words)[..., None].view(np.uint8)]
        return codes.astype(np.uint8).view(np.uint32)[..., 0]
    unit_fields = get_bit_fields(layout)
    words = words.reshape(*words.shape[:2], layout.n_units, layout.unit_words)
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
    return words.reshape(*words.shape[:2], -1)


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
        params, factors, words: A `GroupedRows`.
        first: First panel to fill.
        stride: Panels from one to the next.
    """

    panels: Words3
    panel_halves: Halves3
    panel_bytes: Bytes3
    params: Halves3
    factors: Bytes3
    words: Words3
    first: int
    stride: int


@kernel
def pack_panels(run: ForwardContext, thread: int, p: PackArgs) -> None:
    """Pack rows of grouped weights into every stride-th panel from `first` on."""
    rows, n_blocks, n_words = p.words.shape
    n_params, n_factors = p.params.shape[2], p.factors.shape[2]
    factors_offset = 2 * n_params * PANEL_ROWS
    codes_offset = (factors_offset + n_factors * PANEL_ROWS) // BYTES_PER_WORD
    begin, end = get_chunk_range(ceil_div(rows, PANEL_ROWS), run.chunk, run.n_chunks)
    for i_panel in range(begin, end):
        panel = p.first + p.stride * i_panel
        for block in range(n_blocks):
            for r in range(min(PANEL_ROWS, rows - i_panel * PANEL_ROWS)):
                row = i_panel * PANEL_ROWS + r
                for i in range(n_params):
                    p.panel_halves[panel, block, i * PANEL_ROWS + r] = p.params[row, block, i]
                for i in range(n_factors):
                    p.panel_bytes[panel, block, factors_offset + i * PANEL_ROWS + r] = p.factors[row, block, i]
                for i in range(n_words):
                    p.panels[panel, block, codes_offset + i * PANEL_ROWS + r] = p.words[row, block, i]


def pack_grouped_rows(panels: Float32, first: int, stride: int, rows: GroupedRows) -> None:
    """Pack a `GroupedRows` into every stride-th panel from `first` on, on all threads."""
    views = (panels.view(dtype) for dtype in (np.uint32, np.uint16, np.uint8))
    op_program.run_on_all_threads(pack_panels(*views, *rows, first, stride))


def pack_row_scales(panels: Float32, first: int, stride: int, scales: Array) -> None:
    """Write the scale of each row to the last block of every stride-th panel from `first` on."""
    n_panels = ceil_div(len(scales), PANEL_ROWS)
    padded = np.zeros(n_panels * PANEL_ROWS, np.float32)
    padded[: len(scales)] = scales * ROW_SCALE_FACTOR
    panels[first::stride][:n_panels, -1, :PANEL_ROWS] = padded.reshape(n_panels, PANEL_ROWS)


def ungroup(layout: GroupLayout, rows: GroupedRows, row_scales: Float32 | None = None) -> Float32:
    """Return grouped rows as float32 (rows, columns), code * scale + minimum; each product and sum is rounded.

    row_scales: The factors of a layout with row scales, (rows,); None: 1.
    """
    if layout.has_byte_scales:
        params = layout.byte_scales[rows.factors][:, :, None]
        if layout.has_row_scales:
            own = np.ones(len(params), np.float32) if row_scales is None else row_scales
            params = params * (own * ROW_SCALE_FACTOR)[:, None, None, None]
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


@dataclass(frozen=True, kw_only=True)
class GroupedFormat(QuantizedFormat):
    """Panels (P, blocks, words) of a group layout; subclasses say from what they are packed.

    Attributes:
        layout: Layout of the groups.
    """

    layout: GroupLayout

    def get_group_size(self, n: int, file_group: int) -> int:
        """Return the group size of the layout."""
        return self.layout.group_size

    def get_scratch_words(self, n: int, group_size: int) -> int:
        """Return the words of a token's n activations in groups of int8, whole blocks of them."""
        return super().get_scratch_words(simd.round_up(n, self.layout.block_columns), group_size)

    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the blocks and words of a panel."""
        return ceil_div(n, self.layout.block_columns) + self.layout.has_row_scales, self.layout.block_words
