"""int8 weights and activations: groups that share a scale, their sums exact, their floats one chain.

Symmetric as llama2.c's export.py has it: scale = max |w| / 127 over a group of consecutive weights, w about value * scale.

A strip is (groups, words): for each group of columns the R rows' scales, then quads of columns, the rows of each innermost, a
row's 4 weights as the bytes w + 128 of one word. Activations (T, words) are for each group its scale, the correction -128 * sum
of codes for weights that are stored as w + 128, the sum of scale * codes, and the codes, 4 to a word.
"""

import math
import os
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from specdec.quant.matmul import embedded_by, multiplied_by
from specdec.quant.matrix import ALL, Floats, Grouped, Kind, floats
from specdec.runtime.code_cache import compiled, inlined, inner
from specdec.runtime.program import Codes3, Floats2, Pass, Words2, Words3, Words4, on_all_threads, operation
from specdec.runtime.simd import (  # fmt: skip
    CPU_FEATURES,
    F32,
    I8,
    I16,
    I32,
    LANES,
    Float32,
    absolute,
    add,
    broadcast,
    ceil_div,
    constants,
    div,
    fma,
    llvm,
    load,
    load_byte,
    maximum,
    minimum,
    multiply_add,
    offset,
    reduce_add,
    reduce_max,
    rint,
    round_half_away,
    shuffle,
    splat,
    store_byte,
    store_bytes,
    store_int,
)
from specdec.runtime.tile import (  # fmt: skip
    LINE_WORDS,
    REGISTER_LANES,
    STRIP_ROWS,
    TILE_TOKENS,
    Shape,
    Sweep,
    Tile,
    Tokens,
    cells,
    const,
    make_tile,
    prefetch,
    shape_of,
)
from specdec.runtime.work_stealing import share

Int8 = npt.NDArray[np.int8]
QUADS = 4  # bytes in a word
ZEROS_OF_CODES = np.uint32(0x80808080)  # four weights of 0 as they are stored
SMALLEST_SCALE = np.finfo(np.float32).tiny  # below, it has so few bits that a weight might be 190 of them, which wraps around
MINUS_128 = -0x7F7F7F80  # what turns four bytes w into w - 128, by exclusive or
SHORTS_OF_4, SHORTS_OF_8 = ir.VectorType(I16, 8), ir.VectorType(I16, 16)
AVX2_TOKENS, AVX2_WHOLE_TOKENS = 8, 2  # of a tile: 8 rows for each token; up to 2 take all rows of a strip, as memory gives them
NEON_TOKENS = 4  # of a tile: 8 rows for 3 or 4, 16 for 2, all rows of a strip for 1
GROUP_HEAD = 3  # words in front of a group of activations: its scale, its correction and its sum


def best_dot4(features: str) -> str:
    """What sums up products of bytes on a CPU of those LLVM features: an instruction for 4, those of avx2 or neon, "portable"."""
    known = {"avx512vnni": "+avx512vnni", "avxvnni": "+avxvnni", "avx2": "+avx2", "sdot": "+dotprod", "neon": "+neon"}
    return next((name for name, feature in known.items() if feature in features.split(",")), "portable")


class Dot4:
    """acc + the 4 products of bytes of each lane, w times x: int32, exact. w is unsigned, x signed and no less than -127.

    A tile's sums are what `begin` makes of what they are to start from, `add` adds to, and `end` makes int32 of again.
    lanes: of its vectors; is_signed: whether it takes w - 128 for w.
    """

    name, lanes, is_signed, most_tokens = "portable", REGISTER_LANES, False, TILE_TOKENS

    def shape(self, rows: int, n_tokens: int) -> Shape:
        """Of a tile over strips of so many rows."""
        return shape_of(rows, n_tokens, self.lanes, is_by_tokens=True)

    def weights(self, builder: Any, w: Any) -> Any:
        """What `add` takes for w, made once for all tokens."""
        return self.octets(builder, builder.xor(w, constants(w.type, MINUS_128))) if self.is_signed else w

    def octets(self, builder: Any, words: Any) -> Any:
        """The bytes of its vectors' words."""
        return builder.bitcast(words, ir.VectorType(I8, QUADS * self.lanes))

    def begin(self, builder: Any, first: Any) -> Any:
        return first

    def add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Bytes 0 and 2, then 1 and 3 of each lane, as two products of int16 pairs: what x86 calls pmaddwd."""
        shorts = ir.VectorType(I16, 2 * acc.type.count)
        eight = constants(shorts, 8)
        w, x = builder.bitcast(w, shorts), builder.bitcast(x, shorts)
        for w_half, x_half in (
            (builder.and_(w, constants(shorts, 255)), builder.ashr(builder.shl(x, eight), eight)),
            (builder.lshr(w, eight), builder.ashr(x, eight)),
        ):
            for odd in (0, 1):
                lanes = list(range(odd, shorts.count, 2))
                a, b = (builder.sext(shuffle(builder, v, lanes), acc.type) for v in (w_half, x_half))
                acc = builder.add(acc, builder.mul(a, b))
        return acc

    def end(self, builder: Any, acc: Any) -> Any:
        return acc

    def multiply_add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """acc and the products of one quad."""
        return self.end(builder, self.add(builder, self.begin(builder, acc), self.weights(builder, w), x))


class Vnni(Dot4):
    def __init__(self, name: str, lanes: int) -> None:
        self.name, self.lanes = name, lanes

    def add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        return llvm(builder, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", acc.type, acc, w, x)


class Sdot(Dot4):
    name, lanes, is_signed = "sdot", 4, True

    def add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        return llvm(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, w, self.octets(builder, x))


class InShorts(Dot4, ABC):
    """Sums of two products in 16 bits, which are then added to those of 32. Of w - 128 no more fit: 2 * 128 * 127 = 32512."""

    is_signed = True

    @abstractmethod
    def pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """shorts, or 0 where it is None, + the sums of two products, in 16 bits."""

    @abstractmethod
    def widen(self, builder: Any, acc: Any, shorts: Any) -> Any:
        """acc + the sums that stand in 16 bits."""

    def add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        return self.widen(builder, acc, self.pairs(builder, None, w, x))


class OfFew(InShorts):
    """w below 2^bits: as many sums of two products as 16 bits hold are added up there, 8 of 4 bits, 4 of 5 and 2 of 6."""

    is_signed = False

    def __init__(self, bits: int) -> None:
        self.most = (2**15 - 1) // (2 * (2**bits - 1) * 127)

    def weights(self, builder: Any, w: Any) -> Any:
        return self.octets(builder, w)

    def begin(self, builder: Any, first: Any) -> Any:
        """int32 sums, and those of 16 bits with their number."""
        return first, None, 0

    def add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        wide, shorts, n = acc
        if n == self.most:
            wide, shorts, n = self.end(builder, acc), None, 0
        return wide, self.pairs(builder, shorts, w, x), n + 1

    def end(self, builder: Any, acc: Any) -> Any:
        wide, shorts, _ = acc
        return self.widen(builder, wide, shorts)


class Avx2(InShorts):
    """|w - 128| times x with its sign."""

    name, lanes, most_tokens = "avx2", 8, AVX2_TOKENS

    def shape(self, rows: int, n_tokens: int) -> Shape:
        return Shape(8, rows // 8 if n_tokens <= AVX2_WHOLE_TOKENS else 1, n_tokens)

    def weights(self, builder: Any, w: Any) -> Any:
        w = super().weights(builder, w)
        return llvm(builder, "llvm.abs.v32i8", w.type, w, ir.IntType(1)(0)), w

    def pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        size, w = w
        x = llvm(builder, "llvm.x86.avx2.psign.b", w.type, builder.bitcast(x, w.type), w)
        return _byte_pairs(builder, shorts, size, x)

    def widen(self, builder: Any, acc: Any, shorts: Any) -> Any:
        pairs = llvm(builder, "llvm.x86.avx2.pmadd.wd", acc.type, shorts, constants(SHORTS_OF_8, 1))
        return builder.add(acc, pairs)


def _byte_pairs(builder: Any, shorts: Any, w: Any, x: Any) -> Any:
    pairs = llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS_OF_8, w, x)
    return pairs if shorts is None else builder.add(shorts, pairs)


class Avx2OfFew(OfFew, Avx2):
    def pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        return _byte_pairs(builder, shorts, w, self.octets(builder, x))


class Neon(InShorts):
    """Products of the bytes of two lanes, then of the other two. Sums are few, since their products take registers too."""

    name, lanes, most_tokens = "neon", 4, NEON_TOKENS

    def shape(self, rows: int, n_tokens: int) -> Shape:
        return Shape(4, rows // 4 // n_tokens, n_tokens)

    def pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """smull or smlal, twice: not yet in pairs, which addp makes before they are widened."""
        x, products = self.octets(builder, x), []
        for lanes in (list(range(8)), list(range(8, 16))):
            factors = (shuffle(builder, v, lanes) for v in (w, x))
            products.append(llvm(builder, "llvm.aarch64.neon.smull.v8i16", SHORTS_OF_4, *factors))
        return products if shorts is None else [builder.add(*sums) for sums in zip(shorts, products, strict=True)]

    def widen(self, builder: Any, acc: Any, shorts: Any) -> Any:
        """addp, then sadalp."""
        pairs = llvm(builder, "llvm.aarch64.neon.addp.v8i16", SHORTS_OF_4, *shorts)
        return builder.add(acc, llvm(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs))


class NeonOfFew(OfFew, Neon):
    """`OfFew` by the instructions of `Neon`."""


DOTS = {dot.name: dot for dot in (Dot4(), Vnni("avx512vnni", 16), Vnni("avxvnni", 8), Sdot(), Avx2(), Neon())}
OF_FEW: dict[str, type[OfFew]] = {"avx2": Avx2OfFew, "neon": NeonOfFew}


def dot4(path: str, bits: int = 8) -> Dot4:
    """What multiplies codes of so many bits by those instructions of `best_dot4`."""
    return OF_FEW[path](bits) if bits < 8 and path in OF_FEW else DOTS[path]


def _int8_body(dot: Dot4) -> Any:
    """The body of a tile over int8 weights, n groups of n_quads.

    The integer sums of a group are exact, so their order is free; a group's float enters its row's chain at its place.
    """

    def emit(builder: Any, shape: Shape, sweep: Sweep, tile: Tile) -> None:
        lanes, n_vectors, n_tokens = shape
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        places, starts = cells(builder, shape, sweep, tile)
        totals = [cgutils.alloca_once_value(builder, start) for start in starts]
        sums = [cgutils.alloca_once(builder, integers) for _ in places]
        w, group_rows = builder.gep(tile.w, [sweep.row]), builder.add(tile.n_quads, const(1))
        group_words = builder.mul(group_rows, const(STRIP_ROWS))
        ahead, ahead_stride = sweep.ahead(builder, tile.ahead, tile.ahead_stride, builder.mul(tile.n, group_rows))
        x_group_words = builder.add(tile.n_quads, const(GROUP_HEAD))

        def load_words(pointer: Any, v: int, vector_type: Any) -> Any:
            return builder.load(offset(builder, pointer, const(lanes * v), vector_type), align=4 * lanes)

        with cgutils.for_range(builder, tile.n) as groups:
            weights = builder.gep(w, [builder.mul(groups.index, group_words)])
            fetched = builder.gep(ahead, [builder.mul(builder.mul(groups.index, group_rows), ahead_stride)])
            start = builder.mul(groups.index, x_group_words)
            rows = [builder.gep(tile.x, [builder.add(builder.mul(tile.x_stride, const(t)), start)]) for t in range(n_tokens)]
            for i, total in enumerate(sums):
                begin = constants(integers, 0)
                if not dot.is_signed:
                    begin = broadcast(builder, builder.load(offset(builder, rows[i // n_vectors], const(1), I32)), integers)
                builder.store(begin, total)
            with cgutils.for_range(builder, tile.n_quads) as quads:
                row = builder.add(quads.index, const(1))
                line, here = builder.mul(row, ahead_stride), builder.gep(weights, [builder.mul(row, const(STRIP_ROWS))])
                loaded = []
                for v in range(n_vectors):
                    loaded.append(dot.weights(builder, load_words(here, v, integers)))
                    if v * lanes % LINE_WORDS == 0:
                        prefetch(builder, fetched, builder.add(line, const(v * lanes * QUADS)))
                for t in range(n_tokens):
                    quad = builder.load(offset(builder, rows[t], builder.add(quads.index, const(GROUP_HEAD)), I32))
                    quad = broadcast(builder, quad, integers)
                    for v in range(n_vectors):
                        total = sums[t * n_vectors + v]
                        builder.store(dot.add(builder, builder.load(total), loaded[v], quad), total)
            scales = [load_words(weights, v, floats) for v in range(n_vectors)]
            for i, total in enumerate(totals):
                t, v = divmod(i, n_vectors)
                scale = builder.fmul(scales[v], broadcast(builder, builder.load(rows[t]), floats))
                number = builder.sitofp(builder.load(sums[i]), floats)
                builder.store(multiply_add(builder, number, scale, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)

    return emit


def dot4_tile(path: str) -> tuple[Any, Tokens]:
    """`make_tile` of the products by those instructions."""
    dot = dot4(path)
    return make_tile(f"int8_tile_{path}", _int8_body(dot), dot.shape, dot.most_tokens)


DOT4 = "portable" if os.environ.get("SPECDEC_PORTABLE", "") not in ("", "0") else best_dot4(CPU_FEATURES)


@compiled
def quantize(codes, x, n, group, n_tokens):
    """Rows x[t, :n] as int8 (runq.c's rule): codes = round(x / scale), scale = max |x| / 127 of a group, halves away from 0.

    codes (T, words) holds for each group its scale, the correction -128 * sum of codes for weights that are stored as w + 128,
    the sum of scale * codes, and the codes, 4 to a word, zeros after the last. A group that is not finite has NaN for its scale.
    """
    n_quads = ceil_div(group, QUADS)
    lowest, limit = splat(-127.0), splat(127.0)
    for t in range(n_tokens):
        row, words = t * x.shape[1], t * codes.shape[1]
        for g in range(ceil_div(n, group)):  # all scales first: each waits for what was just computed, and two loops wait less
            start, end = g * group, min((g + 1) * group, n)
            whole = start + (end - start) // LANES * LANES
            top = splat(0.0)
            for i in range(start, whole, LANES):
                top = maximum(absolute(load(x, row + i)), top)
            for i in range(whole, end):
                top = maximum(absolute(splat(x[t, i])), top)
            codes[t, g * (GROUP_HEAD + n_quads)] = reduce_max(top) / np.float32(127.0)
        for g in range(ceil_div(n, group)):
            start, end = g * group, min((g + 1) * group, n)
            whole = start + (end - start) // LANES * LANES
            at = g * (GROUP_HEAD + n_quads)
            scale, first = codes[t, at], (words + at + GROUP_HEAD) * QUADS
            divisor = splat(scale if scale > 0.0 else np.float32(1.0))
            total = splat(0.0)
            for i in range(start, whole, LANES):
                code = round_half_away(div(load(x, row + i), divisor))
                code = maximum(lowest, minimum(limit, code))  # in this order a NaN stays one
                total = add(total, code)
                store_bytes(codes, first + i - start, code)
            total_of_group = reduce_add(total)
            for i in range(whole, start + n_quads * QUADS):
                code = splat(x[t, i] if i < end else np.float32(0.0))
                code = reduce_max(maximum(lowest, minimum(limit, round_half_away(div(code, divisor)))))
                total_of_group += code
                store_byte(codes, first + i - start, code)
            codes[t, at] = scale + np.float32(0.0) * total_of_group
            store_int(codes, (words + at + 1) * QUADS, np.float32(-128.0) * total_of_group)
            codes[t, at + 2] = codes[t, at] * total_of_group


@inlined
def quantized(run, thread, p, n_tokens):
    """x as a tile over groups of int8 takes it."""
    codes = p.scratch[thread]
    if run.begins:
        quantize(codes, p.x[thread if p.x.shape[0] > 1 else 0], p.n, p.group, n_tokens)
    return codes, p.w.shape[2] // STRIP_ROWS - 1


@inlined
def weight_at(w, strip, row, k, n, group):
    """code * scale."""
    place, i = divmod(k, group)
    word = (strip * w.shape[1] + place) * w.shape[2] + (1 + i // QUADS) * STRIP_ROWS + row
    code = load_byte(w, word * QUADS + i % QUADS) - 128
    return np.float32(code) * w[strip, place, row]


product, experts = multiplied_by(__name__, "", *dot4_tile(best_dot4(CPU_FEATURES)), quantized)
portable_product, portable_experts = multiplied_by(__name__, "portable_", *dot4_tile("portable"), quantized)
embed = embedded_by(__name__, "", weight_at)


@inner
def quantize_group(values, scales, rows, row, g, group):
    """values (rows, groups, group) and scales (rows, groups) of group g of a row of rows (rows, n); zeros fill it up."""
    n = rows.shape[1]
    at, out = row * n, (row * scales.shape[1] + g) * group
    start, end = g * group, min((g + 1) * group, n)
    whole = start + (end - start) // LANES * LANES
    top, not_finite = splat(0.0), splat(0.0)
    for i in range(start, whole, LANES):
        weights = load(rows, at + i)
        top, not_finite = maximum(absolute(weights), top), fma(weights, splat(0.0), not_finite)
    for i in range(whole, end):
        weights = splat(rows[row, i])
        top, not_finite = maximum(absolute(weights), top), fma(weights, splat(0.0), not_finite)
    scale = np.float32(reduce_max(top) / np.float32(127.0))
    if scale < SMALLEST_SCALE:
        scale = np.float32(0.0)
    divisor = splat(scale if scale > 0.0 else np.float32(1.0))
    for i in range(start, whole, LANES):
        store_bytes(values, out + i - start, rint(div(load(rows, at + i), divisor)))
    for i in range(whole, start + group):
        weight = splat(rows[row, i] if i < end else np.float32(0.0))
        store_byte(values, out + i - start, reduce_max(rint(div(weight, divisor))))
    scales[row, g] = scale + reduce_add(not_finite)


@operation
def quantize_all(run: Pass, thread: int, values: Codes3, scales: Floats2, rows: Floats2, group: int) -> None:
    """Every group of rows (rows, n); see `quantize_group`."""
    first, last = share(rows.shape[0], run.part, run.n_parts)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            quantize_group(values, scales, rows, row, g, group)


def quantize_rows(rows: Float32, group: int) -> Grouped:
    """Rows (rows, n) in groups of so many; zeros fill up a row's last one."""
    shape = len(rows), ceil_div(rows.shape[1], group)
    values, scales = np.empty((*shape, group), np.int8), np.empty(shape, np.float32)
    on_all_threads(quantize_all(values, scales, np.ascontiguousarray(rows), group))
    return Grouped(values, scales)


@operation
def fill_words(run: Pass, thread: int, words: Words4, first: int, stride: int, codes: Words3, scales: Words2) -> None:
    """Codes (rows, groups, quads), 4 to a word, and scales (rows, groups) into every stride-th of strips of words."""
    rows, n_groups, n_quads = codes.shape
    begin, end = share(ceil_div(rows, STRIP_ROWS), run.part, run.n_parts)
    for strip in range(begin, end):
        out = words[first + stride * strip]
        for g in range(n_groups):
            for r in range(STRIP_ROWS):
                row = strip * STRIP_ROWS + r
                out[g, 0, r] = scales[row, g] if row < rows else 0
                for q in range(n_quads):
                    out[g, 1 + q, r] = (codes[row, g, q] if row < rows else 0) ^ ZEROS_OF_CODES


def fill(strips: Float32, first: int, stride: int, rows: Floats | Grouped, group: int) -> None:
    """`Kind.fill`: what pads rows and groups weighs nothing."""
    grouped = rows if isinstance(rows, Grouped) else quantize_rows(floats(rows), group)
    n_quads = strips.shape[2] // STRIP_ROWS - 1
    words = strips.view(np.uint32).reshape(len(strips), -1, 1 + n_quads, STRIP_ROWS)
    values = np.pad(grouped.values, ((0, 0), (0, 0), (0, -group % QUADS))) if group % QUADS else grouped.values
    codes, scales = (np.ascontiguousarray(array).view(np.uint32) for array in (values, grouped.scales))
    on_all_threads(fill_words(words, first, stride, codes, scales))


def rows_of(strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`: value * scale."""
    strips = strips[block]
    n_groups, n_quads = strips.shape[1], strips.shape[2] // STRIP_ROWS - 1
    words = strips.reshape(-1, n_groups, 1 + n_quads, STRIP_ROWS)
    codes = np.ascontiguousarray(words[:, :, 1:].transpose(0, 3, 1, 2)).view(np.uint8).reshape(-1, n_groups, n_quads * QUADS)
    values = (codes[:, :, :group].astype(np.float32) - 128) * words[:, :, 0].transpose(0, 2, 1).reshape(-1, n_groups, 1)
    return np.ascontiguousarray(values.reshape(-1, n_groups * group)[:, :n])


def own_group(n: int, file_group: int) -> int:
    """`Kind.group`: 64, or 32 where 64 does not divide n; of a file, whose groups may cross rows, each cut at the rows' ends."""
    if file_group:
        return math.gcd(file_group, n)
    return 64 if n % 64 == 0 else 32


def strip_shape(n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`."""
    return ceil_div(n, group), (1 + ceil_div(group, QUADS)) * STRIP_ROWS


def scratch_words(n: int, group: int) -> int:
    """`Kind.scratch_words`."""
    return int(ceil_div(n, group) * (GROUP_HEAD + ceil_div(group, QUADS)))


PORTABLE_INT8 = Kind("int8", portable_product, embed, portable_experts, own_group, strip_shape, fill, rows_of, scratch_words)
NATIVE_INT8 = replace(PORTABLE_INT8, product=product, experts=experts)
INT8 = PORTABLE_INT8 if DOT4 == "portable" else NATIVE_INT8
