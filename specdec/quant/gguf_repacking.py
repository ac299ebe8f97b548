"""GGUF's block types as grouped weights: their own scales and minima bit for bit, their codes in as many bits.

Layouts: ggml-common.h and ggml-quants.c of github.com/ggml-org/ggml. d and m are fp16, q is a code; a weight is

    Q4_0  d (q - 8)     Q5_0  d (q - 16)     Q8_0  d q, q signed     Q6_K  d sc (q - 32), in groups of 16
    Q4_1  d q + m       Q5_1  d q + m        Q4_K, Q5_K  d sc q - dmin m, sc and m of 6 bits
    Q2_K  d sc q - dmin m, in groups of 16     Q3_K  d (sc - 32) (q - 4), in groups of 16
    Q1_0  d (2 q - 1), in groups of 128     Q2_0  d (q - 1), in groups of 64     TQ1_0, TQ2_0  d (q - 1), in groups of 256
    IQ4_NL  d t[q]     IQ4_XS  d (sc - 32) t[q], t is ggml's table
    MXFP4  2^(e - 128) t[q], t[q] is twice an E2M1 number     NVFP4  f s / 2 t[q], s in UE4M3, in groups of 16, f of the row

TQ1_0 has five ternary digits in a byte. In memory it is like TQ2_0, in 1.22 times the bytes, because splitting digits takes
longer than reading these: see docs/experiments/integer-weights.md.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from specdec.quant import groupwise
from specdec.quant.groupwise import EACH_BYTE, GroupedFormat, GroupedRows, GroupLayout
from specdec.quant.int8 import BYTES_PER_WORD, DOT4_NAME
from specdec.quant.matmul import make_kernels
from specdec.quant.packed_matrix import GGUFBlockRows, WeightFormat
from specdec.runtime.code_cache import CompiledFunction, inlined
from specdec.runtime.op_program import Bytes2, Bytes3, ForwardContext, Halves3, Kernel, Words3, run_on_all_threads
from specdec.runtime.simd import Float32, load_byte
from specdec.runtime.work_stealing import get_chunk_range

MXFP4, MIN_FP16_EXPONENT, MAX_FP16_EXPONENT = "MXFP4", 128 - 24, 128 + 15  # exponents of powers of two that fp16 holds
EVEN_BYTES = 0x00FF00FF  # of a word
# Scales of NVFP4 below 2^-6, s / 2 = n / 1024, as `GroupLayout` describes them; a scale from 2^-6 on is its byte plus 24
SUBNORMAL_SCALES = np.array([0, 8, 16, 20, 24, 26, 28, 30])
NVFP4, MAX_NVFP4_SCALE = "NVFP4", 0x7E  # of a group, as a byte
MAX_NVFP4_TENSOR_SCALE = 2048
TWO_BIT_MASK, NIBBLE_MASK, SIGN_MASK = 3 * EACH_BYTE, 15 * EACH_BYTE, 128 * EACH_BYTE


@inlined
def read_half(source, at):
    """Return the 2 bytes from byte `at` of source on, as an integer."""
    return load_byte(source, at) | load_byte(source, at + 1) << 8


@inlined
def read_word(source, at):
    """Return the 4 bytes from byte `at` of source on, as an integer."""
    return read_half(source, at) | read_half(source, at + 2) << 16


@inlined
def gather_bits(bits):
    """Return a word with one bit each of 32 consecutive codes in a group's order: bit 8 b + k is for byte b of code word k."""
    word = np.int64(0)
    for k in range(8):
        word |= (((bits >> 4 * k & 15) * 0x00204081) & EACH_BYTE) << k  # the product has bits 0 to 3 at 0, 8, 16 and 24
    return word


@inlined
def unpack_6_bit_scales(factors, source, at):
    """Write the 6-bit scales and minima of a K block's 8 groups to factors, from 12 bytes of source on."""
    for g in range(4):
        scale, minimum, both = load_byte(source, at + g), load_byte(source, at + 4 + g), load_byte(source, at + 8 + g)
        factors[g], factors[8 + g] = scale & 63, minimum & 63
        factors[4 + g], factors[12 + g] = (both & 15) | (scale >> 6) << 4, both >> 4 | (minimum >> 6) << 4


@inlined
def repack_nibbles(words, at, row_words, source, source_at):
    """Write the words of two groups of 32 4-bit codes, from 32 bytes of source on.

    The lower half of a byte is a code of the first group, its upper half one of the second. The first group's words start at
    words[at], the second's row_words later.
    """
    for k in range(4):
        a, b = read_word(source, source_at + 4 * k), read_word(source, source_at + 16 + 4 * k)
        words[at + k] = (a & NIBBLE_MASK) | (b & NIBBLE_MASK) << 4
        words[at + row_words + k] = (a >> 4 & NIBBLE_MASK) | (b & NIBBLE_MASK << 4)


@inlined
def gather_two_bits(source, at, shift):
    """Return a word with 2 bits of each of 16 bytes from byte `at` of source on, in a group's order."""
    word = np.int64(0)
    for k in range(4):
        word |= (read_word(source, at + 4 * k) >> shift & TWO_BIT_MASK) << 2 * k
    return word


def make_codes_repacker(at: int, bits: int = 4) -> CompiledFunction:
    """Return a repack function for blocks of 32 codes of `bits` bits from byte `at` on.

    With 5 bits, the codes' fifth bits precede them.
    """

    @inlined
    def repack(factors, words, source):
        for k in range(8 if bits == 8 else 4):
            words[k] = read_word(source, at + 4 * k) ^ (SIGN_MASK if bits == 8 else 0)
        if bits == 5:
            words[4] = gather_bits(read_word(source, at - 4))

    return repack


def make_k_quant_repacker(at: int, row_words: int) -> CompiledFunction:
    """Return a repack function for Q4_K and Q5_K blocks: 12 bytes of scales and minima, and codes from byte `at` on.

    Each pair of the 8 groups has 32 bytes with a code of both. Codes of 5 bits have 32 bytes in front of these, each with one
    fifth bit of every group.
    """

    @inlined
    def repack(factors, words, source):
        unpack_6_bit_scales(factors, source, 4)
        for pair in range(4):
            repack_nibbles(words, 2 * row_words * pair, row_words, source, at + 32 * pair)
        if row_words > 4:
            for g in range(8):
                fifth = np.int64(0)
                for k in range(8):
                    fifth |= (read_word(source, at - 32 + 4 * k) >> g & EACH_BYTE) << k
                words[row_words * g + 4] = fifth

    return repack


@inlined
def repack_q6_k(factors, words, source):
    """Repack a Q6_K block: 128 bytes of lower bits, 64 of upper bits, 16 signed scales, and d.

    For each 128 codes there are 2 x 32 bytes with the lower bits of two codes, and 32 bytes with the upper bits of four.
    """
    for g in range(16):
        factors[g] = load_byte(source, 192 + g)
    for g in range(16):
        half, quarter, first_word = g // 8, g % 8 // 2, g % 2 * 4  # first_word: among the quarter's 8 words
        lower, upper = 64 * half + 32 * (quarter % 2) + 4 * first_word, 128 + 32 * half + 4 * first_word
        for k in range(2):
            a = read_word(source, lower + 4 * k) >> 4 * (quarter // 2) & NIBBLE_MASK
            b = read_word(source, lower + 8 + 4 * k) >> 4 * (quarter // 2) & NIBBLE_MASK
            words[3 * g + k] = a | b << 4
        words[3 * g + 2] = gather_two_bits(source, upper, 2 * quarter)


def make_two_bit_repacker(n_factors: int) -> CompiledFunction:
    """Return the function that repacks a block of n_factors bytes of factors and 64 bytes of 4 codes each (32 for 128 codes)."""

    @inlined
    def repack(factors, words, source):
        for i in range(n_factors):
            factors[i] = load_byte(source, i)
        for i in range(16):
            words[i] = gather_two_bits(source, n_factors + 32 * (i // 8) + 16 * (i % 2), 2 * (i % 8 // 2))

    return repack


@inlined
def repack_q1_0(factors, words, source):
    """Repack a Q1_0 block: d, and 16 bytes of eight codes, the first in the lowest bit."""
    for i in range(4):
        words[i] = gather_bits(read_word(source, 2 + 4 * i))


@inlined
def repack_q2_0(factors, words, source):
    """Repack a Q2_0 block: d, and 16 bytes of four codes, the first in the lowest bits."""
    for i in range(4):
        word = np.int64(0)
        for k in range(4):
            byte = load_byte(source, 2 + 4 * i + k)
            word |= ((byte | byte << 6 | byte << 12 | byte << 18) & TWO_BIT_MASK) << 2 * k
        words[i] = word


@inlined
def read_3_bit_codes(source, lower, shift, upper, bit):
    """Return 4 codes as bytes: 2 bits each from `shift` on of the 4 bytes from `lower` on, and a third bit at `upper`."""
    return (read_word(source, lower) >> shift & TWO_BIT_MASK) | (read_word(source, upper) >> bit & EACH_BYTE) << 2


@inlined
def repack_q3_k(factors, words, source):
    """Repack a Q3_K block: 32 bytes of third bits, 64 bytes of four 2-bit codes, 12 bytes of 6-bit scales, and d."""
    for g in range(16):
        low = load_byte(source, 96 + g % 8) >> 4 * (g // 8) & 15
        high = load_byte(source, 104 + g % 4) >> 2 * (g // 4) & 3
        factors[g] = ((low | high << 4) - 32) & 255
        lower, shift, upper = 32 + 32 * (g // 8) + 16 * (g % 2), 2 * (g % 8 // 2), 16 * (g % 2)
        own = read_3_bit_codes(source, lower, shift, upper, g // 2)
        own |= read_3_bit_codes(source, lower + 4, shift, upper + 4, g // 2) << 3
        last = read_3_bit_codes(source, lower + 12, shift, upper + 12, g // 2)
        words[g // 2 * 3 + g % 2] = own | (last & TWO_BIT_MASK) << 6
        shared = read_3_bit_codes(source, lower + 8, shift, upper + 8, g // 2) | (last & 4 * EACH_BYTE) << 1
        words[g // 2 * 3 + 2] = words[g // 2 * 3 + 2] | shared << 4 if g % 2 else shared


@inlined
def repack_iq4_xs(factors, words, source):
    """Repack an IQ4_XS block: d, the upper 2 bits of 8 scales, their lower 4 bits, and for each group 16 bytes of two codes."""
    for g in range(8):
        low = load_byte(source, 4 + g // 2) >> 4 * (g % 2) & 15
        factors[g] = ((low | (read_half(source, 2) >> 2 * g & 3) << 4) - 32) & 255
        for k in range(4):
            words[4 * g + k] = read_word(source, 8 + 16 * g + 4 * k)


@inlined
def repack_tq1_0(factors, words, source):
    """Repack a TQ1_0 block to the words of TQ2_0: 48 bytes of five ternary digits, 4 bytes of four, and d.

    A byte is a fraction of 256: times 3, its integer part is the first digit. There are 8 words with the digits of 160 codes, the
    first digits first, 4 words with those of 80, and one with those of 16.
    """
    for i in range(16):
        words[i] = 0
    for i in range(13):
        k, step, n_digits = i, 8, 5  # k: code word of the first digits
        if i >= 8:
            k, step = 32 + i, 4
        if i == 12:
            k, step, n_digits = 60, 1, 4
        even, odd = read_word(source, 4 * i) & EVEN_BYTES, read_word(source, 4 * i) >> 8 & EVEN_BYTES
        for _ in range(n_digits):
            even, odd = 3 * even, 3 * odd
            words[k // 4] |= (even >> 8 & EVEN_BYTES | odd & EVEN_BYTES << 8) << 2 * (k % 4)
            even, odd, k = even & EVEN_BYTES, odd & EVEN_BYTES, k + step


@inlined
def repack_nvfp4(factors, words, source):
    """Repack an NVFP4 block: 4 scales, and for each group 8 bytes of two codes."""
    for g in range(4):
        scale = load_byte(source, g)
        factors[g] = scale + 24 if scale >= 8 else SUBNORMAL_SCALES[scale]
    for i in range(8):
        words[i] = read_word(source, 4 + 4 * i)


@inlined
def repack_mxfp4(factors, words, source):
    """Repack an MXFP4 block: a byte e for the scale 2^(e - 128), and 16 bytes of two codes.

    The scale is 0 for exponents out of fp16's range, which only blocks of zeros have.
    """
    exponent = load_byte(source, 0)
    factors[0] = exponent - 1 if MIN_FP16_EXPONENT <= exponent <= MAX_FP16_EXPONENT else 0
    for i in range(4):
        words[i] = read_word(source, 1 + 4 * i)


class BlockType(NamedTuple):
    """A GGUF block type and how it is read.

    Attributes:
        n_bytes: Bytes of a block in the file.
        layout: Layout of its weights in panels.
        read: Kernel (params, factors, words, source) that reads rows of blocks, source (rows, bytes), into a `GroupedRows`.
        scale_offsets: Bytes of a block at which its fp16 scales begin.
    """

    n_bytes: int
    layout: GroupLayout
    read: Kernel
    scale_offsets: tuple[int, ...]


def make_block_type(name: str, n_bytes: int, layout: GroupLayout, repack: CompiledFunction, scales_offset: int = 0) -> BlockType:
    """Return the `BlockType` of the GGUF type `name`, and register the kernel that reads its blocks.

    Args:
        name: Name of the type in GGUF.
        n_bytes: Bytes of a block in the file.
        layout: Layout of its weights in panels.
        repack: Function that writes the factors and words of one block from its bytes.
        scales_offset: Byte of a block where its fp16 numbers start.
    """
    n_params = layout.n_halves

    def read(run: ForwardContext, thread: int, params: Halves3, factors: Bytes3, words: Words3, source: Bytes2) -> None:
        first, last = get_chunk_range(source.shape[0], run.chunk, run.n_chunks)
        for row in range(first, last):
            for block in range(words.shape[1]):
                block_source = source[row, n_bytes * block :]
                for i in range(n_params):
                    minus = 0x8000 if i > 0 and factors.shape[2] > 0 else 0  # K types have - dmin
                    params[row, block, i] = read_half(block_source, scales_offset + 2 * i) ^ minus
                repack(factors[row, block], words[row, block], block_source)

    scale_offsets = tuple(scales_offset + 2 * i for i in range(n_params))
    return BlockType(n_bytes, layout, Kernel(read).register(f"read_{name.lower()}"), scale_offsets)


repack_q4_0 = make_codes_repacker(2)
Q4_LAYOUT, Q4_MIN_LAYOUT = GroupLayout(4, 32, 1, False), GroupLayout(4, 32, 1, True)
Q8_MIN_LAYOUT = GroupLayout(8, 32, 1, True)  # can hold every type except the K types
Q6_K_MIN_LAYOUT = GroupLayout(6, 16, 16, True)  # can hold every K type
BLOCK_TYPES = {
    name: make_block_type(name, *arguments)
    for name, *arguments in (
        ("Q4_0", 18, Q4_LAYOUT, repack_q4_0),
        ("Q4_1", 20, Q4_MIN_LAYOUT, make_codes_repacker(4)),
        ("Q5_0", 22, GroupLayout(5, 32, 1, False), make_codes_repacker(6, 5)),
        ("Q5_1", 24, GroupLayout(5, 32, 1, True), make_codes_repacker(8, 5)),
        ("Q8_0", 34, GroupLayout(8, 32, 1, False), make_codes_repacker(2, 8)),
        ("Q4_K", 144, GroupLayout(4, 32, 8, True), make_k_quant_repacker(16, 4)),
        ("Q5_K", 176, GroupLayout(5, 32, 8, True), make_k_quant_repacker(48, 5)),
        ("Q6_K", 210, GroupLayout(6, 16, 16, False), repack_q6_k, 208),
        ("Q2_K", 84, GroupLayout(2, 16, 16, True), make_two_bit_repacker(16), 80),
        ("Q3_K", 110, GroupLayout(3, 16, 16, False), repack_q3_k, 108),
        ("IQ4_NL", 18, GroupLayout(4, 32, 1, False, "nl"), repack_q4_0),
        ("IQ4_XS", 136, GroupLayout(4, 32, 8, False, "nl"), repack_iq4_xs),
        ("Q1_0", 18, GroupLayout(1, 128, 1, False), repack_q1_0),
        ("Q2_0", 18, GroupLayout(2, 64, 1, False), repack_q2_0),
        ("TQ1_0", 54, GroupLayout(2, 256, 1, False), repack_tq1_0, 52),
        ("TQ2_0", 66, GroupLayout(2, 256, 1, False), make_two_bit_repacker(0), 64),
        (NVFP4, 36, GroupLayout(4, 16, 4, False, "e2m1"), repack_nvfp4),
        (MXFP4, 17, GroupLayout(4, 32, 1, False, "e2m1"), repack_mxfp4),
    )
}


def repack_blocks(blocks: GGUFBlockRows) -> GroupedRows:
    """Return rows of GGUF blocks as `GroupedRows` in the block type's layout."""
    size, layout, read, _ = BLOCK_TYPES[blocks.type]
    source = np.ascontiguousarray(blocks.raw_bytes)
    n_rows, n_blocks = len(source), source.shape[1] // size
    params = np.empty((n_rows, n_blocks, layout.n_halves), np.uint16)
    factors = np.empty((n_rows, n_blocks, layout.n_factor_bytes), np.uint8)
    words = np.empty((n_rows, n_blocks, layout.n_units * layout.unit_words), np.uint32)
    run_on_all_threads(read(params, factors, words, source))
    return GroupedRows(params, factors, words)


def dequantize(blocks: GGUFBlockRows) -> Float32:
    """Return rows of GGUF blocks as float32, equal bit by bit to those of the python package gguf."""
    return groupwise.ungroup(BLOCK_TYPES[blocks.type].layout, repack_blocks(blocks), blocks.scales)


def widen_rows(rows: GroupedRows, layout: GroupLayout, wide: GroupLayout) -> GroupedRows:
    """Return grouped rows converted to a wider layout, with as many bits or more and groups as large or half as large.

    The wide layout has minima, or neither layout has.
    """
    params, code_words = rows.params, groupwise.unpack_codes(layout, rows.words)
    factors = groupwise.split_factors(layout, rows.factors)
    if not wide.has_minima:
        code_words = code_words + np.uint32(EACH_BYTE * (wide.zero_point - layout.zero_point))
    elif not layout.has_minima:  # d (q - zero_point) = d q + (-zero_point d)
        minima = (np.float32(-layout.zero_point) * params.view(np.float16)).astype(np.float16).view(np.uint16)
        params, factors = np.concatenate([params, minima], 2), np.concatenate([factors, factors], 2)
    factors = np.repeat(factors, layout.group_size // wide.group_size, 3)
    code_words = code_words.reshape(*code_words.shape[:2], wide.n_groups, wide.group_size // BYTES_PER_WORD)
    return GroupedRows(params, factors.reshape(*factors.shape[:2], -1).view(np.uint8), groupwise.pack_codes(wide, code_words))


class GGUFFormat(GroupedFormat):
    """Panels of GGUF blocks, widened to its layout if the block type has another."""

    def read_rows(self, tensor: Any, first: int, last: int) -> GGUFBlockRows:
        """Return rows first to last (exclusive) of a tensor of a GGUF block type as its blocks."""
        blocks: GGUFBlockRows = tensor.read_blocks(first, last)
        return blocks

    def pack(self, panels: Float32, first: int, stride: int, rows: GGUFBlockRows, group_size: int) -> None:
        """Pack rows of GGUF blocks; see `WeightFormat.pack`."""
        source_layout, grouped = BLOCK_TYPES[rows.type].layout, repack_blocks(rows)
        if source_layout != self.layout:
            grouped = widen_rows(grouped, source_layout, self.layout)
        groupwise.pack_grouped_rows(panels, first, stride, grouped)
        if source_layout.has_row_scales:
            row_scales = np.ones(len(rows.raw_bytes)) if rows.scales is None else rows.scales
            groupwise.pack_row_scales(panels, first, stride, row_scales)


def make_format_fields(name: str, layout: GroupLayout) -> dict[str, Any]:
    """Return the fields of a `GroupedFormat` of this name and layout; its kernels are registered in this module."""
    tile, get_activations = groupwise.make_tile(layout, DOT4_NAME)
    get_weight = groupwise.make_weight_getter(layout)
    # SPECDEC_PORTABLE chooses other kernels, which need cached code of their own
    kernels = make_kernels(__name__, f"{DOT4_NAME}_{name.replace(' ', '_')}_", tile, get_activations, get_weight)
    return {"name": name, "layout": layout, **kernels}


WEIGHT_FORMATS = {name: GGUFFormat(**make_format_fields(name, block.layout)) for name, block in BLOCK_TYPES.items()}
MIXED = GGUFFormat(**make_format_fields("mixed", Q8_MIN_LAYOUT))
MIXED_K = GGUFFormat(**make_format_fields("mixed K", Q6_K_MIN_LAYOUT))


def find_common_format(types: Collection[str]) -> WeightFormat | None:
    """Return the format that holds matrices of all these GGUF block types without loss, or None if only fp32 does.

    types: Names of block types; "" is for floats.
    """
    if len(types) == 1:
        return WEIGHT_FORMATS[next(iter(types))]
    if all(name.endswith("_K") for name in types):
        return MIXED_K
    if not all(re.fullmatch(r"Q[458]_[01]", name) for name in types):
        return None
    layouts = [BLOCK_TYPES[name].layout for name in types]
    wide = GroupLayout(max(layout.bits for layout in layouts), 32, 1, any(layout.has_minima for layout in layouts))
    return next((weight_format for name, weight_format in WEIGHT_FORMATS.items() if BLOCK_TYPES[name].layout == wide), MIXED)
