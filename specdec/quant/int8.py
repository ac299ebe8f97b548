"""int8 weights and activations in groups that share a scale: exact integer sums per group, and one chain of float sums.

Symmetric as in llama2.c's export.py: scale = max |w| / 127 over a group of consecutive weights, w is about value * scale.

A panel is (groups, words). A group of columns holds the scales of the R rows, then words, the rows innermost: a word holds a
row's weights of 4 columns as the bytes w + 128. Activations (T, words) hold for each group its scale, the correction -128 * sum
of codes for weights that are stored as w + 128, the sum of scale * codes, and the codes, 4 to a word.
"""

import math
import os
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from specdec.quant.matmul_kernels import make_embed_kernel, make_matmul_kernels
from specdec.quant.packed_matrix import ALL_PANELS, Floats, Int8Rows, WeightFormat, to_float32
from specdec.runtime.code_cache import compiled, inlined, jitable
from specdec.runtime.matmul_tile import (  # fmt: skip
    LINE_WORDS,
    MAX_TILE_TOKENS,
    PANEL_ROWS,
    REGISTER_LANES,
    RowBlock,
    TileArgs,
    TileLimits,
    TileShape,
    choose_tile_shape,
    const,
    load_accumulators,
    make_tile,
    prefetch,
)
from specdec.runtime.op_program import Codes3, Floats2, ForwardContext, Words2, Words3, Words4, kernel, run_on_all_threads
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
    call_llvm_intrinsic,
    ceil_div,
    div,
    fma,
    load,
    load_byte,
    make_constant_vector,
    maximum,
    minimum,
    multiply_add,
    offset_pointer,
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
from specdec.runtime.work_stealing import get_chunk_range

BYTES_PER_WORD = 4
ZERO_CODES_WORD = np.uint32(0x80808080)  # four weights of 0 as stored
MIN_SCALE = np.finfo(np.float32).tiny  # a smaller scale has so few bits that a code may reach 190, which wraps around
MINUS_128_MASK = -0x7F7F7F80  # xor with it turns four bytes w into w - 128
INT16X8, INT16X16 = ir.VectorType(I16, 8), ir.VectorType(I16, 16)
# Tokens of an AVX2 tile: 8 rows for each token; up to 2 tokens take all rows of a panel, in memory order.
AVX2_MAX_TOKENS, AVX2_MAX_FULL_PANEL_TOKENS = 8, 2
NEON_MAX_TOKENS = 4  # tokens of a NEON tile: 8 rows for 3 or 4, 16 for 2, all rows of a panel for 1
GROUP_HEADER_WORDS = 3  # words before a group's activation codes: its scale, its correction and its sum


def choose_dot4(features: str) -> str:
    """Return the name of the instruction set for sums of byte products on a CPU with the given LLVM features.

    It is "avx512vnni", "avxvnni" or "sdot", which have an instruction that adds 4 products, else "avx2", "neon" or "portable".
    """
    required = {"avx512vnni": "+avx512vnni", "avxvnni": "+avxvnni", "avx2": "+avx2", "sdot": "+dotprod", "neon": "+neon"}
    return next((name for name, feature in required.items() if feature in features.split(",")), "portable")


class Dot4:
    """A generator of LLVM code that adds the 4 byte products w times x of each lane to an int32 sum, exactly.

    w is unsigned, x is signed and at least -127. A tile's sums are created by `start_sum`, updated by `accumulate`, and turned
    back into int32 by `finish_sum`. This class is the portable version.

    Attributes:
        name: Name of the instruction set.
        lanes: int32 lanes of its vectors.
        is_signed: Whether it takes w - 128 instead of w.
        max_tokens: Maximum number of tokens of a tile.
    """

    name, lanes, is_signed, max_tokens = "portable", REGISTER_LANES, False, MAX_TILE_TOKENS

    def choose_tile_shape(self, rows: int, n_tokens: int) -> TileShape:
        """Return the shape of a tile over panels of `rows` rows for n_tokens tokens."""
        return choose_tile_shape(rows, n_tokens, self.lanes, is_weight_stationary=True)

    def prepare_weights(self, builder: Any, w: Any) -> Any:
        """Emit the weights w in the form that `accumulate` takes, made once for all tokens."""
        return self.cast_to_bytes(builder, builder.xor(w, make_constant_vector(w.type, MINUS_128_MASK))) if self.is_signed else w

    def cast_to_bytes(self, builder: Any, words: Any) -> Any:
        """Emit the bytes of a vector's 32-bit words as a vector of int8."""
        return builder.bitcast(words, ir.VectorType(I8, BYTES_PER_WORD * self.lanes))

    def start_sum(self, builder: Any, first: Any) -> Any:
        """Return a new sum that starts from the int32 vector `first`, in the form that `accumulate` takes."""
        return first

    def accumulate(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the sum acc plus the products of w and x, multiplied as int16.

        Bytes 0 and 2 of each lane come first, then 1 and 3, like x86's pmaddwd.
        """
        shorts = ir.VectorType(I16, 2 * acc.type.count)
        eight = make_constant_vector(shorts, 8)
        w, x = builder.bitcast(w, shorts), builder.bitcast(x, shorts)
        for w_half, x_half in (
            (builder.and_(w, make_constant_vector(shorts, 255)), builder.ashr(builder.shl(x, eight), eight)),
            (builder.lshr(w, eight), builder.ashr(x, eight)),
        ):
            for odd in (0, 1):
                lanes = list(range(odd, shorts.count, 2))
                a, b = (builder.sext(shuffle(builder, v, lanes), acc.type) for v in (w_half, x_half))
                acc = builder.add(acc, builder.mul(a, b))
        return acc

    def finish_sum(self, builder: Any, acc: Any) -> Any:
        """Emit a sum of `accumulate` as an int32 vector."""
        return acc

    def multiply_add(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the int32 vector acc plus the products of one word of weights and of activations per lane."""
        return self.finish_sum(
            builder, self.accumulate(builder, self.start_sum(builder, acc), self.prepare_weights(builder, w), x)
        )


class Vnni(Dot4):
    """`Dot4` with vpdpbusd of AVX-512 VNNI or AVX-VNNI."""

    def __init__(self, name: str, lanes: int) -> None:
        """Create it for an instruction set, "avx512vnni" or "avxvnni", and vectors of `lanes` lanes."""
        self.name, self.lanes = name, lanes

    def accumulate(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the sum acc plus the 4 products of each lane of w and x, with one instruction."""
        return call_llvm_intrinsic(builder, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", acc.type, acc, w, x)


class Sdot(Dot4):
    """`Dot4` with sdot of ARM's dot product extension."""

    name, lanes, is_signed = "sdot", 4, True

    def accumulate(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the sum acc plus the 4 products of each lane of w and x, with one instruction."""
        return call_llvm_intrinsic(
            builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, w, self.cast_to_bytes(builder, x)
        )


class Int16Dot4(Dot4, ABC):
    """`Dot4` with sums of two products in 16 bits, which are then added to 32-bit sums.

    Two products with w - 128 are the most that fit: 2 * 128 * 127 = 32512.
    """

    is_signed = True

    @abstractmethod
    def multiply_pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """Emit shorts (None: 0) plus the 16-bit sums of two products each of w and x."""

    @abstractmethod
    def widen_sums(self, builder: Any, acc: Any, shorts: Any) -> Any:
        """Emit the int32 sums acc plus the 16-bit sums in shorts."""

    def accumulate(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the sum acc plus the products of w and x, which are first added in pairs to 16-bit sums."""
        return self.widen_sums(builder, acc, self.multiply_pairs(builder, None, w, x))


class LowBitDot4(Int16Dot4):
    """An `Int16Dot4` for weights below 2^bits, which adds as many sums of two products in 16 bits as fit before it widens them.

    8 fit for 4 bits, 4 for 5 and 2 for 6.
    """

    is_signed = False

    def __init__(self, bits: int) -> None:
        """Create the code generator for weight codes of `bits` bits, which limit how many products 16 bits can sum."""
        self.max_sums = (2**15 - 1) // (2 * (2**bits - 1) * 127)

    def prepare_weights(self, builder: Any, w: Any) -> Any:
        """Emit the weights w as bytes."""
        return self.cast_to_bytes(builder, w)

    def start_sum(self, builder: Any, first: Any) -> Any:
        """Return a new sum from the int32 vector `first`: int32 sums, 16-bit sums, and how many products those hold."""
        return first, None, 0

    def accumulate(self, builder: Any, acc: Any, w: Any, x: Any) -> Any:
        """Emit the sum acc plus the products of w and x, added to the 16-bit sums, which are widened first if they are full."""
        wide, shorts, n = acc
        if n == self.max_sums:
            wide, shorts, n = self.finish_sum(builder, acc), None, 0
        return wide, self.multiply_pairs(builder, shorts, w, x), n + 1

    def finish_sum(self, builder: Any, acc: Any) -> Any:
        """Emit a sum as int32: the int32 sums with the 16-bit sums added."""
        wide, shorts, _ = acc
        return self.widen_sums(builder, wide, shorts)


class Avx2(Int16Dot4):
    """`Int16Dot4` with AVX2: |w - 128| times x with the sign of w - 128."""

    name, lanes, max_tokens = "avx2", 8, AVX2_MAX_TOKENS

    def choose_tile_shape(self, rows: int, n_tokens: int) -> TileShape:
        """Return the shape of a tile over panels of `rows` rows for n_tokens tokens."""
        return TileShape(8, rows // 8 if n_tokens <= AVX2_MAX_FULL_PANEL_TOKENS else 1, n_tokens)

    def prepare_weights(self, builder: Any, w: Any) -> Any:
        """Emit |w - 128| and w - 128 as bytes, and return both."""
        w = super().prepare_weights(builder, w)
        return call_llvm_intrinsic(builder, "llvm.abs.v32i8", w.type, w, ir.IntType(1)(0)), w

    def multiply_pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """Emit shorts plus the sums of two products each: |w - 128| times x with the sign of w - 128."""
        magnitude, w = w
        x = call_llvm_intrinsic(builder, "llvm.x86.avx2.psign.b", w.type, builder.bitcast(x, w.type), w)
        return _multiply_byte_pairs(builder, shorts, magnitude, x)

    def widen_sums(self, builder: Any, acc: Any, shorts: Any) -> Any:
        """Emit the int32 sums acc plus pairs of the 16-bit sums, by pmaddwd."""
        pairs = call_llvm_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", acc.type, shorts, make_constant_vector(INT16X16, 1))
        return builder.add(acc, pairs)


def _multiply_byte_pairs(builder: Any, shorts: Any, w: Any, x: Any) -> Any:
    pairs = call_llvm_intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", INT16X16, w, x)
    return pairs if shorts is None else builder.add(shorts, pairs)


class LowBitAvx2(LowBitDot4, Avx2):
    """`LowBitDot4` with the instructions of `Avx2`."""

    def multiply_pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """Emit shorts plus the 16-bit sums of two products each of w and x; codes are not negative, so w needs no sign."""
        return _multiply_byte_pairs(builder, shorts, w, self.cast_to_bytes(builder, x))


class Neon(Int16Dot4):
    """`Int16Dot4` with NEON: products of the bytes of two lanes, then of the other two.

    Its tiles have few sums, since the products take registers, too.
    """

    name, lanes, max_tokens = "neon", 4, NEON_MAX_TOKENS

    def choose_tile_shape(self, rows: int, n_tokens: int) -> TileShape:
        """Return the shape of a tile over panels of `rows` rows for n_tokens tokens."""
        return TileShape(4, rows // 4 // n_tokens, n_tokens)

    def multiply_pairs(self, builder: Any, shorts: Any, w: Any, x: Any) -> Any:
        """Emit shorts plus the 16-bit products of w and x, in two vectors, by smull; `widen_sums` forms the pairs."""
        x, products = self.cast_to_bytes(builder, x), []
        for lanes in (list(range(8)), list(range(8, 16))):
            factors = (shuffle(builder, v, lanes) for v in (w, x))
            products.append(call_llvm_intrinsic(builder, "llvm.aarch64.neon.smull.v8i16", INT16X8, *factors))
        return products if shorts is None else [builder.add(*sums) for sums in zip(shorts, products, strict=True)]

    def widen_sums(self, builder: Any, acc: Any, shorts: Any) -> Any:
        """Emit the int32 sums acc plus the 16-bit products in shorts.

        addp adds pairs of them in 16 bits, sadalp pairs of the results in 32 bits.
        """
        pairs = call_llvm_intrinsic(builder, "llvm.aarch64.neon.addp.v8i16", INT16X8, *shorts)
        return builder.add(acc, call_llvm_intrinsic(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs))


class LowBitNeon(LowBitDot4, Neon):
    """`LowBitDot4` with the instructions of `Neon`."""


DOT4_BY_NAME = {dot.name: dot for dot in (Dot4(), Vnni("avx512vnni", 16), Vnni("avxvnni", 8), Sdot(), Avx2(), Neon())}
LOW_BIT_DOT4_BY_NAME: dict[str, type[LowBitDot4]] = {"avx2": LowBitAvx2, "neon": LowBitNeon}


def get_dot4(instruction_set: str, bits: int = 8) -> Dot4:
    """Return the `Dot4` for an instruction set of `choose_dot4` and codes of `bits` bits."""
    return (
        LOW_BIT_DOT4_BY_NAME[instruction_set](bits)
        if bits < 8 and instruction_set in LOW_BIT_DOT4_BY_NAME
        else DOT4_BY_NAME[instruction_set]
    )


def _make_int8_tile_body(dot: Dot4) -> Any:
    """Return a function that emits the body of a tile over int8 weights: n groups of format_arg words.

    The integer sums of a group are exact, so their order is free; its float sum enters its row's chain in order.
    """

    def emit(builder: Any, shape: TileShape, row_block: RowBlock, tile: TileArgs) -> None:
        lanes, n_vectors, n_tokens = shape
        integers, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
        out_pointers, initial_sums = load_accumulators(builder, shape, row_block, tile)
        totals = [cgutils.alloca_once_value(builder, initial) for initial in initial_sums]
        sums = [cgutils.alloca_once(builder, integers) for _ in out_pointers]
        w, group_rows = builder.gep(tile.w, [row_block.first_row]), builder.add(tile.format_arg, const(1))
        group_words = builder.mul(group_rows, const(PANEL_ROWS))
        prefetch_at, prefetch_stride = row_block.split_prefetch(
            builder, tile.prefetch_at, tile.prefetch_stride, builder.mul(tile.n, group_rows)
        )
        x_group_words = builder.add(tile.format_arg, const(GROUP_HEADER_WORDS))

        def load_words(pointer: Any, v: int, vector_type: Any) -> Any:
            return builder.load(offset_pointer(builder, pointer, const(lanes * v), vector_type), align=4 * lanes)

        with cgutils.for_range(builder, tile.n) as groups:
            weights = builder.gep(w, [builder.mul(groups.index, group_words)])
            group_prefetch = builder.gep(prefetch_at, [builder.mul(builder.mul(groups.index, group_rows), prefetch_stride)])
            x_start = builder.mul(groups.index, x_group_words)
            rows = [builder.gep(tile.x, [builder.add(builder.mul(tile.x_stride, const(t)), x_start)]) for t in range(n_tokens)]
            for i, total in enumerate(sums):
                first_sum = make_constant_vector(integers, 0)
                if not dot.is_signed:
                    correction = offset_pointer(builder, rows[i // n_vectors], const(1), I32)
                    first_sum = broadcast(builder, builder.load(correction), integers)
                builder.store(first_sum, total)
            with cgutils.for_range(builder, tile.format_arg) as words:
                row = builder.add(words.index, const(1))
                prefetch_line = builder.mul(row, prefetch_stride)
                row_words = builder.gep(weights, [builder.mul(row, const(PANEL_ROWS))])
                row_weights = []
                for v in range(n_vectors):
                    row_weights.append(dot.prepare_weights(builder, load_words(row_words, v, integers)))
                    if v * lanes % LINE_WORDS == 0:
                        prefetch(builder, group_prefetch, builder.add(prefetch_line, const(v * lanes * BYTES_PER_WORD)))
                for t in range(n_tokens):
                    x_offset = builder.add(words.index, const(GROUP_HEADER_WORDS))
                    x_word = broadcast(builder, builder.load(offset_pointer(builder, rows[t], x_offset, I32)), integers)
                    for v in range(n_vectors):
                        total = sums[t * n_vectors + v]
                        builder.store(dot.accumulate(builder, builder.load(total), row_weights[v], x_word), total)
            scales = [load_words(weights, v, floats) for v in range(n_vectors)]
            for i, total in enumerate(totals):
                t, v = divmod(i, n_vectors)
                scale = builder.fmul(scales[v], broadcast(builder, builder.load(rows[t]), floats))
                group_sum = builder.sitofp(builder.load(sums[i]), floats)
                builder.store(multiply_add(builder, group_sum, scale, builder.load(total)), total)
        for pointer, total in zip(out_pointers, totals, strict=True):
            builder.store(builder.load(total), pointer, align=4)

    return emit


def make_dot4_tile(instruction_set: str) -> tuple[Any, TileLimits]:
    """Return the intrinsic and the `TileLimits` of a tile over int8 weights, for an instruction set of `choose_dot4`."""
    dot = get_dot4(instruction_set)
    return make_tile(f"int8_tile_{instruction_set}", _make_int8_tile_body(dot), dot.choose_tile_shape, dot.max_tokens)


DOT4_NAME = "portable" if os.environ.get("SPECDEC_PORTABLE", "") not in ("", "0") else choose_dot4(CPU_FEATURES)


@compiled
def quantize_activations(codes, x, n, group_size, n_tokens):
    """Quantize rows x[t, :n] to int8 in codes (the rule of runq.c): code = round(x / scale), scale = max |x| / 127 of a group.

    Halves round away from 0. codes (T, words) holds for each group its scale, the correction -128 * sum of codes for weights that
    are stored as w + 128, the sum of scale * codes, and the codes, 4 to a word, zeros after the last. A group that is not finite
    has a NaN scale.
    """
    group_words = ceil_div(group_size, BYTES_PER_WORD)
    lowest, limit = splat(-127.0), splat(127.0)
    for t in range(n_tokens):
        row, words = t * x.shape[1], t * codes.shape[1]
        # All scales first: each step waits for the one before, and two loops wait less than one.
        for g in range(ceil_div(n, group_size)):
            start, end = g * group_size, min((g + 1) * group_size, n)
            whole = start + (end - start) // LANES * LANES
            top = splat(0.0)
            for i in range(start, whole, LANES):
                top = maximum(absolute(load(x, row + i)), top)
            for i in range(whole, end):
                top = maximum(absolute(splat(x[t, i])), top)
            codes[t, g * (GROUP_HEADER_WORDS + group_words)] = reduce_max(top) / np.float32(127.0)
        for g in range(ceil_div(n, group_size)):
            start, end = g * group_size, min((g + 1) * group_size, n)
            whole = start + (end - start) // LANES * LANES
            at = g * (GROUP_HEADER_WORDS + group_words)
            scale, first = codes[t, at], (words + at + GROUP_HEADER_WORDS) * BYTES_PER_WORD
            divisor = splat(scale if scale > 0.0 else np.float32(1.0))
            total = splat(0.0)
            for i in range(start, whole, LANES):
                code = round_half_away(div(load(x, row + i), divisor))
                code = maximum(lowest, minimum(limit, code))  # in this order a NaN stays one
                total = add(total, code)
                store_bytes(codes, first + i - start, code)
            group_total = reduce_add(total)
            for i in range(whole, start + group_words * BYTES_PER_WORD):
                code = splat(x[t, i] if i < end else np.float32(0.0))
                code = reduce_max(maximum(lowest, minimum(limit, round_half_away(div(code, divisor)))))
                group_total += code
                store_byte(codes, first + i - start, code)
            codes[t, at] = scale + np.float32(0.0) * group_total
            store_int(codes, (words + at + 1) * BYTES_PER_WORD, np.float32(-128.0) * group_total)
            codes[t, at + 2] = codes[t, at] * group_total


@inlined
def get_quantized_activations(run, thread, p, n_tokens):
    """Return this thread's activations x quantized to int8, as a tile over groups takes them, and the weight words per group.

    Quantizes x into the thread's scratch in its first chunk of the phase.
    """
    codes = p.scratch[thread]
    if run.is_first_chunk:
        quantize_activations(codes, p.x[thread if p.x.shape[0] > 1 else 0], p.n, p.group_size, n_tokens)
    return codes, p.w.shape[2] // PANEL_ROWS - 1


@inlined
def get_weight(w, panel, row, k, n, group_size):
    """Return the weight of a panel's row in column k as float32: code * scale."""
    i_group, i = divmod(k, group_size)
    word = (panel * w.shape[1] + i_group) * w.shape[2] + (1 + i // BYTES_PER_WORD) * PANEL_ROWS + row
    code = load_byte(w, word * BYTES_PER_WORD + i % BYTES_PER_WORD) - 128
    return np.float32(code) * w[panel, i_group, row]


matmul, expert_matmul = make_matmul_kernels(__name__, "", *make_dot4_tile(choose_dot4(CPU_FEATURES)), get_quantized_activations)
portable_matmul, portable_expert_matmul = make_matmul_kernels(
    __name__, "portable_", *make_dot4_tile("portable"), get_quantized_activations
)
embed = make_embed_kernel(__name__, "", get_weight)


@jitable
def quantize_group(values, scales, rows, row, g, group_size):
    """Quantize group g of one row of rows (rows, n) to int8, into values (rows, groups, group size) and scales (rows, groups).

    Zeros fill up the last group. The scale is NaN if a weight is not finite, and 0 if it would be below MIN_SCALE.
    """
    n = rows.shape[1]
    at, out = row * n, (row * scales.shape[1] + g) * group_size
    start, end = g * group_size, min((g + 1) * group_size, n)
    whole = start + (end - start) // LANES * LANES
    top, not_finite = splat(0.0), splat(0.0)
    for i in range(start, whole, LANES):
        weights = load(rows, at + i)
        top, not_finite = maximum(absolute(weights), top), fma(weights, splat(0.0), not_finite)
    for i in range(whole, end):
        weights = splat(rows[row, i])
        top, not_finite = maximum(absolute(weights), top), fma(weights, splat(0.0), not_finite)
    scale = np.float32(reduce_max(top) / np.float32(127.0))
    if scale < MIN_SCALE:
        scale = np.float32(0.0)
    divisor = splat(scale if scale > 0.0 else np.float32(1.0))
    for i in range(start, whole, LANES):
        store_bytes(values, out + i - start, rint(div(load(rows, at + i), divisor)))
    for i in range(whole, start + group_size):
        weight = splat(rows[row, i] if i < end else np.float32(0.0))
        store_byte(values, out + i - start, reduce_max(rint(div(weight, divisor))))
    scales[row, g] = scale + reduce_add(not_finite)


@kernel
def quantize_all_groups(
    run: ForwardContext, thread: int, values: Codes3, scales: Floats2, rows: Floats2, group_size: int
) -> None:
    """Quantize every group of rows (rows, n) to int8, filling values and scales; see `quantize_group`."""
    first, last = get_chunk_range(rows.shape[0], run.chunk, run.n_chunks)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            quantize_group(values, scales, rows, row, g, group_size)


def quantize_rows(rows: Float32, group_size: int) -> Int8Rows:
    """Return float32 rows (rows, n) quantized to int8 in groups of group_size; zeros fill up a row's last group."""
    shape = len(rows), ceil_div(rows.shape[1], group_size)
    values, scales = np.empty((*shape, group_size), np.int8), np.empty(shape, np.float32)
    run_on_all_threads(quantize_all_groups(values, scales, np.ascontiguousarray(rows), group_size))
    return Int8Rows(values, scales)


@kernel
def pack_words(run: ForwardContext, thread: int, words: Words4, first: int, stride: int, codes: Words3, scales: Words2) -> None:
    """Pack codes (rows, groups, words), 4 to a word, and scales (rows, groups) into every stride-th panel of words."""
    rows, n_groups, n_words = codes.shape
    begin, end = get_chunk_range(ceil_div(rows, PANEL_ROWS), run.chunk, run.n_chunks)
    for i in range(begin, end):
        out = words[first + stride * i]
        for g in range(n_groups):
            for r in range(PANEL_ROWS):
                row = i * PANEL_ROWS + r
                out[g, 0, r] = scales[row, g] if row < rows else 0
                for q in range(n_words):
                    out[g, 1 + q, r] = (codes[row, g, q] if row < rows else 0) ^ ZERO_CODES_WORD


def pack(panels: Float32, first: int, stride: int, rows: Floats | Int8Rows, group_size: int) -> None:
    """Pack rows, quantized to int8 if they are floats, into panels; implements `WeightFormat.pack`.

    The weights that pad rows and groups are 0.
    """
    grouped = rows if isinstance(rows, Int8Rows) else quantize_rows(to_float32(rows), group_size)
    n_words = panels.shape[2] // PANEL_ROWS - 1
    words = panels.view(np.uint32).reshape(len(panels), -1, 1 + n_words, PANEL_ROWS)
    values = (
        np.pad(grouped.values, ((0, 0), (0, 0), (0, -group_size % BYTES_PER_WORD)))
        if group_size % BYTES_PER_WORD
        else grouped.values
    )
    codes, scales = (np.ascontiguousarray(array).view(np.uint32) for array in (values, grouped.scales))
    run_on_all_threads(pack_words(words, first, stride, codes, scales))


def unpack(panels: Float32, n: int, group_size: int, block: slice = ALL_PANELS) -> Float32:
    """Return the rows of int8 panels as float32: (byte - 128) * scale; implements `WeightFormat.unpack`.

    Args:
        panels: The panels (P, groups, words).
        n: Columns of the matrix, without the padding of the last group.
        group_size: Columns per group.
        block: The panels to unpack.

    Returns:
        The rows (P R, n) of these panels, including the rows that pad the last panel.
    """
    panels = panels[block]
    n_groups, n_words = panels.shape[1], panels.shape[2] // PANEL_ROWS - 1
    words = panels.reshape(-1, n_groups, 1 + n_words, PANEL_ROWS)
    codes = (
        np.ascontiguousarray(words[:, :, 1:].transpose(0, 3, 1, 2)).view(np.uint8).reshape(-1, n_groups, n_words * BYTES_PER_WORD)
    )
    values = (codes[:, :, :group_size].astype(np.float32) - 128) * words[:, :, 0].transpose(0, 2, 1).reshape(-1, n_groups, 1)
    return np.ascontiguousarray(values.reshape(-1, n_groups * group_size)[:, :n])


def get_group_size(n: int, file_group: int) -> int:
    """Return the group size of int8 weights for n columns; implements `WeightFormat.get_group_size`.

    It is 64, or 32 if 64 does not divide n. For a file with groups, it is the greatest common divisor of n and the file's group
    size, so that no group crosses the end of a row.
    """
    if file_group:
        return math.gcd(file_group, n)
    return 64 if n % 64 == 0 else 32


def get_panel_shape(n: int, group_size: int) -> tuple[int, int]:
    """Return the groups and words of a panel of int8 weights; implements `WeightFormat.get_panel_shape`."""
    return ceil_div(n, group_size), (1 + ceil_div(group_size, BYTES_PER_WORD)) * PANEL_ROWS


def get_scratch_words(n: int, group_size: int) -> int:
    """Return the words of a token's n activations in int8 groups; implements `WeightFormat.get_scratch_words`."""
    return int(ceil_div(n, group_size) * (GROUP_HEADER_WORDS + ceil_div(group_size, BYTES_PER_WORD)))


PORTABLE_INT8 = WeightFormat(
    "int8", portable_matmul, embed, portable_expert_matmul, get_group_size, get_panel_shape, pack, unpack, get_scratch_words
)
NATIVE_INT8 = replace(PORTABLE_INT8, matmul=matmul, expert_matmul=expert_matmul)
INT8 = PORTABLE_INT8 if DOT4_NAME == "portable" else NATIVE_INT8
