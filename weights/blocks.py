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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..machine.cache import inlined
from ..machine.parts import share
from ..machine.programs import Bytes2, Halves2, Operation, Pass, Words2, on_all_threads, operation
from ..machine.vectors import Float32
from .groups import EACH, NIBBLES, Form, Rows, group_kind, packed, place, unpacked
from .int8 import QUADS
from .matrix import Blocks, Kind

Octets = npt.NDArray[np.uint8]
TWO_BITS, SIGNS = 3 * EACH, 128 * EACH


@inlined
def word_at(source, row, half):
    """The 4 bytes from that half word of a row on."""
    return np.int64(source[row, half]) | np.int64(source[row, half + 1]) << 16


@inlined
def byte_at(source, row, at):
    """The byte of a row at an index."""
    return (np.int64(source[row, at // 2]) >> (8 * (at % 2))) & 255


@inlined
def fifth_bits(bits):
    """The bits of 32 codes one behind the other, as a group has them: that of byte b of quad k is bit 8 b + k."""
    word = np.int64(0)
    for k in range(8):
        word |= (((bits >> 4 * k & 15) * 0x00204081) & EACH) << k  # the product has bits 0 to 3 at 0, 8, 16 and 24
    return word


@inlined
def put_6_bits(factors, source, row, block, at):
    """Scales and minima of the 8 groups of a K block, 12 bytes from that half word on."""
    for g in range(4):
        scale, minimum = byte_at(source, row, 2 * at + g), byte_at(source, row, 2 * at + 4 + g)
        both = byte_at(source, row, 2 * at + 8 + g)
        factors[row, 16 * block + g] = scale & 63
        factors[row, 16 * block + 8 + g] = minimum & 63
        factors[row, 16 * block + 4 + g] = (both & 15) | (scale >> 6) << 4
        factors[row, 16 * block + 12 + g] = both >> 4 | (minimum >> 6) << 4


@inlined
def put_lower_bits(words, row, at, row_words, source, half):
    """Those of two groups, the second row_words behind the first: 32 bytes from that half word on have a code of each."""
    for k in range(4):
        a, b = word_at(source, row, half + 2 * k), word_at(source, row, half + 8 + 2 * k)
        words[row, at + k] = (a & NIBBLES) | (b & NIBBLES) << 4
        words[row, at + row_words + k] = (a >> 4 & NIBBLES) | (b & NIBBLES << 4)


@operation
def read_q4_0(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks (rows, halves) of d, 16 bytes of two codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 9 * block
            numbers[row, block] = source[row, at]
            for k in range(4):
                words[row, 4 * block + k] = word_at(source, row, at + 1 + 2 * k)


@operation
def read_q4_1(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, m, 16 bytes of two codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1] // 2):
            at = 10 * block
            numbers[row, 2 * block] = source[row, at]
            numbers[row, 2 * block + 1] = source[row, at + 1]
            for k in range(4):
                words[row, 4 * block + k] = word_at(source, row, at + 2 + 2 * k)


@operation
def read_q5_0(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, 32 fifth bits, 16 bytes of two codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 11 * block
            numbers[row, block] = source[row, at]
            for k in range(4):
                words[row, 5 * block + k] = word_at(source, row, at + 3 + 2 * k)
            words[row, 5 * block + 4] = fifth_bits(word_at(source, row, at + 1))


@operation
def read_q5_1(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, m, 32 fifth bits, 16 bytes of two codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1] // 2):
            at = 12 * block
            numbers[row, 2 * block] = source[row, at]
            numbers[row, 2 * block + 1] = source[row, at + 1]
            for k in range(4):
                words[row, 5 * block + k] = word_at(source, row, at + 4 + 2 * k)
            words[row, 5 * block + 4] = fifth_bits(word_at(source, row, at + 2))


@operation
def read_q8_0(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, 32 signed codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 17 * block
            numbers[row, block] = source[row, at]
            for k in range(8):
                words[row, 8 * block + k] = word_at(source, row, at + 1 + 2 * k) ^ SIGNS


@operation
def read_q4_k(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, dmin, 12 bytes of scales and minima, for each 2 of 8 groups 32 bytes of a code of the one and the other."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1] // 2):
            at = 72 * block
            numbers[row, 2 * block] = source[row, at]
            numbers[row, 2 * block + 1] = source[row, at + 1] ^ 0x8000  # - dmin
            put_6_bits(factors, source, row, block, at + 2)
            for pair in range(4):
                put_lower_bits(words, row, 32 * block + 8 * pair, 4, source, at + 8 + 16 * pair)


@operation
def read_q5_k(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """The same with 32 bytes in front of the codes, of each one fifth bit of each group."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1] // 2):
            at = 88 * block
            numbers[row, 2 * block] = source[row, at]
            numbers[row, 2 * block + 1] = source[row, at + 1] ^ 0x8000  # - dmin
            put_6_bits(factors, source, row, block, at + 2)
            for pair in range(4):
                put_lower_bits(words, row, 40 * block + 10 * pair, 5, source, at + 24 + 16 * pair)
            for g in range(8):
                fifth = np.int64(0)
                for k in range(8):
                    fifth |= (word_at(source, row, at + 8 + 2 * k) >> g & EACH) << k
                words[row, 40 * block + 5 * g + 4] = fifth


@operation
def read_q6_k(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of 128 bytes of lower, 64 of upper bits, 16 signed scales, d. Of each 128 codes 2 x 32 lower bytes hold two codes,
    32 upper ones four."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 105 * block
            numbers[row, block] = source[row, at + 104]
            for g in range(16):
                factors[row, 16 * block + g] = byte_at(source, row, 2 * (at + 96) + g)
            for g in range(16):
                half, quarter, place = g // 8, g % 8 // 2, g % 2 * 4  # place: of the group's first quad among the quarter's 8
                lower, upper = at + 32 * half + 16 * (quarter % 2) + 2 * place, at + 64 + 16 * half + 2 * place
                for k in range(2):
                    a = word_at(source, row, lower + 2 * k) >> 4 * (quarter // 2) & NIBBLES
                    b = word_at(source, row, lower + 4 + 2 * k) >> 4 * (quarter // 2) & NIBBLES
                    words[row, 48 * block + 3 * g + k] = a | b << 4
                two_bits = np.int64(0)
                for k in range(4):
                    two_bits |= (word_at(source, row, upper + 2 * k) >> 2 * quarter & TWO_BITS) << 2 * k
                words[row, 48 * block + 3 * g + 2] = two_bits


@inlined
def put_quads_of_16(words, row, at, source, lower, shift, high, bit):
    """Codes of a group of 16: 2 bits of 16 bytes from that half word on, less 4 and plus 8 where `high` has no bit, else plus 8;
    high: the half word of 16 bytes with a bit of each, or -1: codes are as they are."""
    for k in range(2):
        word = np.int64(0)
        for half in range(2):
            place = lower + 2 * k + 4 * half
            quad = word_at(source, row, place) >> shift & 3 * EACH
            if high >= 0:
                quad += (word_at(source, row, high + 2 * k + 4 * half) >> bit & EACH) * 4 + 4 * EACH
            word |= quad << 4 * half
        words[row, at + k] = word


@operation
def read_q2_k(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of 16 scales and minima of 4 bits, 64 bytes of four codes, d, dmin: of each 128 codes 32 bytes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1] // 2):
            at = 42 * block
            numbers[row, 2 * block] = source[row, at + 40]
            numbers[row, 2 * block + 1] = source[row, at + 41] ^ 0x8000  # - dmin
            for g in range(16):
                both = byte_at(source, row, 2 * at + g)
                factors[row, 32 * block + g], factors[row, 32 * block + 16 + g] = both & 15, both >> 4
                place, shift = at + 8 + 16 * (g // 8) + 8 * (g % 2), 2 * (g % 8 // 2)
                put_quads_of_16(words, row, 32 * block + 2 * g, source, place, shift, -1, 0)


@operation
def read_q3_k(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of 32 bytes of third bits, 64 of four codes of 2 bits, 12 of scales of 6 bits, d."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 55 * block
            numbers[row, block] = source[row, at + 54]
            for g in range(16):
                low = byte_at(source, row, 2 * (at + 48) + g % 8) >> 4 * (g // 8) & 15
                high = byte_at(source, row, 2 * (at + 52) + g % 4) >> 2 * (g // 4) & 3
                factors[row, 16 * block + g] = ((low | high << 4) - 32) & 255
                place, shift = at + 16 + 16 * (g // 8) + 8 * (g % 2), 2 * (g % 8 // 2)
                put_quads_of_16(words, row, 32 * block + 2 * g, source, place, shift, at + 8 * (g % 2), g // 2)


@operation
def read_iq4_xs(run: Pass, thread: int, numbers: Halves2, factors: Bytes2, words: Words2, source: Halves2) -> None:
    """Blocks of d, upper 2 bits of 8 scales, lower 4 of them, for each group 16 bytes of two codes."""
    first, last = share(source.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for block in range(numbers.shape[1]):
            at = 68 * block
            numbers[row, block] = source[row, at]
            for g in range(8):
                low = byte_at(source, row, 2 * (at + 2) + g // 2) >> 4 * (g % 2) & 15
                factors[row, 8 * block + g] = ((low | (source[row, at + 1] >> 2 * g & 3) << 4) - 32) & 255
                for k in range(4):
                    words[row, 32 * block + 4 * g + k] = word_at(source, row, at + 4 + 8 * g + 2 * k)


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


FOUR, FOUR_AND_MINIMUM = Form(4, 32, 1, False), Form(4, 32, 1, True)
EIGHT_AND_MINIMUM = Form(8, 32, 1, True)  # what holds every type but the K ones
SIX_AND_MINIMA = Form(6, 16, 16, True)  # what holds every K type
TYPES = {
    "Q4_0": BlockType(18, FOUR, read_q4_0),
    "Q4_1": BlockType(20, FOUR_AND_MINIMUM, read_q4_1),
    "Q5_0": BlockType(22, Form(5, 32, 1, False), read_q5_0),
    "Q5_1": BlockType(24, Form(5, 32, 1, True), read_q5_1),
    "Q8_0": BlockType(34, Form(8, 32, 1, False), read_q8_0),
    "Q4_K": BlockType(144, Form(4, 32, 8, True), read_q4_k),
    "Q5_K": BlockType(176, Form(5, 32, 8, True), read_q5_k),
    "Q6_K": BlockType(210, Form(6, 16, 16, False), read_q6_k),
    "Q2_K": BlockType(84, Form(4, 16, 16, True), read_q2_k),
    "Q3_K": BlockType(110, Form(4, 16, 16, False), read_q3_k),
    "IQ4_NL": BlockType(18, Form(4, 32, 1, False, "nl"), read_q4_0),
    "IQ4_XS": BlockType(136, Form(4, 32, 8, False, "nl"), read_iq4_xs),
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
