"""The arithmetic: a llama2 forward pass over T tokens on CPU threads, and the sampling that reads its logits.

Knows nothing of files, text or terminals.

Two promises hold by construction, and the tests compare bits:

- Batch and thread invariance: the logits at a position depend on the tokens up to it and on nothing else. Every dot product
  is one chain of fused multiply-adds in ascending k for its own (row, token), whatever the tile, T or the thread count.
- A token is a pure function of (logits, sampling parameters, seed, position): noise is computed, never consumed.

Shapes: T tokens in this call, S cached positions, D dim, F hidden_dim, L n_layers, H query heads, G kv heads, K head_dim,
V vocab_size, R rows of a panel. `pos` is the position of the first token of a forward. p is the target's probability, q the
draft's (Leviathan et al. 2023, arXiv:2211.17192).
"""

import ctypes
import functools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_jitable, register_model
from numba.np.arrayobj import populate_array

from .checks import ids, whole
from .machine.cache import callback, compiled, inlined, parallel

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

LANES = 16  # floats of a vector, on every machine alike for the sake of the bits; LLVM splits it where registers are shorter
PANEL_ROWS = 2 * LANES  # divides 288, 512, 768, 1376, 2048 and 32000, so the known models carry no padding
MAX_TOKENS = 64  # tokens of one pass; longer prompts go in blocks
RMS_EPS = np.float32(1e-5)

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # what the cached machine code is keyed by
# Accumulators of a tile are PANEL_ROWS x TILE_TOKENS floats and have to stay in registers: 16 of 32 with AVX-512, else 12 of 16.
TILE_TOKENS = 8 if "+avx512f" in _FEATURES else 3
UNROLL = 2  # of k in a tile's loop: with one prefetch for both, 8 tokens of fp32 from DRAM 40 GB/s, else 33 (Zen 5)


def best_dot4(features: str) -> str:
    """The instruction for sums of 4 products of bytes that a CPU of those LLVM features has, or "portable"."""
    known = {"avx512vnni": "+avx512vnni", "avxvnni": "+avxvnni", "sdot": "+dotprod"}
    return next((name for name, feature in known.items() if feature in features.split(",")), "portable")


DOT4 = best_dot4(_FEATURES)
FORCE_PORTABLE = os.environ.get("SPECDEC_PORTABLE", "") not in ("", "0")
QUADS = 4  # bytes in a word
GROUP_HEAD = 2  # words in front of a group of activations: its scale, and the correction for unsigned weights
# Of 4096, 8192 and 16384 the best on Zen 5: 15M int8 from L3, 8 tokens 0.53 ms, else 0.61 and 0.56.
PREFETCH_BYTES = 8192
# A barrier spins for about 0.15 ms, then sleeps in turns: a thread that wakes up is scheduled at once, one that spins or yields
# on a busy machine waits for its time slice. Two busy loops beside stories3M + 260K: 3300 tok/s, sched_yield 11 to 76.
SPINS = 200_000
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # likewise between regions, before libgomp starts: 2200 tok/s, else 75
FIRST_POSITIONS = 256  # that a model has room for before its text grows
ROLL_CALL_SLEEPS = 2_000  # of a microsecond or more each, before a thread is given up
FOREVER = -1  # sleeps of a barrier


@register_jitable
def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return (n + d - 1) // d


@register_jitable
def round_up(n: int, multiple: int) -> int:
    """n, or the next multiple above it."""
    return int(ceil_div(n, multiple)) * multiple


# --------------------------------------------------------------------------------------------------------------------
# Intrinsics: vectors of LANES floats, the tile, and what a barrier needs
# --------------------------------------------------------------------------------------------------------------------

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_vec = ir.VectorType(_f32, LANES)
_ivec = ir.VectorType(_i32, LANES)


class VectorType(types.Type):
    """numba's name for `<16 x float>`."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _vec)


def _llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call the LLVM intrinsic of that name."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _vector_op(arity: int, emit: Any) -> Any:
    """An intrinsic from `arity` vectors to one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    if arity == 1:
        return intrinsic(lambda typingctx, a: (vector(vector), codegen))
    if arity == 2:
        return intrinsic(lambda typingctx, a, b: (vector(vector, vector), codegen))
    return intrinsic(lambda typingctx, a, b, c: (vector(vector, vector, vector), codegen))


def _shuffle(builder: Any, a: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_i32, len(lanes)), lanes)
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined), mask)


def _reduce(combine: Any) -> Any:
    """An intrinsic from a vector to a scalar, halves combined pairwise: one fixed order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (v,) = args
        n = LANES
        while n > 1:
            n //= 2
            v = combine(builder, _shuffle(builder, v, list(range(n))), _shuffle(builder, v, list(range(n, 2 * n))))
        return builder.extract_element(v, ir.Constant(_i32, 0))

    return intrinsic(lambda typingctx, a: (types.float32(vector), codegen))


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2_of_integer(builder: Any, a: Any) -> Any:
    """2^a for integral a in [-126, 127]: the exponent field of a float."""
    biased = builder.add(builder.fptosi(a, _ivec), ir.Constant(_ivec, [127] * LANES))
    return builder.bitcast(builder.shl(biased, ir.Constant(_ivec, [23] * LANES)), _vec)


add = _vector_op(2, lambda b, x, y: b.fadd(x, y))
mul = _vector_op(2, lambda b, x, y: b.fmul(x, y))
div = _vector_op(2, lambda b, x, y: b.fdiv(x, y))
maximum = _vector_op(2, _maximum)
minimum = _vector_op(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = _vector_op(3, lambda b, x, y, z: _llvm(b, "llvm.fma.v16f32", _vec, x, y, z))
absolute = _vector_op(1, lambda b, x: _llvm(b, "llvm.fabs.v16f32", _vec, x))
round_half_away = _vector_op(1, lambda b, x: _llvm(b, "llvm.round.v16f32", _vec, x))
rint = _vector_op(1, lambda b, x: _llvm(b, "llvm.rint.v16f32", _vec, x))
exp2_of_integer = _vector_op(1, _exp2_of_integer)
zero_unless_positive = _vector_op(  # x where y > 0 or y is NaN
    2, lambda b, x, y: b.select(b.fcmp_unordered(">", y, ir.Constant(_vec, [0.0] * LANES)), x, ir.Constant(_vec, [0.0] * LANES))
)
swap_pairs = _vector_op(1, lambda b, x: _shuffle(b, x, [i ^ 1 for i in range(LANES)]))
reduce_add = _reduce(lambda b, x, y: b.fadd(x, y))
reduce_max = _reduce(_maximum)


def _broadcast(builder: Any, scalar: Any, vector_type: Any) -> Any:
    lane0 = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_i32, 0))
    return _shuffle(builder, lane0, [0] * LANES)


@intrinsic
def splat(typingctx, a):
    """A vector whose lanes all hold the scalar a."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scalar = context.cast(builder, args[0], signature.args[0], types.float32)
        return _broadcast(builder, scalar, _vec)

    return vector(a), codegen


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """LANES floats of a C-contiguous float32 array, from a flat index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_element_pointer(context, builder, signature.args[0], args[0], args[1], _vec), align=4)

    return vector(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Write LANES floats to a C-contiguous float32 array, at a flat index."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1], _vec)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


def _byte_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    start = _element_pointer(context, builder, array_type, array, ir.Constant(_i64, 0), ir.IntType(8))
    return builder.gep(start, [index])


def _store_as(convert: Any) -> Any:
    """An intrinsic (array, index, value): value, converted, to a float32 array's memory at an index in bytes."""

    @intrinsic
    def store_as(typingctx, array, index, value):
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            converted = convert(builder, args[2])
            pointer = _byte_pointer(context, builder, signature.args[0], args[0], args[1])
            builder.store(converted, builder.bitcast(pointer, converted.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, value), codegen

    return store_as


_bytes = ir.VectorType(ir.IntType(8), LANES)
store_bytes = _store_as(lambda b, v: b.trunc(b.fptosi(v, _ivec), _bytes))  # a vector of integral floats
store_byte = _store_as(lambda b, v: b.fptosi(v, ir.IntType(8)))  # an integral float32
store_int = _store_as(lambda b, v: b.fptosi(v, _i32))  # likewise


@intrinsic
def load_byte(typingctx, array, index):
    """The unsigned byte of a float32 array's memory at an index in bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(_byte_pointer(context, builder, signature.args[0], *args)), _i64)

    return types.int64(array, types.intp), codegen


def _offset(builder: Any, pointer: Any, n_floats: Any, pointee: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [n_floats]), pointee.as_pointer())


def _pieces(builder: Any, lanes: int, emit: Any, *vectors: Any) -> Any:
    """emit(builder, *pieces) over pieces of so many lanes of vectors of LANES integers, joined again."""
    parts = [emit(builder, *(_shuffle(builder, v, list(range(i, i + lanes))) for v in vectors)) for i in range(0, LANES, lanes)]
    while len(parts) > 1:
        lanes *= 2
        joined = ir.Constant(ir.VectorType(_i32, lanes), list(range(lanes)))
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
            a, b = (builder.sext(_shuffle(builder, v, lanes), _ivec) for v in (w_half, x_half))
            acc = builder.add(acc, builder.mul(a, b))
    return acc


def _dot4(path: str) -> Any:
    """(builder, acc, w, x) -> acc + the 4 products of bytes of each lane: LANES int32 each, w unsigned, x signed, exact."""

    def by_name(name: str) -> Any:
        return lambda builder, acc, w, x: _llvm(builder, name, acc.type, acc, w, x)

    def sdot(builder: Any, acc: Any, w: Any, x: Any) -> Any:
        # signed by signed: w - 128; the tile leaves out the correction for the 128
        bytes_type = ir.VectorType(ir.IntType(8), 16)
        w = builder.xor(w, ir.Constant(w.type, [-0x7F7F7F80] * 4))
        args = [acc, builder.bitcast(w, bytes_type), builder.bitcast(x, bytes_type)]
        return _llvm(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, *args)

    if path == "avx512vnni":
        return by_name("llvm.x86.avx512.vpdpbusd.512")
    if path == "avxvnni":
        return lambda builder, *args: _pieces(builder, 8, by_name("llvm.x86.avx512.vpdpbusd.256"), *args)
    if path == "sdot":
        return lambda builder, *args: _pieces(builder, 4, sdot, *args)
    return _dot4_portable


def _prefetch(builder: Any, weights: Any, word: Any) -> None:
    """Fetch what lies PREFETCH_BYTES behind that word."""
    ahead = _offset(builder, weights, builder.add(word, ir.Constant(_i64, PREFETCH_BYTES // 4)), ir.IntType(8))
    read, keep, data = (ir.Constant(_i32, c) for c in (0, 3, 1))
    _llvm(builder, "llvm.prefetch.p0", ir.VoidType(), ahead, read, keep, data)


def _const(value: int) -> Any:
    return ir.Constant(_i64, value)


def _tile_function(module: Any, name: str, emit: Any, n_vectors: int, n_tokens: int) -> Any:
    """The LLVM function of one tile shape, n_vectors * LANES rows x n_tokens, whose body emit writes.

    Its arguments: out, out_stride, w, x, x_stride, n, n_quads, accumulate.
    """
    name = f"specdec_{name}_{n_vectors}x{n_tokens}"
    if name in module.globals:
        return module.globals[name]
    words = _f32.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [words, _i64, words, words, _i64, _i64, _i64, ir.IntType(1)])
    fn = ir.Function(module, signature, name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    emit(ir.IRBuilder(fn.append_basic_block("entry")), n_vectors, n_tokens, *fn.args)
    return fn


def _cells(
    builder: Any, out: Any, out_stride: Any, accumulate: Any, n_vectors: int, n_tokens: int
) -> tuple[list[Any], list[Any]]:
    """Where a tile's vectors of out lie, those of a token side by side, and what each starts from."""
    places = [
        _offset(builder, out, builder.add(builder.mul(out_stride, _const(t)), _const(LANES * v)), _vec)
        for t in range(n_tokens)
        for v in range(n_vectors)
    ]
    zero = ir.Constant(_vec, [0.0] * LANES)
    return places, [builder.select(accumulate, builder.load(place, align=4), zero) for place in places]


def _int8_body(path: str) -> Any:
    """The body of a tile over int8 weights, n groups of n_quads.

    The integer sums of a group are exact, so their order is free; a group's float enters its row's chain at its place.
    """
    dot4 = _dot4(path)

    def emit(
        builder: Any, n_vectors: int, n_tokens: int,
        out: Any, out_stride: Any, w: Any, x: Any, x_stride: Any, n: Any, n_quads: Any, accumulate: Any,
    ) -> None:  # fmt: skip
        places, starts = _cells(builder, out, out_stride, accumulate, n_vectors, n_tokens)
        totals = [cgutils.alloca_once_value(builder, start) for start in starts]
        sums = [cgutils.alloca_once(builder, _ivec) for _ in places]
        panel_words = n_vectors * LANES
        group_words = builder.mul(builder.add(n_quads, _const(1)), _const(panel_words))
        x_group_words = builder.add(n_quads, _const(GROUP_HEAD))
        with cgutils.for_range(builder, n) as groups:
            weights = builder.gep(w, [builder.mul(groups.index, group_words)])
            start = builder.mul(groups.index, x_group_words)
            rows = [builder.gep(x, [builder.add(builder.mul(x_stride, _const(t)), start)]) for t in range(n_tokens)]
            for i, total in enumerate(sums):
                correction = builder.load(_offset(builder, rows[i // n_vectors], _const(1), _i32))
                first = ir.Constant(_ivec, [0] * LANES) if path == "sdot" else _broadcast(builder, correction, _ivec)
                builder.store(first, total)
            with cgutils.for_range(builder, n_quads) as quads:
                at = builder.mul(builder.add(quads.index, _const(1)), _const(panel_words))
                loaded = []
                for v in range(n_vectors):
                    place = builder.add(at, _const(LANES * v))
                    loaded.append(builder.load(_offset(builder, weights, place, _ivec), align=64))
                    _prefetch(builder, weights, place)
                for t in range(n_tokens):
                    quad = builder.load(_offset(builder, rows[t], builder.add(quads.index, _const(GROUP_HEAD)), _i32))
                    for v in range(n_vectors):
                        total = sums[t * n_vectors + v]
                        new = dot4(builder, builder.load(total), loaded[v], _broadcast(builder, quad, _ivec))
                        builder.store(new, total)
            scales = [builder.load(_offset(builder, weights, _const(LANES * v), _vec), align=64) for v in range(n_vectors)]
            for i, total in enumerate(totals):
                t, v = divmod(i, n_vectors)
                scale = builder.fmul(scales[v], _broadcast(builder, builder.load(rows[t]), _vec))
                number = builder.sitofp(builder.load(sums[i]), _vec)
                builder.store(_llvm(builder, "llvm.fma.v16f32", _vec, number, scale, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)
        builder.ret_void()

    return emit


def _fp32_body(
    builder: Any, n_vectors: int, n_tokens: int,
    out: Any, out_stride: Any, w: Any, x: Any, x_stride: Any, n: Any, n_quads: Any, accumulate: Any,
) -> None:  # fmt: skip
    """The body of a tile over fp32 weights, all accumulators in registers."""
    entry = builder.block
    pairs, odd, last, done = (builder.append_basic_block(block) for block in ("pairs", "odd", "last", "done"))
    places, start = _cells(builder, out, out_stride, accumulate, n_vectors, n_tokens)
    rows = [builder.gep(x, [builder.mul(x_stride, _const(t))]) for t in range(n_tokens)]
    whole = builder.and_(n, _const(-UNROLL))
    builder.cbranch(builder.icmp_signed(">", whole, _const(0)), pairs, odd)

    def step(k: Any, acc: list[Any]) -> list[Any]:
        panel = builder.mul(k, _const(LANES * n_vectors))
        weights = [
            builder.load(_offset(builder, w, builder.add(panel, _const(LANES * v)), _vec), align=64) for v in range(n_vectors)
        ]
        for v in range(n_vectors):
            _prefetch(builder, w, builder.add(panel, _const(LANES * v)))
        result = []
        for t in range(n_tokens):
            broadcast = _broadcast(builder, builder.load(builder.gep(rows[t], [k])), _vec)
            for v in range(n_vectors):
                result.append(_llvm(builder, "llvm.fma.v16f32", _vec, weights[v], broadcast, acc[t * n_vectors + v]))
        return result

    def phis(*sources: tuple[list[Any], Any]) -> list[Any]:
        merged = []
        for i in range(len(places)):
            phi = builder.phi(_vec)
            for values, block in sources:
                phi.add_incoming(values[i], block)
            merged.append(phi)
        return merged

    builder.position_at_end(pairs)
    k = builder.phi(_i64)
    k.add_incoming(_const(0), entry)
    acc = phis((start, entry))
    new = acc
    for u in range(UNROLL):
        new = step(builder.add(k, _const(u)), new)
    k_next = builder.add(k, _const(UNROLL))
    k.add_incoming(k_next, pairs)
    for phi, value in zip(acc, new, strict=True):
        phi.add_incoming(value, pairs)
    builder.cbranch(builder.icmp_signed("<", k_next, whole), pairs, odd)

    builder.position_at_end(odd)
    so_far = phis((start, entry), (new, pairs))
    builder.cbranch(builder.icmp_signed("<", whole, n), last, done)

    builder.position_at_end(last)
    final = step(whole, so_far)
    builder.branch(done)

    builder.position_at_end(done)
    for place, value in zip(places, phis((so_far, odd), (final, last)), strict=True):
        builder.store(value, place, align=4)
    builder.ret_void()


def _switch_tokens(builder: Any, n_tokens: Any, function_of: Any, call_args: list[Any]) -> None:
    """Call the tile function that function_of gives for that many tokens, 1 to TILE_TOKENS."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(n_tokens, end)
    for t in range(1, TILE_TOKENS + 1):
        block = builder.append_basic_block(f"tile.{t}")
        switch.add_case(ir.Constant(_i64, t), block)
        builder.position_at_end(block)
        builder.call(function_of(t), call_args)
        builder.branch(end)
    builder.position_at_end(end)


def _tile(name: str, emit: Any, n_vectors: int) -> Any:
    """A tile over panels of n_vectors * LANES rows, for 1 to TILE_TOKENS tokens; indexes and strides are flat, in words.

    fp32: out[t, r] (+)= sum_k w[k, r] x[t, k] for k < n, ascending, fused; n_quads is of no meaning. int8, n groups of n_quads:
    out[t, r] (+)= sum over groups of (sum_k w[r, k] x[t, k]) times both scales; see `Weights` and `quantize` for the layouts.
    """

    @intrinsic
    def tile(typingctx, out, out_index, out_stride, w, w_index, x, x_index, x_stride, n, n_quads, n_tokens, accumulate):
        index = types.intp
        signature = types.void(
            out, index, index, w, index, x, index, index, index, index, index, types.boolean
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, out_index, out_stride, w, w_index, x, x_index, x_stride, n, n_quads, n_tokens, accumulate = args
            pointers = [
                _element_pointer(context, builder, signature.args[i], array, at, _f32)
                for i, array, at in ((0, out, out_index), (3, w, w_index), (5, x, x_index))
            ]
            call_args = [pointers[0], out_stride, pointers[1], pointers[2], x_stride, n, n_quads, accumulate]
            _switch_tokens(builder, n_tokens, lambda t: _tile_function(builder.module, name, emit, n_vectors, t), call_args)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _int8_tile(path: str) -> Any:
    return _tile(f"int8_tile_{path}", _int8_body(path), PANEL_ROWS // LANES)


weights_tile = _tile("tile", _fp32_body, PANEL_ROWS // LANES)
cache_tile = _tile("tile", _fp32_body, 1)
int8_tile = _int8_tile(DOT4)
portable_int8_tile = _int8_tile("portable")


@intrinsic
def atomic_add(typingctx, array, value):
    """array[0] += value, seen by every thread in one order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], ir.Constant(_i64, 0), _i64)
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(array, types.int64), codegen


@intrinsic
def atomic_load(typingctx, array):
    """array[0], with everything that was written before it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], ir.Constant(_i64, 0), _i64)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array), codegen


_sleep: Any = getattr(ctypes, "windll").kernel32.Sleep if sys.platform == "win32" else ctypes.CDLL(None).usleep  # noqa: B009
llvmlite.binding.add_symbol("specdec_sleep", ctypes.cast(_sleep, ctypes.c_void_p).value)
sleep = types.ExternalFunction("specdec_sleep", types.int32(types.uint32))  # the shortest there is, for 1


# --------------------------------------------------------------------------------------------------------------------
# The forward pass: small kernels, the phases made of them, and one parallel region around the phases
# --------------------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """A model's tensors, matrices as panels of R = PANEL_ROWS output rows (P panels).

    A panel of fp32 weights is (k, R), rows innermost. A panel of int8 weights is (groups, words): for each group of k the R
    rows' scales, then quads of k, the rows of each innermost, a row's 4 weights as the bytes w + 128 of one word.
    """

    embedding: Float32  # (P, D, R) over V rows; the same array as wcls where the classifier is shared
    rms_att: Float32  # (L, D padded to whole panels)
    wqkv: Float32  # (L, P, D, R): the rows of wq, wk, wv, each padded to whole panels
    wo: Float32  # (L, P, D, R)
    rms_ffn: Float32  # (L, D padded)
    w13: Float32  # (L, P, D, R): panels of w1 and w3 in turn
    w2: Float32  # (L, P, F, R)
    rms_final: Float32  # (D padded,)
    wcls: Float32  # (P, D, R)
    groups: Int64  # (2,): weights that share a scale along D, and along F; 0 for fp32

    @property
    def is_int8(self) -> bool:
        return bool(self.groups[0])

    def checked(self, config: "Config") -> "Weights":
        """These weights, in arrays that begin at cache lines. Raises ValueError where they are not of that config's shape."""
        dim, layers = config.dim, config.n_layers
        strips = {
            "embedding": (config.vocab_size,), "wqkv": (config.dim, config.kv_dim, config.kv_dim), "wo": (dim,),
            "w13": (config.hidden_dim, config.hidden_dim), "w2": (dim,), "wcls": (config.vocab_size,),
        }  # fmt: skip
        for name, parts in strips.items():
            array, n = getattr(self, name), config.hidden_dim if name == "w2" else dim
            group = int(self.groups[1 if name == "w2" else 0])
            inner = (ceil_div(n, group), (1 + ceil_div(group, QUADS)) * PANEL_ROWS) if group else (n, PANEL_ROWS)
            outer = (sum(ceil_div(rows, PANEL_ROWS) for rows in parts),)
            expected = (*outer, *inner) if name in ("embedding", "wcls") else (layers, *outer, *inner)
            if array.shape != expected or array.dtype != np.float32:
                raise ValueError(f"{name} has the shape {array.shape}; the config needs {expected}, packed")
        for name, expected in (("rms_att", (layers,)), ("rms_ffn", (layers,)), ("rms_final", ())):
            if getattr(self, name).shape != (*expected, round_up(dim, PANEL_ROWS)):
                raise ValueError(f"{name} has the shape {getattr(self, name).shape}; the config needs {(*expected, dim)}, packed")
        moved = {id(array): aligned(array) for array in self}
        return Weights(*(moved[id(array)] for array in self))

    @property
    def kind(self) -> str:
        return "int8" if self.is_int8 else "fp32"

    @property
    def n_bytes(self) -> int:
        """What all arrays take; a classifier that is the embedding counts once."""
        return sum({id(array): array.nbytes for array in self}.values())


class State(NamedTuple):
    """What a forward pass reads and writes: tokens, KV cache, activations of up to MAX_TOKENS tokens, a scratch a thread."""

    tokens: Int64  # (T,)
    arrivals: Int64  # (1,): how many times a thread has arrived at a barrier of this pass
    keys: Float32  # (L, G, S / LANES, K, LANES): panels of positions, as many as there is room for
    values: Float32  # (L, G, panels of K, S, LANES)
    rope_cos: Float32  # (S, K + LANES): entry j belongs to row j % K of a head
    rope_sin: Float32  # (S, K + LANES), negative for the first row of a pair
    x: Float32  # (T, D padded): the residual stream
    normed: Float32  # (threads, T, D padded)
    codes: Float32  # (threads, T, words): int8 activations, see `quantize`
    qkv: Float32  # (T, rows of wqkv)
    heads: Float32  # (T, D padded): what attention hands to wo
    scores: Float32  # (threads, TILE_TOKENS, S)
    mixed: Float32  # (threads, TILE_TOKENS, K padded): one head's weighted values
    gate: Float32  # (T, rows of w13)
    hidden: Float32  # (T, F padded)
    logits: Float32  # (T, V padded)


# A pass reaches its threads as the address of one int64 array, the plan: numbers first, then address and shape of each array
# of State and Weights. Handing 24 arrays to a parallel region instead costs 8 us a call and seconds of compilation.
FIRST, LAST, N_TOKENS, POS, N_LOGITS, WINDOW, DIM, HIDDEN_DIM, N_THREADS, MULTIPLIER, N_NUMBERS = range(11)
SLOT = 6  # an address and up to 5 dimensions
PLAN_SIZE = N_NUMBERS + SLOT * (len(State._fields) + len(Weights._fields))


def new_plan(state: State, weights: Weights) -> Int64:
    """The plan of a model, its numbers still zero."""
    arrays: list[npt.NDArray[Any]] = [*state, *weights]
    plan = np.zeros(PLAN_SIZE, np.int64)
    for i, array in enumerate(arrays):
        assert array.flags.c_contiguous  # the plan has no strides
        at = N_NUMBERS + SLOT * i
        plan[at] = array.ctypes.data
        plan[at + 1 : at + 1 + array.ndim] = array.shape
    return plan


def _unpacker(named_tuple: Any, first: int, arrays: tuple[tuple[Any, int], ...]) -> Any:
    """The intrinsic (plan) -> State or Weights: arrays (dtype, dimensions) from slot `first` on, as they lie in memory."""
    array_types = [types.Array(dtype, n_dims, "C") for dtype, n_dims in arrays]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def number(at: int) -> Any:
            pointer = _element_pointer(context, builder, signature.args[0], args[0], ir.Constant(_i64, at), _i64)
            return builder.load(pointer)

        values = []
        for i, kind in enumerate(array_types):
            at = N_NUMBERS + SLOT * (first + i)
            shape = [number(at + 1 + d) for d in range(kind.ndim)]
            item_bytes = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
            strides = [item_bytes]
            for size in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            array = context.make_array(kind)(context, builder)
            data = builder.inttoptr(number(at), array.data.type)
            populate_array(array, data, shape, strides, item_bytes, meminfo=None)
            values.append(array._getvalue())
        return context.make_tuple(builder, signature.return_type, values)

    return intrinsic(lambda typingctx, plan: (types.NamedTuple(array_types, named_tuple)(plan), codegen))


_f, _i = types.float32, types.int64
state_of = _unpacker(
    State, 0,
    ((_i, 1), (_i, 1), (_f, 5), (_f, 5), (_f, 2), (_f, 2), (_f, 2), (_f, 3), (_f, 3),
     (_f, 2), (_f, 2), (_f, 3), (_f, 3), (_f, 2), (_f, 2), (_f, 2)),
)  # fmt: skip
weights_of = _unpacker(
    Weights, len(State._fields), ((_f, 3), (_f, 2), (_f, 4), (_f, 4), (_f, 2), (_f, 4), (_f, 4), (_f, 1), (_f, 3), (_i, 1))
)


@compiled
def exp(x):
    """e^x of a vector, within 2 units in the last place; exactly 0 below -87, e^88 above 88; of NaN, NaN.

    x = n log 2 + r (Cody and Waite 1980), 2^n through the exponent field, e^r by its Taylor polynomial of degree 7.
    """
    clamped = minimum(splat(88.0), maximum(splat(-87.0), x))  # in this order a NaN stays one
    n = rint(mul(clamped, splat(1.4426950408889634)))
    r = fma(n, splat(-0.693145751953125), clamped)
    r = fma(n, splat(-1.4286068203094172e-06), r)
    p = fma(splat(1.0 / 5040.0), r, splat(1.0 / 720.0))
    p = fma(p, r, splat(1.0 / 120.0))
    p = fma(p, r, splat(1.0 / 24.0))
    p = fma(p, r, splat(1.0 / 6.0))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    return zero_unless_positive(mul(p, exp2_of_integer(n)), add(x, splat(87.0)))


@compiled
def rms_norm(out, x, weight, dim, n_tokens):
    """out[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps)  (Zhang and Sennrich 2019); rows are padded with zeros."""
    width = x.shape[1]
    for t in range(n_tokens):
        row = t * width
        squares = splat(0.0)
        for i in range(0, width, LANES):
            v = load(x, row + i)
            squares = fma(v, v, squares)
        total = reduce_add(squares)
        # where the squares overflow, the row is NaN: 1 / infinity would make zeros of it, and logits of those
        scale = splat(np.float32(1.0) / np.sqrt(total / np.float32(dim) + RMS_EPS) + np.float32(0.0) * total)
        for i in range(0, width, LANES):
            store(out, row + i, mul(load(weight, i), mul(load(x, row + i), scale)))


@compiled
def quantize(codes, x, n, group, n_tokens):
    """Rows x[t, :n] as int8 (runq.c's rule): codes = round(x / scale), scale = max |x| / 127 of a group, halves away from 0.

    codes (T, words) holds for each group its scale, the correction -128 * sum of codes for weights that are stored as w + 128,
    and the codes, 4 to a word, zeros after the last. A group that is not finite has NaN for its scale.
    """
    n_quads = ceil_div(group, QUADS)
    lowest, limit = splat(-127.0), splat(127.0)
    for t in range(n_tokens):
        at = t * codes.shape[1]
        for start in range(0, n, group):
            end = min(start + group, n)
            whole = start + (end - start) // LANES * LANES
            row = t * x.shape[1]
            top = splat(0.0)
            for i in range(start, whole, LANES):
                top = maximum(absolute(load(x, row + i)), top)
            for i in range(whole, end):
                top = maximum(absolute(splat(x[t, i])), top)
            scale = np.float32(reduce_max(top) / np.float32(127.0))
            divisor = splat(scale if scale > 0.0 else np.float32(1.0))
            total = splat(0.0)
            first = at + GROUP_HEAD
            for i in range(start, whole, LANES):
                code = round_half_away(div(load(x, row + i), divisor))
                code = maximum(lowest, minimum(limit, code))  # in this order a NaN stays one
                total = add(total, code)
                store_bytes(codes, first * QUADS + i - start, code)
            total_of_group = reduce_add(total)
            for i in range(whole, start + n_quads * QUADS):
                code = splat(x[t, i] if i < end else np.float32(0.0))
                code = reduce_max(maximum(lowest, minimum(limit, round_half_away(div(code, divisor)))))
                total_of_group += code
                store_byte(codes, first * QUADS + i - start, code)
            codes[t, at - t * codes.shape[1]] = scale + np.float32(0.0) * total_of_group
            store_int(codes, (at + 1) * QUADS, np.float32(-128.0) * total_of_group)
            at += GROUP_HEAD + n_quads


@intrinsic
def address(typingctx, array):
    """Where a float32 array lies."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, signature.args[0], args[0], ir.Constant(_i64, 0), _f32)
        return builder.ptrtoint(pointer, _i64)

    return types.int64(array), codegen


@intrinsic
def call(typingctx, function, args):
    """function(*args) for the address of a function of int64 numbers, addresses among them."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, values[1])
        signature = ir.FunctionType(ir.VoidType(), [_i64] * len(numbers))
        builder.call(builder.inttoptr(values[0], signature.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, args), codegen


@inlined
def share(n, part, n_parts):
    """The range of n units that is a part's, or a thread's."""
    return part * n // n_parts, (part + 1) * n // n_parts


@inlined
def multiply_panels(tile, out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate):
    """out[t] (+)= W x[t] for the rows of panels first to last: fp32 (n columns, n_quads 0) or int8 (n groups, x `quantize`d)."""
    out, w, x = carray(out, 1), carray(w, 1), carray(x, 1)
    n_parts = ceil_div(n_tokens, TILE_TOKENS)
    for panel in range(first, last):
        words = panel * n * (1 + n_quads) * PANEL_ROWS
        for part in range(n_parts):
            t, end = share(n_tokens, part, n_parts)
            at = t * out_stride + panel * PANEL_ROWS
            tile(out, at, out_stride, w, words, x, t * x_stride, x_stride, n, n_quads, end - t, accumulate != 0)


def multiply_fp32(out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate):
    """`multiply_panels` of fp32."""
    multiply_panels(weights_tile, out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate)


def multiply_int8(out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate):
    """`multiply_panels` of int8, with the CPU's best instruction."""
    multiply_panels(int8_tile, out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate)


def multiply_int8_portable(out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate):
    """`multiply_panels` of int8, for any CPU: the same bits."""
    multiply_panels(portable_int8_tile, out, out_stride, w, x, x_stride, n, n_quads, n_tokens, first, last, accumulate)


_words, _number = types.CPointer(types.float32), types.int64
PRODUCT = types.void(_words, _number, _words, _words, *[_number] * 7)  # the signature of a product


@functools.cache
def multiplier(int8: bool, portable: bool) -> int:
    """The compiled product for weights of a kind, reached by its address: a model compiles no other, and none of them twice."""
    function = (multiply_int8_portable if portable else multiply_int8) if int8 else multiply_fp32
    return callback(PRODUCT, function)


@compiled
def multiply(multiplier, out, w, x, n_tokens, first, last, accumulate):
    """out[t] (+)= W x[t] for the rows of panels first to last, by the address of the product for the kind of weights."""
    n_quads = w.shape[2] // PANEL_ROWS - 1
    call(multiplier, (
        address(out), out.shape[1], address(w), address(x), x.shape[1],
        w.shape[1], n_quads, n_tokens, first, last, accumulate,
    ))  # fmt: skip


@compiled
def ready(codes, x, n, group, n_tokens):
    """What weights are multiplied with: x (T, n) itself, or for int8 weights codes, which receive x quantized in groups."""
    if group > 0:
        quantize(codes, x, n, group, n_tokens)
        return codes
    return x


@compiled
def rope(x, base, first, last, cos, sin, head_dim, pos, n_tokens):
    """Rotate rows first to last of the heads that begin at row `base` of x (Su et al. 2021).

    The pair (2i, 2i + 1) of a head turns by pos / 10000^(2i/K): x * cos + swapped x * signed sin.
    """
    for t in range(n_tokens):
        for row in range(first, last, LANES):
            at = t * x.shape[1] + base + row
            angle = (pos + t) * cos.shape[1] + row % head_dim
            v = load(x, at)
            store(x, at, fma(swap_pairs(v), load(sin, angle), mul(v, load(cos, angle))))


@inlined
def store_keys(keys, x, base, first, last, pos, n_tokens):
    """Put rows first to last of the heads that begin at row `base` of x at pos.. of keys (G, S / LANES, K, LANES)."""
    head_dim = keys.shape[2]
    for t in range(n_tokens):
        panel, lane = divmod(pos + t, LANES)
        for head in range(first // head_dim, (last - 1) // head_dim + 1):
            row = head * head_dim
            for k in range(max(first - row, 0), min(last - row, head_dim)):
                keys[head, panel, k, lane] = x[t, base + row + k]


@inlined
def store_values(values, x, base, first, last, head_dim, pos, n_tokens):
    """Put rows first to last of the heads that begin at row `base` of x at pos.. of values (G, K / LANES, S, LANES)."""
    for t in range(n_tokens):
        for head in range(first // head_dim, (last - 1) // head_dim + 1):
            row = head * head_dim
            for k in range(max(first - row, 0), min(last - row, head_dim)):
                values[head, k // LANES, pos + t, k % LANES] = x[t, base + row + k]


@compiled
def softmax(scores, row, start, end, scale):
    """x = scores[row, start:end] becomes e^(scale (x - max x)) / sum; the rest of the vectors it touches becomes 0."""
    first = start // LANES * LANES
    last = (end + LANES - 1) // LANES * LANES
    for s in range(first, start):
        scores[row, s] = -np.inf
    for s in range(end, last):
        scores[row, s] = -np.inf
    base = row * scores.shape[1]
    top = splat(-np.inf)
    for s in range(first, last, LANES):
        top = maximum(load(scores, base + s), top)
    minus_top = splat(-reduce_max(top))
    total = splat(0.0)
    for s in range(first, last, LANES):
        e = exp(mul(splat(scale), add(load(scores, base + s), minus_top)))
        store(scores, base + s, e)
        total = add(total, e)
    inverse = splat(np.float32(1.0) / reduce_add(total))
    for s in range(first, last, LANES):
        store(scores, base + s, mul(load(scores, base + s), inverse))


@compiled
def mix_values(mixed, values, scores, token, n_tokens, start, end):
    """mixed[t] += sum_s scores[t, s] values[s] for start <= s < end: values (K / LANES, S, LANES), n_tokens from `token`."""
    if start >= end:
        return
    for panel in range(values.shape[0]):
        cache_tile(
            mixed, token * mixed.shape[1] + panel * LANES, mixed.shape[1],
            values, (panel * values.shape[1] + start) * LANES,
            scores, token * scores.shape[1] + start, scores.shape[1], end - start, 0, n_tokens, True,
        )  # fmt: skip


@compiled
def attend(heads, qkv, keys, values, scores, mixed, head, pos, first, last, window):
    """heads[t, head] = softmax(q[t] . keys / sqrt(K)) values for tokens first to last (Vaswani et al. 2017).

    keys (S / LANES, K, LANES) and values (K / LANES, S, LANES) are those of the head's group. Token t sees the last
    `window` positions up to its own, by loop bounds: the positions that all tokens see are mixed in one go, those before
    and after them token by token, so that each token's chain is the one that it would have alone.
    """
    head_dim = keys.shape[1]
    n_tokens = last - first
    oldest = max(0, pos + first + 1 - window)
    for panel in range(oldest // LANES, (pos + last - 1) // LANES + 1):
        cache_tile(
            scores, panel * LANES, scores.shape[1], keys, panel * head_dim * LANES,
            qkv, first * qkv.shape[1] + head * head_dim, qkv.shape[1], head_dim, 0, n_tokens, False,
        )  # fmt: skip
    common_start = max(0, pos + last - window)
    common_end = max(common_start, pos + first + 1)
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    mixed[:n_tokens] = 0.0
    for i in range(n_tokens):
        start, end = max(0, pos + first + i + 1 - window), pos + first + i + 1
        softmax(scores, i, start, end, scale)
        mix_values(mixed, values, scores, i, 1, start, min(common_start, end))
    mix_values(mixed, values, scores, 0, n_tokens, common_start, common_end)
    for i in range(n_tokens):
        start, end = max(0, pos + first + i + 1 - window), pos + first + i + 1
        mix_values(mixed, values, scores, i, 1, max(start, common_end), end)
        for k in range(head_dim):
            heads[first + i, head * head_dim + k] = mixed[i, k]


@compiled
def swiglu(hidden, gate, panel, n_tokens):
    """hidden[t] = silu(w1 x) * (w3 x) for one panel (Shazeer 2020); gate (T, 2 F) holds the panels of both in turn."""
    for t in range(n_tokens):
        for i in range(0, PANEL_ROWS, LANES):
            at = t * gate.shape[1] + 2 * panel * PANEL_ROWS + i
            a, b = load(gate, at), load(gate, at + PANEL_ROWS)
            sigmoid = div(splat(1.0), add(splat(1.0), exp(mul(a, splat(-1.0)))))
            store(hidden, t * hidden.shape[1] + panel * PANEL_ROWS + i, mul(mul(a, sigmoid), b))


@inlined
def embed(state, weights, n_tokens, dim, thread, n_threads):
    """x[t] = embedding[tokens[t]]: this thread's columns."""
    w, group = weights.embedding, weights.groups[0]
    first, last = share(dim, thread, n_threads)
    for t in range(n_tokens):
        panel, row = divmod(state.tokens[t], PANEL_ROWS)
        state.x[t, dim:] = 0.0  # what an earlier pass left there may be NaN
        for k in range(first, last):
            if group > 0:
                place, i = divmod(k, group)
                word = (panel * w.shape[1] + place) * w.shape[2] + (1 + i // QUADS) * PANEL_ROWS + row
                code = load_byte(w, word * QUADS + i % QUADS) - 128
                state.x[t, k] = np.float32(code) * w[panel, place, row]
            else:
                state.x[t, k] = w[panel, k, row]


@inlined
def project_qkv(plan, state, weights, layer, thread):
    """q, k, v = W rmsnorm(x); q and k turn by their position, k and v go into the cache: this thread's panels."""
    n_tokens, pos, dim, group = plan[N_TOKENS], plan[POS], plan[DIM], weights.groups[0]
    w = weights.wqkv[layer]
    keys, values = state.keys[layer], state.values[layer]
    head_dim = keys.shape[2]
    kv_rows = keys.shape[0] * head_dim
    first_k = round_up(dim, PANEL_ROWS)
    first_v = first_k + round_up(kv_rows, PANEL_ROWS)
    rms_norm(state.normed[thread], state.x, weights.rms_att[layer], dim, n_tokens)
    x = ready(state.codes[thread], state.normed[thread], dim, group, n_tokens)
    first, last = share(w.shape[0], thread, plan[N_THREADS])
    multiply(plan[MULTIPLIER], state.qkv, w, x, n_tokens, first, last, 0)
    for panel in range(first, last):
        row = panel * PANEL_ROWS
        if row < first_v:
            base = 0 if row < first_k else first_k
            rope(
                state.qkv, base, row - base, row - base + PANEL_ROWS,
                state.rope_cos, state.rope_sin, head_dim, pos, n_tokens,
            )  # fmt: skip
        if first_k <= row < first_v:
            end = min(row - first_k + PANEL_ROWS, kv_rows)
            store_keys(keys, state.qkv, first_k, row - first_k, end, pos, n_tokens)
        if row >= first_v:
            end = min(row - first_v + PANEL_ROWS, kv_rows)
            store_values(values, state.qkv, first_v, row - first_v, end, head_dim, pos, n_tokens)


@inlined
def attention(state, layer, pos, n_tokens, window, dim, thread, n_threads):
    """Every head over groups of up to TILE_TOKENS tokens: this thread's share of the pairs."""
    keys, values = state.keys[layer], state.values[layer]
    n_heads = dim // keys.shape[2]
    n_groups = ceil_div(n_tokens, TILE_TOKENS)
    first, last = share(n_heads * n_groups, thread, n_threads)
    for unit in range(first, last):
        head, group = divmod(unit, n_groups)
        first_token, last_token = share(n_tokens, group, n_groups)
        kv_head = head // (n_heads // keys.shape[0])
        attend(
            state.heads, state.qkv, keys[kv_head], values[kv_head], state.scores[thread], state.mixed[thread],
            head, pos, first_token, last_token, window,
        )  # fmt: skip


@inlined
def residual(plan, state, w, x, n, group, thread):
    """state.x += W x, x (T, n): the residual is where the chains of products start."""
    n_tokens = plan[N_TOKENS]
    first, last = share(w.shape[0], thread, plan[N_THREADS])
    multiply(plan[MULTIPLIER], state.x, w, ready(state.codes[thread], x, n, group, n_tokens), n_tokens, first, last, 1)


@inlined
def feed_forward(plan, state, weights, layer, thread):
    """hidden = silu(w1 rmsnorm(x)) * (w3 rmsnorm(x)): this thread's pairs of panels."""
    n_tokens, dim, group = plan[N_TOKENS], plan[DIM], weights.groups[0]
    w, normed = weights.w13[layer], state.normed[thread]
    rms_norm(normed, state.x, weights.rms_ffn[layer], dim, n_tokens)
    x = ready(state.codes[thread], normed, dim, group, n_tokens)
    first, last = share(w.shape[0] // 2, thread, plan[N_THREADS])
    for panel in range(first, last):
        multiply(plan[MULTIPLIER], state.gate, w, x, n_tokens, 2 * panel, 2 * panel + 2, 0)
        swiglu(state.hidden, state.gate, panel, n_tokens)


@inlined
def classify(plan, state, weights, thread):
    """logits = wcls rmsnorm(x) for the last n_logits tokens: this thread's panels."""
    n_logits, dim, group = plan[N_LOGITS], plan[DIM], weights.groups[0]
    x, normed = state.x[plan[N_TOKENS] - n_logits :], state.normed[thread]
    rms_norm(normed, x, weights.rms_final, dim, n_logits)
    x = ready(state.codes[thread], normed, dim, group, n_logits)
    first, last = share(weights.wcls.shape[0], thread, plan[N_THREADS])
    multiply(plan[MULTIPLIER], state.logits, weights.wcls, x, n_logits, first, last, 0)


@inlined
def run_phase(plan, state, weights, phase, thread):
    """One step of a forward pass, between two barriers: the embedding, five for each layer, the classifier."""
    n_tokens, dim, n_threads = plan[N_TOKENS], plan[DIM], plan[N_THREADS]
    layer, step = divmod(phase - 1, 5)
    if phase == 0:
        embed(state, weights, n_tokens, dim, thread, n_threads)
    elif layer == weights.wqkv.shape[0]:
        classify(plan, state, weights, thread)
    elif step == 0:
        project_qkv(plan, state, weights, layer, thread)
    elif step == 1:
        attention(state, layer, plan[POS], n_tokens, plan[WINDOW], dim, thread, n_threads)
    elif step == 2:
        residual(plan, state, weights.wo[layer], state.heads, dim, weights.groups[0], thread)
    elif step == 3:
        feed_forward(plan, state, weights, layer, thread)
    else:
        residual(plan, state, weights.w2[layer], state.hidden, plan[HIDDEN_DIM], weights.groups[1], thread)


@compiled
def wait_for(arrivals, n_arrivals, n_sleeps):
    """Arrive at a barrier and wait for n_arrivals threads, sleeping at most n_sleeps times; whether they came."""
    atomic_add(arrivals, 1)
    spins = 0
    while atomic_load(arrivals) < n_arrivals:
        spins += 1
        if spins > SPINS:
            sleep(1)
            if spins == SPINS + n_sleeps:
                return False
    return True


def run_phases(plan_pointer, thread):
    """Phases FIRST to LAST of the plan as one of its threads, a barrier between any two.

    With no phases, a roll call: a thread that meets all others before it loses patience adds N_THREADS to the arrivals.
    """
    plan = carray(plan_pointer, PLAN_SIZE)
    state, weights = state_of(plan), weights_of(plan)
    first, last, n_threads = plan[FIRST], plan[LAST], plan[N_THREADS]
    if first == last and wait_for(state.arrivals, n_threads, ROLL_CALL_SLEEPS):
        atomic_add(state.arrivals, n_threads)
    for phase in range(first, last):
        run_phase(plan, state, weights, phase, thread)
        if phase + 1 < last:
            wait_for(state.arrivals, (phase + 1 - first) * n_threads, FOREVER)


@functools.cache
def entry_point() -> int:
    """The address of `run_phases`, compiled once: numba would compile it again into each of a parallel region's wrappers."""
    signature = types.void(types.CPointer(types.int64), types.int64)
    return callback(signature, run_phases)


@parallel
def run_region(function, plan, n_threads):
    """function(plan, thread) on every thread: the one parallel region of a forward pass."""
    for i in prange(n_threads):
        call(function, (plan, np.int64(i)))


@compiled
def run_alone(function, plan):
    """function(plan, 0) on this thread, which needs no threading layer."""
    call(function, (plan, np.int64(0)))


_one_region_at_a_time = threading.Lock()  # two would fight for the cores, and without OpenMP numba aborts the process
_threads_are_gone = False  # in the child of a fork
_locks: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # whose, and the attribute's name


def give_lock(owner: Any, name: str) -> None:
    """owner.name becomes a lock, and another one in the child of a fork: who holds it there may be a thread that is gone."""
    setattr(owner, name, threading.RLock())
    _locks[owner] = name


def _after_fork() -> None:
    global _threads_are_gone, _one_region_at_a_time
    _threads_are_gone = _threads_have_run
    _one_region_at_a_time = threading.Lock()
    for owner, name in [*_locks.items()]:
        give_lock(owner, name)


_threads_have_run = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def on_threads(region: Any, *args: Any) -> None:
    """A parallel region, called with args, the last of them the number of threads. Raises RuntimeError in a forked process."""
    global _threads_have_run
    if _threads_are_gone:
        raise RuntimeError(
            "this process was forked from one that has run a model, and its threads are gone: "
            "start processes with multiprocessing.get_context('spawn')"
        )
    with _one_region_at_a_time:
        _threads_have_run = True
        numba.set_num_threads(args[-1])
        region(*args)


def run_on_threads(function: int, plan: int, n_threads: int) -> None:
    """function(plan, thread) on so many threads, this one among them."""
    if n_threads == 1:
        run_alone(function, plan)
    else:
        on_threads(run_region, function, plan, n_threads)


# --------------------------------------------------------------------------------------------------------------------
# Sampling: logits to probabilities to a token
# --------------------------------------------------------------------------------------------------------------------


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, SplitMix64's step


@compiled
def mix_bits(x):
    """The finalizer of SplitMix64 (Steele et al. 2014): 64 bits in, 64 well-mixed bits out."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def noise_key(seed, stream, position):
    """What the noise of one position's tokens is computed from."""
    key = mix_bits(np.uint64(seed) + GOLDEN * np.uint64(stream + 1))
    return mix_bits(key + GOLDEN * np.uint64(position + 1))


@compiled
def uniform(key, token):
    """A float64 in (0, 1) for (seed, stream, position) and token: computed, not drawn from a stream."""
    bits = mix_bits(key + GOLDEN * np.uint64(token + 1))
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@compiled
def rank_key(prob, token):
    """An integer that sorts tokens by falling probability, then by rising id."""
    bits = np.float32(prob).view(np.uint32)
    return (np.uint64(~bits & np.uint32(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(token)


@compiled
def rank_key_probability(key):
    """The probability that went into a `rank_key`."""
    return np.uint32(~(key >> np.uint64(32)) & np.uint64(0xFFFFFFFF)).view(np.float32)


@compiled
def partition(keys, first, last):
    """Move what is below a median of three to the front of keys[first:last]; returns the median's place and its sum in front.

    The sum is of the probabilities before that place.
    """
    a, b, c = keys[first], keys[(first + last) // 2], keys[last - 1]
    pivot = max(min(a, b), min(max(a, b), c))
    at = first if pivot == a else (last - 1 if pivot == c else (first + last) // 2)
    keys[at] = keys[last - 1]
    place, mass = first, 0.0
    for i in range(first, last - 1):
        key = keys[i]
        keys[i] = keys[place]
        keys[place] = key
        if key < pivot:
            place += 1
            mass += rank_key_probability(key)
    keys[last - 1] = keys[place]
    keys[place] = pivot
    return place, mass


@compiled
def last_kept(keys, n, top_k, top_p):
    """The key that ends the shortest prefix, in rank order, of top_k tokens or a mass above top_p: a weighted quickselect."""
    first, last, mass = np.int64(0), n, 0.0
    while first < last:
        place, in_front = partition(keys, first, last)
        if place >= top_k or mass + in_front > top_p:
            last = place
            continue
        mass += in_front + rank_key_probability(keys[place])
        if place + 1 >= top_k or mass > top_p:
            return keys[place]
        first = place + 1
    return np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def rank_keys(keys, probs, n, cutoff):
    """The `rank_key`s of the tokens whose probs[0, :n] reach the cutoff, in front of keys; how many there are."""
    m = np.int64(0)  # a literal 0 would have the callers' other functions compiled twice
    for token in range(n):
        if probs[0, token] >= cutoff:
            keys[m] = rank_key(probs[0, token], token)
            m += 1
    return m


@compiled
def probabilities(probs, logits, temperature, top_k, top_p, keys):
    """probs (1, V padded) from logits (V,): temperature, softmax, the top_k, of those the smallest set heavier than top_p.

    The mass that top_p speaks of is the softmax's. What is left is scaled to sum 1. Temperature 0 leaves the most likely
    token alone; top_k 0 and a top_p of 0 or 1 keep every token. `keys` is scratch of V uint64. All are NaN where a logit is, or
    where the largest is not finite.
    """
    n = logits.size
    if temperature == 0.0:
        best = np.argmax(logits)  # a NaN is the largest to numpy
        probs[0] = 0.0 if np.isfinite(logits[best]) else np.nan
        probs[0, best] += 1.0
        return
    for token in range(n):
        probs[0, token] = logits[token]
    softmax(probs, 0, 0, n, np.float32(max(1e-45, min(1.0 / temperature, 3e38))))  # 0 times the padding's infinity is NaN
    limit_k = top_k if 0 < top_k < n else n
    limit_p = top_p if 0.0 < top_p < 1.0 else np.inf
    if limit_k == n and limit_p == np.inf:
        return
    # n - 1 tokens below this would not weigh 1 - top_p together, so none of them is in the set (run.c does the same)
    cutoff = np.float32((1.0 - limit_p) / (n - 1)) if limit_p < np.inf and n > 1 else np.float32(0.0)
    m = rank_keys(keys, probs, n, cutoff)
    if m == 0:  # unless all are below it: the most likely token is always in the set
        cutoff = np.float32(0.0)
        m = rank_keys(keys, probs, n, cutoff)
    end = last_kept(keys, m, limit_k, limit_p)
    total = 0.0
    for token in range(n):
        p = probs[0, token]
        if p < cutoff or rank_key(p, token) > end:
            probs[0, token] = 0.0
        total += probs[0, token]
    for token in range(n):
        probs[0, token] = np.float32(probs[0, token] / total)


@compiled
def race(probs, n, seed, stream, position):
    """A token with probability proportional to probs[0, :n]: argmin E / p for exponential E, that is argmax log p + Gumbel.

    E = -log u is at least 1 - u, which spares the logarithm of tokens that cannot win. Ties go to the lower id. -1 where no
    probability is above 0.
    """
    key = noise_key(seed, stream, position)
    best, winner = np.inf, -1
    for token in range(n):
        p = np.float64(probs[0, token])
        if p > 0.0:
            u = uniform(key, token)
            if 1.0 - u <= best * p:
                time = -math.log(u) / p
                if time < best:
                    best, winner = time, token
    return winner


@compiled
def draw(probs, logits, temperature, top_k, top_p, seed, stream, position, keys):
    """Fill probs from logits (see `probabilities`) and draw the token of (seed, stream, position) from them."""
    probabilities(probs, logits, temperature, top_k, top_p, keys)
    return race(probs, logits.size, seed, stream, position)


@compiled
def keep_or_redraw(p, q, n, token, seed, accept_stream, target_stream, position):
    """The target's token where the draft proposed `token`: rejection sampling (Leviathan et al. 2023, section 2.3).

    The proposal is kept with probability min(1, p / q); else the token comes from the residual max(0, p - q), which never
    holds the proposal: it was accepted exactly if it is what this returns. p (1, V padded) is overwritten. -1 where p is NaN.
    """
    if np.isnan(p[0, token]):
        return -1
    if uniform(noise_key(seed, accept_stream, position), token) * q[0, token] < p[0, token]:
        return token
    total = 0.0
    for i in range(n):
        total += max(np.float32(0.0), p[0, i] - q[0, i])
    if total > 0.0:  # where rounding leaves no residual, p and q are one distribution; p may yet be 0 where q is not
        for i in range(n):
            p[0, i] = max(np.float32(0.0), p[0, i] - q[0, i])
    return race(p, n, seed, target_stream, position)


# --------------------------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The seven numbers of a llama2.c checkpoint, and whether the classifier is the embedding."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared_classifier: bool = True

    def flaw(self) -> str:
        """What keeps these numbers from being a llama2 model; empty where nothing does."""
        for name, value in vars(self).items():
            if value <= 0 and name != "shared_classifier":
                return f"{name} is {value}; expected a positive number"
        if self.dim % self.n_heads:
            return f"dim {self.dim} is not divisible by n_heads {self.n_heads}"
        if self.n_heads % self.n_kv_heads:
            return f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
        if self.head_dim % 2:
            return f"head_dim {self.head_dim} (dim / n_heads) is odd; RoPE turns pairs"
        if self.vocab_size < 3:
            return f"vocab_size is {self.vocab_size}; BOS and EOS are the ids 1 and 2"
        return ""

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by llama2.c's names; `wcls` only where it is not the embedding."""
        layers, dim, hidden = self.n_layers, self.dim, self.hidden_dim
        shapes: dict[str, tuple[int, ...]] = {
            "tok_emb": (self.vocab_size, dim),
            "rms_att": (layers, dim),
            "wq": (layers, dim, dim),
            "wk": (layers, self.kv_dim, dim),
            "wv": (layers, self.kv_dim, dim),
            "wo": (layers, dim, dim),
            "rms_ffn": (layers, dim),
            "w1": (layers, hidden, dim),
            "w2": (layers, dim, hidden),
            "w3": (layers, hidden, dim),
            "rms_final": (dim,),
        }
        return shapes if self.shared_classifier else shapes | {"wcls": (self.vocab_size, dim)}


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy that begins at a cache line where it does not: one that was pickled, say."""
    if array.ctypes.data % 64 == 0 or array.dtype != np.float32:
        return array
    copy = zeros(*array.shape)
    copy[...] = array
    return copy


def zeros(*shape: int) -> Float32:
    """A float32 array of zeros that begins at a cache line, as a tile's loads need."""
    n_bytes = math.prod(shape) * 4
    buffer = np.zeros(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + n_bytes].view(np.float32).reshape(shape)


def lazy_zeros(*shape: int) -> Float32:
    """As `zeros`, of which only what is written becomes resident: numpy would ask for pages of 2 MB. Raises MemoryError."""
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # else a forked process would write here too
    try:
        buffer = mmap.mmap(-1, math.prod(shape) * 4, **private)
    except OSError as error:
        raise MemoryError(error.strerror) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel that has no huge pages
            buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(buffer, np.float32).reshape(shape)


@parallel
def fill_panels(panels, first, step, matrix, n_threads):
    """panels[first + step i, k, r] = matrix[R i + r, k]: matrix (rows, k) into every step-th of panels (P, k, R)."""
    rows, n = matrix.shape
    for i in prange(n_threads):
        begin, end = share(ceil_div(rows, PANEL_ROWS), np.int64(i), n_threads)
        for panel in range(begin, end):
            row = panel * PANEL_ROWS
            for k in range(0, n, LANES):
                for r in range(min(PANEL_ROWS, rows - row)):
                    for j in range(k, min(k + LANES, n)):
                        panels[first + step * panel, j, r] = matrix[row + r, j]


def pack_matrix(panels: Float32, matrix: Float32, first: int = 0, step: int = 1) -> None:
    """Fill every step-th of panels (P, k, R) from a matrix (rows, k); the rows that pad the last one stay zero."""
    source = matrix.view()
    source.flags.writeable = False  # as a mapped file is: one type, one compilation
    on_threads(fill_panels, panels, first, step, source, available_threads())


def _rope_tables(head_dim: int, n_positions: int) -> tuple[Float32, Float32]:
    """cos and signed sin (S, K + LANES) of pos / 10000^(2i/K), periodic in K, so that a vector may begin in any row of a head."""
    rows = np.arange(head_dim + LANES) % head_dim
    angles = np.arange(n_positions)[:, None] / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    cos, sin = zeros(n_positions, rows.size), zeros(n_positions, rows.size)
    cos[:] = np.cos(angles).astype(np.float32)[:, rows // 2]
    sin[:] = np.sin(angles).astype(np.float32)[:, rows // 2] * np.where(rows % 2 == 0, -1, 1)
    return cos, sin


def weight_memory(config: Config, weight_bytes: float = 4.0) -> int:
    """Bytes that the packed weights take, of so many bytes each."""
    return int(sum(math.prod(shape) for shape in config.shapes().values()) * weight_bytes)


def text_memory(config: Config, n_positions: int, n_threads: int) -> int:
    """About what a text of that many positions takes: the KV cache and all else that grows with it."""
    head_dim, groups = config.head_dim, config.n_layers * config.n_kv_heads
    cache = groups * (head_dim + round_up(head_dim, LANES))
    tables = 3 * (head_dim + LANES) + 4 * head_dim  # and what computing them takes for a moment
    return int(4 * n_positions * (cache + tables + n_threads * TILE_TOKENS))


def physical_memory_bytes() -> float:
    """The machine's memory; infinite where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def new_state(config: Config, weights: Weights, n_positions: int, n_threads: int) -> State:
    """Buffers for n_positions positions; a position's share of the cache becomes resident when a token fills it."""
    head_dim, layers, groups = config.head_dim, config.n_layers, config.n_kv_heads
    positions = round_up(n_positions, LANES)
    dim = round_up(config.dim, PANEL_ROWS)
    head_panels = ceil_div(head_dim, LANES)
    lengths = zip((config.dim, config.hidden_dim), weights.groups.tolist(), strict=True)
    code_words = max(ceil_div(n, group) * (GROUP_HEAD + ceil_div(group, QUADS)) if group else 1 for n, group in lengths)
    cos, sin = _rope_tables(head_dim, positions)
    return State(
        tokens=np.zeros(MAX_TOKENS, np.int64),
        arrivals=np.zeros(1, np.int64),
        keys=lazy_zeros(layers, groups, positions // LANES, head_dim, LANES),
        values=lazy_zeros(layers, groups, head_panels, positions, LANES),
        rope_cos=cos,
        rope_sin=sin,
        x=zeros(MAX_TOKENS, dim),
        normed=zeros(n_threads, MAX_TOKENS, dim),
        codes=zeros(n_threads, MAX_TOKENS, code_words),
        qkv=zeros(MAX_TOKENS, weights.wqkv.shape[1] * PANEL_ROWS),
        heads=zeros(MAX_TOKENS, dim),
        scores=zeros(n_threads, TILE_TOKENS, positions),
        mixed=zeros(n_threads, TILE_TOKENS, head_panels * LANES),
        gate=zeros(MAX_TOKENS, weights.w13.shape[1] * PANEL_ROWS),
        hidden=zeros(MAX_TOKENS, weights.w13.shape[1] * PANEL_ROWS // 2),
        logits=zeros(MAX_TOKENS, weights.wcls.shape[0] * PANEL_ROWS),
    )


class Transformer:
    """A llama2 model on CPU threads, with the KV cache of the text that it ran last.

    weights: packed (`packing.pack_weights`); n_threads: all cores by default; n_positions: how far a text may go, by default
    seq_len. Buffers grow with the text. Beyond its own seq_len a model sees a sliding window of that many positions.

    Whatever runs, the logits are those of the tokens that were asked for: the cache knows which tokens it holds. Threads may
    share a model; `lock` is for whoever reads logits that another's pass must not overwrite. A model can be pickled and copied.

    Raises ValueError for weights of another shape than the config's, for n_threads that the machine does not give and for
    n_positions below 1.
    """

    def __init__(self, config: Config, weights: Weights, n_threads: int | None = None, n_positions: int | None = None) -> None:
        if flaw := config.flaw():
            raise ValueError(flaw)
        self._config, self._weights = config, weights.checked(config)
        self._most_threads = available_threads()
        self.n_threads = self._most_threads if n_threads is None else n_threads
        self._most_threads = self.n_threads
        self._n_positions = config.seq_len if n_positions is None else whole("n_positions", n_positions, 1)
        self.portable = FORCE_PORTABLE  # int8 products without the CPU's own instruction for them; the same bits
        self.lock: threading._RLock
        give_lock(self, "lock")
        self._held: list[int] = []  # the tokens whose keys and values the cache holds
        self._capacity = 0
        self._state: State
        self._reserve(min(self._n_positions, FIRST_POSITIONS))

    def __reduce__(self) -> tuple[Any, ...]:
        return Transformer, (self._config, self._weights, self._most_threads, self._n_positions)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def n_positions(self) -> int:
        return self._n_positions

    @property
    def n_threads(self) -> int:
        """How many threads a pass takes: at most as many as the model was made for. Changes the speed alone."""
        return self._n_threads

    @n_threads.setter
    def n_threads(self, n: int) -> None:
        self._n_threads = whole("n_threads", n, 1, self._most_threads)

    @property
    def n_held(self) -> int:
        """How many tokens of the last text the cache holds."""
        return len(self._held)

    @functools.cached_property
    def _one_region(self) -> bool:
        """Whether barriers inside one parallel region are safe: TBB may run its tasks one after another, and limits from
        outside (OMP_THREAD_LIMIT) may leave fewer threads than asked for. A roll call of the threads tells."""
        self._run(0, 0, self._most_threads)
        everyone = self._most_threads + self._most_threads**2
        return bool(self._most_threads == 1 or numba.threading_layer() != "tbb") and bool(self._state.arrivals[0] == everyone)

    def _run(self, first: int, last: int, n_threads: int, n_tokens: int = 0, pos: int = 0, n_logits: int = 0) -> None:
        """Phases first to last over state.tokens[:n_tokens], the first of them at pos."""
        self._state.arrivals[0] = 0
        self._plan[:N_NUMBERS] = (
            first, last, n_tokens, pos, n_logits, self._config.seq_len, self._config.dim, self._config.hidden_dim,
            n_threads, multiplier(self._weights.is_int8, bool(self.portable)),
        )  # fmt: skip
        run_on_threads(entry_point(), self._plan_address, n_threads)

    def _reserve(self, n_positions: int) -> None:
        """Room for a text of that many positions, twice as much as there was if that is not enough."""
        if n_positions <= self._capacity:
            return
        most = min(max(n_positions, 2 * self._capacity), self._n_positions)
        state = new_state(self._config, self._weights, most, self._most_threads)
        if self._held:
            state.keys[:, :, : self._capacity // LANES] = self._state.keys
            state.values[:, :, :, : self._capacity] = self._state.values
        plan = new_plan(state, self._weights)
        # all or nothing: an interrupt between two calls would leave a plan of buffers that are gone
        self._plan, self._plan_address, self._state, self._capacity = plan, plan.ctypes.data, state, state.values.shape[3]

    def forward(self, tokens: Sequence[int], n_logits: int = 1) -> Float32:
        """Logits (n_logits, V) at the last of the tokens of a text, valid until the next call; runs what the cache does not hold.

        Raises ValueError for n_logits beyond the tokens or MAX_TOKENS, a token out of range or more tokens than n_positions,
        TypeError for tokens that are no whole numbers, MemoryError where the cache cannot grow.
        """
        tokens = tokens if isinstance(tokens, list) else ids("tokens", tokens)
        n = len(tokens)
        n_logits = whole("n_logits", n_logits, 0, min(n, MAX_TOKENS))
        if n > self._n_positions:
            raise ValueError(f"{n} tokens do not fit {self._n_positions} positions")
        with self.lock:
            start = self._n_common(tokens, n - n_logits)
            new = ids("tokens", tokens[start:])
            if new and not 0 <= min(new) <= max(new) < self._config.vocab_size:
                raise ValueError(f"token out of range 0..{self._config.vocab_size - 1}")
            self._reserve(n)
            del self._held[start:]
            n_phases, n_threads = 5 * self._config.n_layers + 1, self._n_threads
            while new:
                # the last block is a full one where there are several, so that it holds all n_logits tokens
                block = new[: len(new) % MAX_TOKENS or MAX_TOKENS]
                del new[: len(block)]
                self._state.tokens[: len(block)] = block
                phases = n_phases + (n_logits > 0 and not new)
                for first, last in [(0, phases)] if self._one_region else [(i, i + 1) for i in range(phases)]:
                    self._run(first, last, n_threads, len(block), len(self._held), n_logits)
                self._held += block
            return self._state.logits[:n_logits, : self._config.vocab_size]

    def _n_common(self, tokens: list[int], limit: int) -> int:
        """How many tokens, at most limit, the cache holds of a text."""
        n = min(len(self._held), limit)
        held = self._held if n == len(self._held) else self._held[:n]
        if held == tokens[:n]:
            return n
        return next(i for i in range(n) if held[i] != tokens[i])


def available_threads() -> int:
    """How many threads the machine gives this process."""
    return int(numba.config.NUMBA_NUM_THREADS)


@parallel
def read_all(sums, array, n_threads):
    """sums[thread] = the sum of 0 x over that thread's share of the array (n,): NaN if and only if it holds NaN or infinity."""
    zero = np.float32(0.0)
    for i in prange(n_threads):
        first, last = share(array.size, np.int64(i), n_threads)
        a, b, c, d = splat(zero), splat(zero), splat(zero), splat(zero)
        whole = first + (last - first) // (4 * LANES) * (4 * LANES)
        for at in range(first, whole, 4 * LANES):
            a, b = fma(load(array, at), splat(zero), a), fma(load(array, at + LANES), splat(zero), b)
            c, d = fma(load(array, at + 2 * LANES), splat(zero), c), fma(load(array, at + 3 * LANES), splat(zero), d)
        total = reduce_add(add(add(a, b), add(c, d)))
        for at in range(whole, last):
            total += zero * array[at]
        sums[i] = total


def all_finite(array: Float32, n_threads: int | None = None) -> bool:
    """Whether no element of a C-contiguous array is NaN or infinite, at the speed of memory."""
    flat = array.reshape(-1)
    flat.flags.writeable = False  # as a mapped file is: one type, one compilation
    sums = zeros(n_threads or available_threads())
    on_threads(read_all, sums, flat, sums.size)
    return not np.isnan(sums).any()
