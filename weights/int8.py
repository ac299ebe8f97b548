"""int8 weights and activations: groups that share a scale, their sums exact, their floats one chain.

Symmetric as llama2.c's export.py has it: scale = max |w| / 127 over a group of consecutive weights, w about value * scale.

A strip is (groups, words): for each group of columns the R rows' scales, then quads of columns, the rows of each innermost, a
row's 4 weights as the bytes w + 128 of one word. Activations (T, words) are for each group its scale, the correction -128 * sum
of codes for weights that are stored as w + 128, and the codes, 4 to a word.
"""

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from ..machine.cache import inlined, inner
from ..machine.programs import Codes3, Floats2, Floats3, Ints1, Pass, Words2, Words3, Words4, on_all_threads, operation
from ..machine.threads import share
from ..machine.tiles import STRIP_ROWS, cells, const, make_tile, multiply_strips, prefetch
from ..machine.vectors import (
    CPU_FEATURES,
    I32,
    INTEGERS,
    LANES,
    VECTOR,
    Float32,
    absolute,
    add,
    broadcast,
    ceil_div,
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
)  # fmt: skip
from .matrix import Floats, Grouped, Kind, floats

Int8 = npt.NDArray[np.int8]
QUADS = 4  # bytes in a word
ZEROS_OF_CODES = np.uint32(0x80808080)  # four weights of 0 as they are stored
SMALLEST_SCALE = np.finfo(np.float32).tiny  # below, it has so few bits that a weight might be 190 of them, which wraps around
GROUP_HEAD = 2  # words in front of a group of activations: its scale and its correction


def best_dot4(features: str) -> str:
    """The instruction for sums of 4 products of bytes that a CPU of those LLVM features has, or "portable"."""
    known = {"avx512vnni": "+avx512vnni", "avxvnni": "+avxvnni", "sdot": "+dotprod"}
    return next((name for name, feature in known.items() if feature in features.split(",")), "portable")


def _pieces(builder: Any, lanes: int, emit: Any, *vectors: Any) -> Any:
    """emit(builder, *pieces) over pieces of so many lanes of vectors of LANES integers, joined again."""
    parts = [emit(builder, *(shuffle(builder, v, list(range(i, i + lanes))) for v in vectors)) for i in range(0, LANES, lanes)]
    while len(parts) > 1:
        lanes *= 2
        joined = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        parts = [builder.shuffle_vector(a, b, joined) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _dot4_portable(builder: Any, acc: Any, w: Any, x: Any) -> Any:
    """Bytes 0 and 2, then 1 and 3 of each lane, as two products of int16 pairs: what x86 calls pmaddwd."""
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    eight = ir.Constant(shorts, [8] * (2 * LANES))
    w, x = builder.bitcast(w, shorts), builder.bitcast(x, shorts)
    for w_half, x_half in (
        (builder.and_(w, ir.Constant(shorts, [255] * (2 * LANES))), builder.ashr(builder.shl(x, eight), eight)),
        (builder.lshr(w, eight), builder.ashr(x, eight)),
    ):
        for odd in (0, 1):
            lanes = list(range(odd, 2 * LANES, 2))
            a, b = (builder.sext(shuffle(builder, v, lanes), INTEGERS) for v in (w_half, x_half))
            acc = builder.add(acc, builder.mul(a, b))
    return acc


def dot4(path: str) -> Any:
    """(builder, acc, w, x) -> acc + the 4 products of bytes of each lane: LANES int32 each, w unsigned, x signed, exact."""

    def by_name(name: str) -> Any:
        return lambda builder, acc, w, x: llvm(builder, name, acc.type, acc, w, x)

    def sdot(builder: Any, acc: Any, w: Any, x: Any) -> Any:
        # signed by signed: w - 128; the tile leaves out the correction for the 128
        bytes_type = ir.VectorType(ir.IntType(8), 16)
        w = builder.xor(w, ir.Constant(w.type, [-0x7F7F7F80] * 4))
        args = [acc, builder.bitcast(w, bytes_type), builder.bitcast(x, bytes_type)]
        return llvm(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, *args)

    if path == "avx512vnni":
        return by_name("llvm.x86.avx512.vpdpbusd.512")
    if path == "avxvnni":
        return lambda builder, *args: _pieces(builder, 8, by_name("llvm.x86.avx512.vpdpbusd.256"), *args)
    if path == "sdot":
        return lambda builder, *args: _pieces(builder, 4, sdot, *args)
    return _dot4_portable


def _int8_body(path: str) -> Any:
    """The body of a tile over int8 weights, n groups of n_quads.

    The integer sums of a group are exact, so their order is free; a group's float enters its row's chain at its place.
    """
    multiply_bytes = dot4(path)

    def emit(
        builder: Any, n_vectors: int, n_tokens: int,
        out: Any, out_stride: Any, w: Any, ahead: Any, ahead_stride: Any, x: Any, x_stride: Any,
        n: Any, n_quads: Any, accumulate: Any,
    ) -> None:  # fmt: skip
        places, starts = cells(builder, out, out_stride, accumulate, n_vectors, n_tokens)
        totals = [cgutils.alloca_once_value(builder, start) for start in starts]
        sums = [cgutils.alloca_once(builder, INTEGERS) for _ in places]
        strip_words = n_vectors * LANES
        group_words = builder.mul(builder.add(n_quads, const(1)), const(strip_words))
        x_group_words = builder.add(n_quads, const(GROUP_HEAD))
        with cgutils.for_range(builder, n) as groups:
            weights = builder.gep(w, [builder.mul(groups.index, group_words)])
            first = builder.mul(builder.mul(groups.index, builder.add(n_quads, const(1))), ahead_stride)
            fetched = builder.gep(ahead, [first])
            start = builder.mul(groups.index, x_group_words)
            rows = [builder.gep(x, [builder.add(builder.mul(x_stride, const(t)), start)]) for t in range(n_tokens)]
            for i, total in enumerate(sums):
                correction = builder.load(offset(builder, rows[i // n_vectors], const(1), I32))
                begin = ir.Constant(INTEGERS, [0] * LANES) if path == "sdot" else broadcast(builder, correction, INTEGERS)
                builder.store(begin, total)
            with cgutils.for_range(builder, n_quads) as quads:
                row = builder.add(quads.index, const(1))
                at, next_at = builder.mul(row, const(strip_words)), builder.mul(row, ahead_stride)
                loaded = []
                for v in range(n_vectors):
                    place = builder.add(at, const(LANES * v))
                    loaded.append(builder.load(offset(builder, weights, place, INTEGERS), align=64))
                    prefetch(builder, fetched, builder.add(next_at, const(LANES * v)))
                for t in range(n_tokens):
                    quad = builder.load(offset(builder, rows[t], builder.add(quads.index, const(GROUP_HEAD)), I32))
                    for v in range(n_vectors):
                        total = sums[t * n_vectors + v]
                        new = multiply_bytes(builder, builder.load(total), loaded[v], broadcast(builder, quad, INTEGERS))
                        builder.store(new, total)
            scales = [builder.load(offset(builder, weights, const(LANES * v), VECTOR), align=64) for v in range(n_vectors)]
            for i, total in enumerate(totals):
                t, v = divmod(i, n_vectors)
                scale = builder.fmul(scales[v], broadcast(builder, builder.load(rows[t]), VECTOR))
                number = builder.sitofp(builder.load(sums[i]), VECTOR)
                builder.store(multiply_add(builder, number, scale, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)
        builder.ret_void()

    return emit


def dot4_tile(path: str) -> Any:
    """The tile of the products by that instruction."""
    return make_tile(f"int8_tile_{path}", _int8_body(path), STRIP_ROWS // LANES)


DOT4 = "portable" if os.environ.get("SPECDEC_PORTABLE", "") not in ("", "0") else best_dot4(CPU_FEATURES)
native_tile = dot4_tile(best_dot4(CPU_FEATURES))
portable_tile = dot4_tile("portable")


@inner
def quantize(codes, x, n, group, n_tokens):
    """Rows x[t, :n] as int8 (runq.c's rule): codes = round(x / scale), scale = max |x| / 127 of a group, halves away from 0.

    codes (T, words) holds for each group its scale, the correction -128 * sum of codes for weights that are stored as w + 128,
    and the codes, 4 to a word, zeros after the last. A group that is not finite has NaN for its scale.
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


@inlined
def multiply(tile, run, thread, out, w, x, scratch, n, group, adding, unit, of_logits):
    """out[t] (+)= W x[t]: this thread's strips, x quantized first; see `Matrix.product`."""
    first, last = share(w.shape[0] // unit, thread, run.n_threads)
    n_tokens = run.n_logits if of_logits else run.n_tokens
    codes, n_quads = scratch[thread], w.shape[2] // STRIP_ROWS - 1
    quantize(codes, x[thread if x.shape[0] > 1 else 0], n, group, n_tokens)
    multiply_strips(
        tile, out, out.shape[1], w, codes, scratch.shape[2], w.shape[1], n_quads, n_tokens, unit * first, unit * last, adding
    )  # fmt: skip


@operation
def product(
    run: Pass, thread: int, out: Floats2, w: Floats3, x: Floats3, scratch: Floats3,
    n: int, group: int, adding: int, unit: int, of_logits: int,
) -> None:  # fmt: skip
    """`multiply` with the CPU's best instruction."""
    multiply(native_tile, run, thread, out, w, x, scratch, n, group, adding, unit, of_logits)


@operation
def portable_product(
    run: Pass, thread: int, out: Floats2, w: Floats3, x: Floats3, scratch: Floats3,
    n: int, group: int, adding: int, unit: int, of_logits: int,
) -> None:  # fmt: skip
    """`multiply` for any CPU: the same bits."""
    multiply(portable_tile, run, thread, out, w, x, scratch, n, group, adding, unit, of_logits)


@operation
def embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
    """out[t] = W[tokens[t]]: this thread's columns; see `Matrix.embedding`."""
    first, last = share(n, thread, run.n_threads)
    for t in range(run.n_tokens):
        strip, row = divmod(tokens[t], STRIP_ROWS)
        out[t, n:] = 0.0  # what an earlier pass left there may be NaN
        for k in range(first, last):
            place, i = divmod(k, group)
            word = (strip * w.shape[1] + place) * w.shape[2] + (1 + i // QUADS) * STRIP_ROWS + row
            code = load_byte(w, word * QUADS + i % QUADS) - 128
            out[t, k] = np.float32(code) * w[strip, place, row]


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
    first, last = share(rows.shape[0], thread, run.n_threads)
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
    begin, end = share(ceil_div(rows, STRIP_ROWS), thread, run.n_threads)
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


def rows_of(strips: Float32, n: int, group: int) -> Float32:
    """`Kind.rows`: value * scale."""
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


PORTABLE_INT8 = Kind("int8", portable_product, embed, own_group, strip_shape, fill, rows_of, scratch_words)
NATIVE_INT8 = replace(PORTABLE_INT8, product=product)
INT8 = PORTABLE_INT8 if DOT4 == "portable" else NATIVE_INT8
