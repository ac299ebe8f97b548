"""Weights in 4 to 8 bits whose groups share a scale and perhaps a minimum: code * scale + minimum, as GGUF's types have them.

Activations are int8 in groups of the same size, as `int8.quantize` makes them; the integer sums of a group are exact, so their
order is free, and its floats enter their row's chain in their turn: sum (scale q + minimum) x = scale sum(q x) + minimum sum(x).

A strip is (blocks, words). A block of columns holds, for each of the R rows, the fp16 scale and, with minima, the fp16 minimum;
where scales have two levels, of each group the rows' int8 factors of the one, then of each those of the other; then of each
group the codes, words of 4 bytes, the rows of each innermost. A quad of codes of 8 bits is a word. Of fewer bits, the lower 4 of
two codes share a byte, the one half a group behind the other in its upper half; then comes a word of the upper bits, if any: 1 of
each of 32 codes or 2 of each of 16, byte b of quad k from bit 8 b + k or 8 b + 2 k on. Codes without a minimum lie around the
middle of their range: 8, 16, 32 or 128.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from specdec.quant.bf16_packed_llvm import TABLE, best_lookup, looked_up
from specdec.quant.int8 import DOT4, GROUP_HEAD, QUADS, Dot4, dot4, quantized, scratch_words
from specdec.quant.matmul import embedded_by, multiplied_by
from specdec.quant.matrix import ALL, Kind
from specdec.runtime.code_cache import inlined
from specdec.runtime.program import Bytes2, Bytes3, Halves2, Halves3, Pass, Words2, Words3, on_all_threads, operation
from specdec.runtime.simd import (  # fmt: skip
    F32,
    FP16_STORAGE,
    I8,
    I32,
    LANES,
    Float32,
    broadcast,
    ceil_div,
    constants,
    lane,
    load_byte,
    load_fp16,
    multiply_add,
    offset,
)
from specdec.runtime.tile import (
    FEATURES,
    LINE_BYTES,
    LINE_WORDS,
    STRIP_ROWS,
    Shape,
    Sweep,
    Tile,
    cells,
    const,
    make_tile,
    prefetch,
)
from specdec.runtime.work_stealing import share

# bits of codes of which a tile over one token, which waits for memory alone, fetches a group's lines as it begins with them, and
# leaves what is farther ahead to the CPU: from DRAM Q4_K 24.8 GB/s, with 8 KiB ahead 19.0, Q8_0 29.5 and 23.6 (Zen 5)
NEAR = (4, 8)
HALF_WORDS = STRIP_ROWS // 2  # of the rows' fp16 numbers
BYTE_WORDS = STRIP_ROWS // 4  # of the rows' bytes
EACH = 0x01010101  # of the bytes in a word
NIBBLES = 15 * EACH


# what 4 bits stand for: doubles of floats of a sign, two bits of exponent and one of mantissa (E2M1 of MX, OCP 2023), and
# kvalues_iq4nl of ggml
NUMBERS = {
    "e2m1": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
    "nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}
CODE_BITS = {"e2m1": 5, "nl": 8}
CODES = {name: np.array(numbers) + (1 << (CODE_BITS[name] - 1)) for name, numbers in NUMBERS.items()}


class Form(NamedTuple):
    """How groups lie: bits of a code, codes of a group, groups of a block, whether they have minima.

    In blocks of several groups scales, and minima, are a fp16 number of the block times an int8 factor of the group. A group of
    5 bits has 32 codes, one of 6 has 16: their upper bits fill a word. table: the name of that in which 4
    bits are looked up, one of `CODES`; what is found there is the code.
    """

    bits: int
    group: int
    n_groups: int
    has_minima: bool
    table: str = ""

    @property
    def code_bits(self) -> int:
        """Of a code, once it is one."""
        return CODE_BITS[self.table] if self.table else self.bits

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.group * self.n_groups

    @property
    def n_levels(self) -> int:
        """Numbers that a group has: a scale and perhaps a minimum."""
        return 1 + self.has_minima

    @property
    def factors_at(self) -> int:
        """The word of a block at which the factors begin."""
        return HALF_WORDS * self.n_levels

    @property
    def codes_at(self) -> int:
        """The word of a block at which the codes begin."""
        return self.factors_at + BYTE_WORDS * self.n_levels * self.n_groups * (self.n_groups > 1)

    @property
    def row_words(self) -> int:
        """Of a row's codes in a group."""
        return self.group * self.bits // 32

    @property
    def quad_words(self) -> int:
        """Those of them that hold quads, or the lower bits of two quads each."""
        return self.group // (QUADS if self.bits == 8 else 2 * QUADS)

    @property
    def upper_bits(self) -> int:
        """Of a code: those that lie in the word behind."""
        return self.bits - 4 if self.bits < 8 else 0

    @property
    def upper_mask(self) -> int:
        """The lowest so many bits of each byte of a quad."""
        return EACH * ((1 << self.upper_bits) - 1)

    @property
    def block_words(self) -> int:
        """Of all rows."""
        return self.codes_at + self.n_groups * self.row_words * STRIP_ROWS

    @property
    def middle(self) -> int:
        """The code of a weight of 0, where there are no minima."""
        return 0 if self.has_minima else 1 << (self.code_bits - 1)


def group_body(form: Form, dot: Dot4) -> Any:
    """The body of a tile over weights of that form, n blocks."""
    x_group_words = GROUP_HEAD + form.group // QUADS

    def emit(builder: Any, shape: Shape, sweep: Sweep, tile: Tile) -> None:
        lanes, n_vectors, n_tokens = shape
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        places, starts = cells(builder, shape, sweep, tile)
        totals = [cgutils.alloca_once_value(builder, start) for start in starts]
        stride_of = form.block_words // (form.block_words // STRIP_ROWS)  # words: what ahead_stride is for
        line_stride = builder.udiv(builder.mul(tile.ahead_stride, const(LINE_WORDS)), const(stride_of))
        n_lines = builder.mul(tile.n, const(form.block_words // LINE_WORDS))
        ahead, own_stride = sweep.ahead(builder, tile.ahead, line_stride, n_lines)

        def every(value: int) -> Any:
            return constants(integers, value)

        def numbers(block: Any, level: int, v: int) -> Any:
            """fp16 numbers of a vector's rows."""
            place = builder.add(builder.udiv(sweep.row, const(2)), const(level * HALF_WORDS + v * lanes // 2))
            place = offset(builder, block, place, FP16_STORAGE.vector(lanes))
            return FP16_STORAGE.widen(builder, builder.load(place, align=2 * lanes))

        def factors(block: Any, at: Any, v: int) -> Any:
            """int8 factors of a vector's rows."""
            place = builder.add(at, builder.add(builder.udiv(sweep.row, const(4)), const(v * lanes // 4)))
            few = builder.load(offset(builder, block, place, ir.VectorType(I8, lanes)), align=lanes)
            return builder.sitofp(builder.sext(few, integers), floats)

        def first_sum(correction: Any) -> Any:
            """What a group's integers begin with, so that they end as the sum of (code - middle) x; correction: -128 sum(x)."""
            sum_of_zeros = builder.ashr(correction, I32(8 - form.code_bits)) if form.middle else I32(0)
            if dot.is_signed:  # which takes codes - 128
                sum_of_zeros = builder.sub(sum_of_zeros, correction)
            return broadcast(builder, sum_of_zeros, integers)

        def found(nibbles: Any) -> Any:
            """What the form's table has for each byte."""
            octets = ir.VectorType(I8, QUADS * lanes)
            table = ir.Constant(ir.VectorType(I8, TABLE), CODES[form.table].tolist())
            lookup = best_lookup(FEATURES, octets.count)
            return builder.bitcast(looked_up(builder, table, builder.bitcast(nibbles, octets), lookup), integers)

        def codes_of(quad: int, lower: Any, upper: Any) -> Any:
            """A quad of a vector's rows out of the words of its lower and its upper bits."""
            lower = builder.and_(builder.lshr(lower, every(quad // form.quad_words * 4)), every(NIBBLES))
            if form.table:
                return found(lower)
            if not form.upper_bits:
                return lower
            left = 4 - quad * form.upper_bits
            upper = builder.shl(upper, every(left)) if left > 0 else builder.lshr(upper, every(-left))
            return builder.or_(lower, builder.and_(upper, every(form.upper_mask << 4)))

        def fetch(first: Any, n_lines: int) -> None:
            """What lies ahead for so many lines of the strip from that word on, or what lies there: see `NEAR`."""
            if n_tokens == 1 and form.bits in NEAR:
                here = builder.bitcast(builder.gep(tile.w, [first]), I8.as_pointer())
                for line in range(n_lines):
                    prefetch(builder, builder.gep(here, [const(line * LINE_BYTES)]), const(0))
                return
            place = builder.gep(ahead, [builder.mul(builder.udiv(first, const(LINE_WORDS)), own_stride)])
            for _ in range(0, n_lines, sweep.total):
                prefetch(builder, place, const(0))
                place = builder.gep(place, [line_stride])

        def group(codes: Any, rows: list[Any], scales: list[list[Any]]) -> None:
            """One group's sums into the totals; codes: its first word; rows: each token's words; scales: of each level."""
            fetch(codes, form.row_words * STRIP_ROWS // LINE_WORDS)
            corrections = [builder.load(offset(builder, row, const(1), I32)) for row in rows]
            sums = [dot.begin(builder, first_sum(corrections[t])) for t in range(n_tokens) for _ in range(n_vectors)]
            here = builder.gep(tile.w, [builder.add(codes, sweep.row)])

            def load_words(k: int) -> list[Any]:
                return [
                    builder.load(offset(builder, here, const(k * STRIP_ROWS + lanes * v), integers), align=4 * lanes)
                    for v in range(n_vectors)
                ]

            uppers = load_words(form.quad_words) if form.upper_bits else [None] * n_vectors
            for k in range(form.quad_words):
                words = load_words(k)
                quads = {k: words}
                if form.bits < 8:
                    pairs = list(zip(words, uppers, strict=True))
                    quads = {quad: [codes_of(quad, *pair) for pair in pairs] for quad in (k, k + form.quad_words)}
                quads = {quad: [dot.weights(builder, codes) for codes in vectors] for quad, vectors in quads.items()}
                for t, row in enumerate(rows):
                    for quad, weights in quads.items():
                        four = builder.load(offset(builder, row, const(GROUP_HEAD + quad), I32))
                        four = broadcast(builder, four, integers)
                        for v in range(n_vectors):
                            i = t * n_vectors + v
                            sums[i] = dot.add(builder, sums[i], weights[v], four)
            for t, row in enumerate(rows):
                x_scale = broadcast(builder, builder.load(row), floats)
                if form.has_minima:
                    x_sum = broadcast(builder, builder.load(builder.gep(row, [const(2)])), floats)
                for v in range(n_vectors):
                    i = t * n_vectors + v
                    number = builder.sitofp(dot.end(builder, sums[i]), floats)
                    total = multiply_add(builder, number, builder.fmul(scales[0][v], x_scale), builder.load(totals[i]))
                    if form.has_minima:
                        total = multiply_add(builder, scales[1][v], x_sum, total)
                    builder.store(total, totals[i])

        with cgutils.for_range(builder, tile.n) as blocks:
            first = builder.mul(blocks.index, const(form.block_words))
            block = builder.gep(tile.w, [first])
            x_block = builder.mul(blocks.index, const(form.n_groups * x_group_words))
            rows = [builder.gep(tile.x, [builder.add(builder.mul(tile.x_stride, const(t)), x_block)]) for t in range(n_tokens)]
            codes = builder.add(first, const(form.codes_at))
            fetch(first, form.codes_at // LINE_WORDS)
            scales = [[numbers(block, level, v) for v in range(n_vectors)] for level in range(form.n_levels)]
            if form.n_groups == 1:
                group(codes, rows, scales)
            else:
                with cgutils.for_range(builder, const(form.n_groups)) as groups:
                    g = groups.index
                    here = [builder.gep(row, [builder.mul(g, const(x_group_words))]) for row in rows]
                    own = []
                    for level in range(form.n_levels):
                        at = builder.add(
                            builder.mul(g, const(BYTE_WORDS)), const(form.factors_at + level * form.n_groups * BYTE_WORDS)
                        )
                        own.append([builder.fmul(scales[level][v], factors(block, at, v)) for v in range(n_vectors)])
                    group(builder.add(codes, builder.mul(g, const(form.row_words * STRIP_ROWS))), here, own)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)

    return emit


def group_tile(form: Form, path: str) -> tuple[Any, Any]:
    """`make_tile` of the products of weights of that form by that instruction."""
    own = form.bits, form.group, form.n_groups, int(form.has_minima), *[form.table] * bool(form.table)
    name = "_".join(map(str, ("group_tile", *own, path)))
    dot = dot4(path, form.code_bits)
    return make_tile(name, group_body(form, dot), dot.shape, dot.most_tokens)


def weight_of(form: Form) -> Any:
    """What gives a weight of that form."""
    bits, of_group, n_groups, has_minima, table = form
    columns, middle, factors_at, codes_at = form.columns, form.middle, form.factors_at, form.codes_at
    row_words, quad_words, upper_bits = form.row_words, form.quad_words, form.upper_bits
    is_looked_up, codes = bool(table), CODES.get(table, np.zeros(1, np.int64))

    @inlined
    def weight_at(w, strip, row, k, n, group):
        place, i = divmod(k, columns)
        g, i = divmod(i, of_group)
        block = (strip * w.shape[1] + place) * w.shape[2]
        at = (block + codes_at + g * row_words * STRIP_ROWS + row) * QUADS + i % QUADS  # in the group's first word
        half, word = divmod(i // QUADS, quad_words)
        code = load_byte(w, at + word * STRIP_ROWS * QUADS)
        if bits < 8:
            code = (code >> (4 * half)) & 15
        if is_looked_up:
            code = codes[code]
        if upper_bits > 0:
            upper = load_byte(w, at + quad_words * STRIP_ROWS * QUADS) >> (i // QUADS * upper_bits)
            code |= (upper << 4) & (2**bits - 16)
        weight = np.float32(code - middle) * group_number(w, block, 0, row, g, n_groups, factors_at)
        if has_minima:
            weight += group_number(w, block, 1, row, g, n_groups, factors_at)
        return weight

    return weight_at


@inlined
def group_number(w, block, level, row, g, n_groups, factors_at):
    """A row's scale (level 0) or minimum (1) in group g of the block at that word."""
    at = 2 * block + level * STRIP_ROWS + row
    number = lane(load_fp16(w, at - at % LANES), at % LANES)
    if n_groups > 1:
        factor = load_byte(w, (block + factors_at) * QUADS + (level * n_groups + g) * STRIP_ROWS + row)
        number *= np.float32((factor ^ 128) - 128)
    return number


class Rows(NamedTuple):
    """Rows of weights of a form before they lie in strips: what a block's words are made of, row by row.

    numbers (rows, blocks, levels): the bits of fp16; factors (rows, blocks, levels, groups) int8, no groups where there is one
    a block; words (rows, blocks, groups, words) uint32: the codes.
    """

    numbers: npt.NDArray[np.uint16]
    factors: npt.NDArray[np.int8]
    words: npt.NDArray[np.uint32]


def unpacked(form: Form, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Quads of codes (A, blocks, groups, quads, ...), of the words (A, blocks, groups, words, ...) that hold them."""
    if form.bits == 8:
        return words
    if form.table:
        octets = CODES[form.table][unpacked(form._replace(table=""), words)[..., None].view(np.uint8)]
        return octets.astype(np.uint8).view(np.uint32)[..., 0]
    lower, upper = words[:, :, :, : form.quad_words], words[:, :, :, form.quad_words :]
    quads = np.concatenate([lower & NIBBLES, lower >> 4 & NIBBLES], 3)
    if form.upper_bits:
        for k in range(quads.shape[3]):
            quads[:, :, :, k] |= (upper[:, :, :, 0] >> k * form.upper_bits & form.upper_mask) << 4
    return quads


def packed(form: Form, quads: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """`unpacked`, the other way round."""
    if form.bits == 8:
        return quads
    words = np.zeros((*quads.shape[:3], form.row_words, *quads.shape[4:]), np.uint32)
    words[:, :, :, : form.quad_words] = quads[:, :, :, : form.quad_words] & NIBBLES
    words[:, :, :, : form.quad_words] |= (quads[:, :, :, form.quad_words :] & NIBBLES) << 4
    if form.upper_bits:
        for k in range(quads.shape[3]):
            words[:, :, :, form.quad_words] |= (quads[:, :, :, k] >> 4 & form.upper_mask) << k * form.upper_bits
    return words


class Placing(NamedTuple):
    """What `place_rows` takes: strips as words, halves of words and bytes; `Rows`, flat; for every stride-th strip."""

    strips: Words3
    halves: Halves3
    octets: Bytes3
    numbers: Halves2
    factors: Bytes2
    words: Words2
    first: int
    stride: int


@operation
def place_rows(run: Pass, thread: int, p: Placing) -> None:
    """Rows (rows, ...) into every stride-th of strips."""
    rows, n_blocks = p.words.shape[0], p.strips.shape[1]
    of_numbers, of_factors = p.numbers.shape[1] // n_blocks, p.factors.shape[1] // n_blocks
    of_words = p.words.shape[1] // n_blocks
    factors_at = 2 * of_numbers * STRIP_ROWS
    codes_at = (factors_at + of_factors * STRIP_ROWS) // QUADS
    begin, end = share(ceil_div(rows, STRIP_ROWS), run.part, run.n_parts)
    for part in range(begin, end):
        strip = p.first + p.stride * part
        for block in range(n_blocks):
            for r in range(min(STRIP_ROWS, rows - part * STRIP_ROWS)):
                row = part * STRIP_ROWS + r
                for i in range(of_numbers):
                    p.halves[strip, block, i * STRIP_ROWS + r] = p.numbers[row, block * of_numbers + i]
                for i in range(of_factors):
                    p.octets[strip, block, factors_at + i * STRIP_ROWS + r] = p.factors[row, block * of_factors + i]
                for i in range(of_words):
                    p.strips[strip, block, codes_at + i * STRIP_ROWS + r] = p.words[row, block * of_words + i]


def place(strips: Float32, first: int, stride: int, rows: Rows) -> None:
    """`place_rows` on all threads."""
    n = len(rows.words)
    flat = rows.numbers.reshape(n, -1), rows.factors.view(np.uint8).reshape(n, -1), rows.words.reshape(n, -1)
    on_all_threads(place_rows(strips.view(np.uint32), strips.view(np.uint16), strips.view(np.uint8), *flat, first, stride))


def rows_of(form: Form, strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`: code * scale + minimum."""
    strips = strips[block]
    size, n_blocks = strips.shape[:2]
    numbers = strips[..., : form.factors_at].view(np.float16).reshape(size, n_blocks, form.n_levels, 1, STRIP_ROWS)
    levels = numbers.astype(np.float32)
    if form.n_groups > 1:
        factors = strips[..., form.factors_at : form.codes_at].view(np.int8)
        levels = levels * factors.reshape(size, n_blocks, form.n_levels, form.n_groups, STRIP_ROWS)
    words = strips[..., form.codes_at :].view(np.uint32).reshape(size, n_blocks, form.n_groups, form.row_words, STRIP_ROWS)
    codes = unpacked(form, words)[..., None].view(np.uint8)
    # (P, blocks, groups, quads, R, 4) -> (P, R, blocks, groups, quads, 4)
    values = codes.transpose(0, 4, 1, 2, 3, 5).astype(np.float32) - np.float32(form.middle)
    scales, *minima = (levels[:, :, i].transpose(0, 3, 1, 2)[..., None, None] for i in range(form.n_levels))
    values *= scales
    for minimum in minima:
        values += minimum
    return np.ascontiguousarray(values.reshape(size * STRIP_ROWS, -1)[:, :n])


def _group_of(form: Form, n: int, file_group: int) -> int:
    """`Kind.group`."""
    return form.group


def _strip_shape(form: Form, n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`."""
    return ceil_div(n, form.columns), form.block_words


def group_kind(name: str, form: Form, fill: Callable[[Float32, int, int, Any, int], None], path: str = DOT4) -> Kind:
    """The kind of weights of that form and name, filled so, multiplied by that instruction of `int8.best_dot4`."""
    stem = name.replace(" ", "_")
    way = "portable" if path == "portable" else "native"
    product, experts = multiplied_by(__name__, f"{stem}_{way}_", *group_tile(form, path), quantized)
    return Kind(
        name,
        product,
        embedded_by(__name__, f"{stem}_", weight_of(form)),
        experts,
        functools.partial(_group_of, form),
        functools.partial(_strip_shape, form),
        fill,
        functools.partial(rows_of, form),
        scratch_words,
    )
