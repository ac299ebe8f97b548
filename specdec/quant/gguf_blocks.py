"""GGUF's block types as weights in groups: their own scales and minima, bit for bit, their codes in as many bits.

Layouts: ggml-common.h and ggml-quants.c of github.com/ggml-org/ggml. d and m are fp16, q a code; a weight is

    Q4_0  d (q - 8)     Q5_0  d (q - 16)     Q8_0  d q, q signed     Q6_K  d sc (q - 32), in groups of 16
    Q4_1  d q + m       Q5_1  d q + m        Q4_K, Q5_K  d sc q - dmin m, sc and m of 6 bits
    Q2_K  d sc q - dmin m, in groups of 16     Q3_K  d (sc - 32) (q - 4), in groups of 16
    IQ4_NL  d t[q]     IQ4_XS  d (sc - 32) t[q], t ggml's table
    MXFP4  2^(e - 128) t[q], t[q] the double of an E2M1; here 2^(e - 128) is a fp16, too
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.quant.grouped import EACH, NIBBLES, Form, Rows, group_kind, packed, place, unpacked
from specdec.quant.int8 import QUADS
from specdec.quant.matrix import Blocks, Kind
from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Bytes2, Halves2, Operation, Pass, Words2, on_all_threads
from specdec.runtime.simd import Float32
from specdec.runtime.work_stealing import share

Octets = npt.NDArray[np.uint8]
TWO_BITS, SIGNS = 3 * EACH, 128 * EACH


@inlined
def word_at(source, half):
    """The 4 bytes from that half word of a row on."""
    return np.int64(source[half]) | np.int64(source[half + 1]) << 16


@inlined
def byte_at(source, at):
    """The byte of a row at an index."""
    return (np.int64(source[at // 2]) >> (8 * (at % 2))) & 255


@inlined
def fifth_bits(bits):
    """The bits of 32 codes one behind the other, as a group has them: that of byte b of quad k is bit 8 b + k."""
    word = np.int64(0)
    for k in range(8):
        word |= (((bits >> 4 * k & 15) * 0x00204081) & EACH) << k  # the product has bits 0 to 3 at 0, 8, 16 and 24
    return word


@inlined
def put_6_bits(factors, source, at):
    """Scales and minima of the 8 groups of a K block, 12 bytes from that half word on."""
    for g in range(4):
        scale, minimum, both = byte_at(source, 2 * at + g), byte_at(source, 2 * at + 4 + g), byte_at(source, 2 * at + 8 + g)
        factors[g], factors[8 + g] = scale & 63, minimum & 63
        factors[4 + g], factors[12 + g] = (both & 15) | (scale >> 6) << 4, both >> 4 | (minimum >> 6) << 4


@inlined
def put_lower_bits(words, at, row_words, source, half):
    """Those of two groups, the second row_words behind the first: 32 bytes from that half word on have a code of each."""
    for k in range(4):
        a, b = word_at(source, half + 2 * k), word_at(source, half + 8 + 2 * k)
        words[at + k] = (a & NIBBLES) | (b & NIBBLES) << 4
        words[at + row_words + k] = (a >> 4 & NIBBLES) | (b & NIBBLES << 4)


@inlined
def put_quads_of_16(words, at, source, lower, shift, high, bit):
    """Codes of a group of 16: 2 bits of 16 bytes from that half word on, less 4 and plus 8 where `high` has no bit, else plus 8;
    high: the half word of 16 bytes with a bit of each, or -1: codes are as they are."""
    for k in range(2):
        word = np.int64(0)
        for half in range(2):
            place = 2 * k + 4 * half
            quad = word_at(source, lower + place) >> shift & 3 * EACH
            if high >= 0:
                quad += (word_at(source, high + place) >> bit & EACH) * 4 + 4 * EACH
            word |= quad << 4 * half
        words[at + k] = word


def reader(name: str, n_halves: int, n_levels: int, put: Any, numbers_at: int = 0) -> Operation:
    """The operation of that name that reads rows (rows, halves) of a type's blocks of n_halves, by what puts one in its place.

    put: gives a block's factors and words, all of a row from its own on; numbers_at: where its fp16 numbers lie.
    """

    def read(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
        first, last = share(source.shape[0], run.part, run.n_parts)
        n_blocks = numbers.shape[1] // n_levels
        of_factors, of_words = factors.shape[1] // n_blocks, words.shape[1] // n_blocks
        for row in range(first, last):
            for block in range(n_blocks):
                given = source[row, n_halves * block :]
                for level in range(n_levels):
                    minus = 0x8000 if level > 0 and of_factors > 0 else 0  # K types have - dmin
                    numbers[row, n_levels * block + level] = given[numbers_at + level] ^ minus
                put(factors[row, of_factors * block :], words[row, of_words * block :], given)

    return Operation(read).named(name)


def codes(at: int, bits: int = 4) -> Any:
    """What puts a block's 32 codes of so many bits, which lie from a half word on, of 5 the fifth ones in front of these."""

    @inlined
    def put(factors, words, source):
        for k in range(8 if bits == 8 else 4):
            words[k] = word_at(source, at + 2 * k) ^ (SIGNS if bits == 8 else 0)
        if bits == 5:
            words[4] = fifth_bits(word_at(source, at - 2))

    return put


def codes_of_k(at: int, row_words: int) -> Any:
    """What puts 12 bytes of scales and minima and, from a half word on, for each 2 of 8 groups 32 bytes of a code of the one and
    the other; of 5 bits there are 32 bytes in front of these, of each one fifth bit of each group."""

    @inlined
    def put(factors, words, source):
        put_6_bits(factors, source, 2)
        for pair in range(4):
            put_lower_bits(words, 2 * row_words * pair, row_words, source, at + 16 * pair)
        if row_words > 4:
            for g in range(8):
                fifth = np.int64(0)
                for k in range(8):
                    fifth |= (word_at(source, at - 16 + 2 * k) >> g & EACH) << k
                words[row_words * g + 4] = fifth

    return put


@inlined
def put_q6_k(factors, words, source):
    """128 bytes of lower, 64 of upper bits, 16 signed scales, d. Of each 128 codes 2 x 32 lower bytes hold two codes, 32 upper
    ones four."""
    for g in range(16):
        factors[g] = byte_at(source, 2 * 96 + g)
    for g in range(16):
        half, quarter, place = g // 8, g % 8 // 2, g % 2 * 4  # place: of the group's first quad among the quarter's 8
        lower, upper = 32 * half + 16 * (quarter % 2) + 2 * place, 64 + 16 * half + 2 * place
        for k in range(2):
            a = word_at(source, lower + 2 * k) >> 4 * (quarter // 2) & NIBBLES
            b = word_at(source, lower + 4 + 2 * k) >> 4 * (quarter // 2) & NIBBLES
            words[3 * g + k] = a | b << 4
        two_bits = np.int64(0)
        for k in range(4):
            two_bits |= (word_at(source, upper + 2 * k) >> 2 * quarter & TWO_BITS) << 2 * k
        words[3 * g + 2] = two_bits


@inlined
def put_q2_k(factors, words, source):
    """16 scales and minima of 4 bits, 64 bytes of four codes, d, dmin: of each 128 codes 32 bytes."""
    for g in range(16):
        both = byte_at(source, g)
        factors[g], factors[16 + g] = both & 15, both >> 4
        put_quads_of_16(words, 2 * g, source, 8 + 16 * (g // 8) + 8 * (g % 2), 2 * (g % 8 // 2), -1, 0)


@inlined
def put_q3_k(factors, words, source):
    """32 bytes of third bits, 64 of four codes of 2 bits, 12 of scales of 6 bits, d."""
    for g in range(16):
        low = byte_at(source, 2 * 48 + g % 8) >> 4 * (g // 8) & 15
        high = byte_at(source, 2 * 52 + g % 4) >> 2 * (g // 4) & 3
        factors[g] = ((low | high << 4) - 32) & 255
        put_quads_of_16(words, 2 * g, source, 16 + 16 * (g // 8) + 8 * (g % 2), 2 * (g % 8 // 2), 8 * (g % 2), g // 2)


@inlined
def put_iq4_xs(factors, words, source):
    """d, upper 2 bits of 8 scales, lower 4 of them, for each group 16 bytes of two codes."""
    for g in range(8):
        low = byte_at(source, 2 * 2 + g // 2) >> 4 * (g % 2) & 15
        factors[g] = ((low | (source[1] >> 2 * g & 3) << 4) - 32) & 255
        for k in range(4):
            words[4 * g + k] = word_at(source, 4 + 8 * g + 2 * k)


class BlockType(NamedTuple):
    """A type: bytes of a block, how its groups lie here, and what reads it, of blocks of another type where `made` makes such."""

    n_bytes: int
    form: Form
    read: Operation
    made: Callable[[Octets], Octets] | None = None


def with_fp16(octets: Octets) -> Octets:
    """Blocks of MXFP4 (rows, bytes) with scales of fp16 in the place of exponents, as Q4_0 has them."""
    blocks = octets.reshape(len(octets), -1, 17)
    scales = powers(blocks[..., :1]).astype(np.float16)
    return np.concatenate([scales.view(np.uint8), blocks[..., 1:]], 2).reshape(len(octets), -1)


def powers(exponents: Octets) -> Float32:
    """2^(e - 128); 0 for 0 and 1, which blocks of zeros alone have here."""
    bits = (np.maximum(exponents, np.uint8(1)) - np.uint8(1)).astype(np.uint32) << np.uint32(23)
    return bits.view(np.float32)


read_q4_0 = reader("read_q4_0", 9, 1, codes(1))
FOUR, FOUR_AND_MINIMUM = Form(4, 32, 1, False), Form(4, 32, 1, True)
EIGHT_AND_MINIMUM = Form(8, 32, 1, True)  # what holds every type but the K ones
SIX_AND_MINIMA = Form(6, 16, 16, True)  # what holds every K type
TYPES = {
    "Q4_0": BlockType(18, FOUR, read_q4_0),
    "Q4_1": BlockType(20, FOUR_AND_MINIMUM, reader("read_q4_1", 10, 2, codes(2))),
    "Q5_0": BlockType(22, Form(5, 32, 1, False), reader("read_q5_0", 11, 1, codes(3, 5))),
    "Q5_1": BlockType(24, Form(5, 32, 1, True), reader("read_q5_1", 12, 2, codes(4, 5))),
    "Q8_0": BlockType(34, Form(8, 32, 1, False), reader("read_q8_0", 17, 1, codes(1, 8))),
    "Q4_K": BlockType(144, Form(4, 32, 8, True), reader("read_q4_k", 72, 2, codes_of_k(8, 4))),
    "Q5_K": BlockType(176, Form(5, 32, 8, True), reader("read_q5_k", 88, 2, codes_of_k(24, 5))),
    "Q6_K": BlockType(210, Form(6, 16, 16, False), reader("read_q6_k", 105, 1, put_q6_k, 104)),
    "Q2_K": BlockType(84, Form(4, 16, 16, True), reader("read_q2_k", 42, 2, put_q2_k, 40)),
    "Q3_K": BlockType(110, Form(4, 16, 16, False), reader("read_q3_k", 55, 1, put_q3_k, 54)),
    "IQ4_NL": BlockType(18, Form(4, 32, 1, False, "nl"), read_q4_0),
    "IQ4_XS": BlockType(136, Form(4, 32, 8, False, "nl"), reader("read_iq4_xs", 68, 1, put_iq4_xs)),
    "MXFP4": BlockType(17, Form(4, 32, 1, False, "e2m1"), read_q4_0, with_fp16),
}


def rows_of_blocks(blocks: Blocks) -> Rows:
    """The file's bytes as words of strips, row by row, in their type's form."""
    size, form, read, made = TYPES[blocks.type]
    octets = made(blocks.octets) if made else blocks.octets
    n, n_blocks = len(octets), blocks.octets.shape[1] // size
    numbers = np.empty((n, n_blocks, form.n_levels), np.uint16)
    factors = np.empty((n, n_blocks, form.n_levels, form.n_groups * (form.n_groups > 1)), np.int8)
    words = np.empty((n, n_blocks, form.n_groups, form.row_words), np.uint32)
    flat = numbers.reshape(n, -1), factors.view(np.uint8).reshape(n, -1), words.reshape(n, -1)
    source = np.ascontiguousarray(octets).view(np.uint16)
    on_all_threads(read(*flat, source))
    return Rows(numbers, factors, words)


def widened(rows: Rows, form: Form, wide: Form) -> Rows:
    """Rows of a form in one of as many bits or more that has minima or has none either, of groups as large or half as large."""
    numbers, factors, words = rows
    quads = unpacked(form, words)
    if not wide.has_minima:
        quads = quads + np.uint32(EACH * (wide.middle - form.middle))
    elif not form.has_minima:  # d (q - middle) = d q + (-middle d)
        minima = (np.float32(-form.middle) * numbers.view(np.float16)).astype(np.float16).view(np.uint16)
        numbers, factors = np.concatenate([numbers, minima], 2), np.concatenate([factors, factors], 2)
    factors = np.repeat(factors, form.group // wide.group, 3)
    quads = quads.reshape(*quads.shape[:2], wide.n_groups, wide.group // QUADS)
    return Rows(numbers, factors, packed(wide, quads))


def fill(form: Form, strips: Float32, first: int, stride: int, rows: Blocks, group: int) -> None:
    """`Kind.fill`."""
    own, read = TYPES[rows.type].form, rows_of_blocks(rows)
    place(strips, first, stride, read if own == form else widened(read, own, form))


def _kind(name: str, form: Form) -> Kind:
    return replace(group_kind(name, form, functools.partial(fill, form)), of_blocks=True)


KINDS = {name: _kind(name, block.form) for name, block in TYPES.items()}
MIXED, MIXED_K = _kind("mixed", EIGHT_AND_MINIMUM), _kind("mixed K", SIX_AND_MINIMA)


def kind_of_types(types: Collection[str]) -> Kind | None:
    """The kind that holds matrices of those types, "" where one is of floats, without a loss; None: fp32 alone does."""
    if len(types) == 1:
        return KINDS[next(iter(types))]
    if all(name.endswith("_K") for name in types):
        return MIXED_K
    if not all(name.endswith(("_0", "_1")) for name in types):
        return None
    forms = [TYPES[name].form for name in types]
    wide = Form(max(form.bits for form in forms), 32, 1, any(form.has_minima for form in forms))
    return next((kind for name, kind in KINDS.items() if TYPES[name].form == wide), MIXED)
