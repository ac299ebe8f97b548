"""LLVM vectors for the tiles of matmuls: integers for the codes of weights, lookup tables, and pointers.

The values of all tokens of a tile are a tuple; see `simd.make_token_intrinsic`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_model

from specdec.runtime import simd
from specdec.runtime.code_cache import CompiledFunction
from specdec.runtime.simd import I8, I16, I32, I64, VectorType, call_llvm_intrinsic, make_token_intrinsic, make_vector_op, shuffle


class PointerType(types.Type):
    """numba's type of a pointer to stored numbers, from which `load_vector` reads `rows` numbers at a time."""

    def __init__(self, storage: simd.StorageDtype, rows: int, lanes: int) -> None:
        """Create the type of pointers to numbers of a storage format, which are loaded into registers of `lanes` lanes."""
        lanes = min(rows, lanes)
        self.storage, self.vector = storage, VectorType(storage.loaded, lanes, rows // lanes)
        self.llvm_type = storage.item.as_pointer()
        super().__init__(name=f"pointer to {storage.name} {rows // lanes}x{lanes}")


register_model(PointerType)(simd.ValueModel)


# Integers, for the codes of weights


def _cast_to_bytes(builder, words):
    return builder.bitcast(words, ir.VectorType(I8, 4 * words.type.count))


bit_and = make_vector_op(2, lambda b, x, y: b.and_(x, y))
bit_or = make_vector_op(2, lambda b, x, y: b.or_(x, y))
bit_xor = make_vector_op(2, lambda b, x, y: b.xor(x, y))
shift_left = make_vector_op(2, lambda b, x, y: b.shl(x, y))
shift_right = make_vector_op(2, lambda b, x, y: b.lshr(x, y))


def _get_float_vector(words):
    return VectorType(types.float32, words.lanes, words.n_parts)


# a vector of int32 -> float32 with the same bits
view_as_float = make_vector_op(1, lambda b, x: b.bitcast(x, simd.floats_like(x)), _get_float_vector)
# a vector of int32 -> float32
to_float = make_vector_op(1, lambda b, x: b.sitofp(x, simd.floats_like(x)), _get_float_vector)


def _emit_dot4(builder, acc, w, x):
    """Emit acc plus the products of the bytes of each word, multiplied as int16; w is unsigned, x is signed.

    Bytes 0 and 2 of each lane come first, then 1 and 3, like x86's pmaddwd.
    """
    shorts = ir.VectorType(I16, 2 * acc.type.count)
    eight = simd.make_constant_vector(shorts, 8)
    w, x = builder.bitcast(w, shorts), builder.bitcast(x, shorts)
    for w_half, x_half in (
        (builder.and_(w, simd.make_constant_vector(shorts, 255)), builder.ashr(builder.shl(x, eight), eight)),
        (builder.lshr(w, eight), builder.ashr(x, eight)),
    ):
        for odd in (0, 1):
            a, b = (builder.sext(shuffle(builder, v, [*range(odd, shorts.count, 2)]), acc.type) for v in (w_half, x_half))
            acc = builder.add(acc, builder.mul(a, b))
    return acc


def _emit_dot4_vnni(builder, acc, w, x):
    return call_llvm_intrinsic(builder, f"llvm.x86.avx512.vpdpbusd.{32 * acc.type.count}", acc.type, acc, w, x)


def _emit_dot4_sdot(builder, acc, w, x):
    w, x = _cast_to_bytes(builder, w), _cast_to_bytes(builder, x)
    return call_llvm_intrinsic(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, w, x)


def _emit_absolute_bytes(builder, w):
    w_bytes = _cast_to_bytes(builder, w)
    name = f"llvm.abs.v{w_bytes.type.count}i8"
    return builder.bitcast(call_llvm_intrinsic(builder, name, w_bytes.type, w_bytes, ir.IntType(1)(0)), w.type)


def _emit_sign_bytes(builder, x, w):
    x_bytes, w_bytes = _cast_to_bytes(builder, x), _cast_to_bytes(builder, w)
    return builder.bitcast(call_llvm_intrinsic(builder, "llvm.x86.avx2.psign.b", x_bytes.type, x_bytes, w_bytes), x.type)


def _emit_byte_pairs_avx2(builder, w, x):
    shorts = ir.VectorType(I16, 2 * w.type.count)
    factors = _cast_to_bytes(builder, w), _cast_to_bytes(builder, x)
    return call_llvm_intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, *factors)


def _emit_add_pairs_avx2(builder, acc, shorts):
    ones = simd.make_constant_vector(shorts.type, 1)
    return builder.add(acc, call_llvm_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", acc.type, shorts, ones))


def _emit_dot4_avx2(builder, acc, w, magnitude, x):
    """Emit acc plus the products of signed w and x: |w| times x with the sign of w, for which |w| is unsigned."""
    pairs = _emit_byte_pairs_avx2(builder, magnitude, _emit_sign_bytes(builder, x, w))
    return _emit_add_pairs_avx2(builder, acc, pairs)


def _emit_byte_products_neon(builder, w, x):
    w, x = _cast_to_bytes(builder, w), _cast_to_bytes(builder, x)
    low, high = (
        call_llvm_intrinsic(
            builder, "llvm.aarch64.neon.smull.v8i16", ir.VectorType(I16, 8), *(shuffle(builder, v, lanes) for v in (w, x))
        )
        for lanes in ([*range(8)], [*range(8, 16)])
    )
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 16), [*range(16)]))


def _emit_add_products_neon(builder, acc, shorts):
    halves = (shuffle(builder, shorts, lanes) for lanes in ([*range(8)], [*range(8, 16)]))
    pairs = call_llvm_intrinsic(builder, "llvm.aarch64.neon.addp.v8i16", ir.VectorType(I16, 8), *halves)
    return builder.add(acc, call_llvm_intrinsic(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs))


# (sums, w, x) -> int32 sums plus the 4 byte products of each word; w is unsigned, x is signed
dot4 = make_vector_op(3, _emit_dot4)
dot4_vnni = make_vector_op(3, _emit_dot4_vnni)
# The same with signed w; AVX2 takes (sums, w, |w|, x)
dot4_sdot = make_vector_op(3, _emit_dot4_sdot)
dot4_avx2 = make_vector_op(4, _emit_dot4_avx2)
dot4_neon = make_vector_op(3, lambda b, acc, w, x: _emit_add_products_neon(b, acc, _emit_byte_products_neon(b, w, x)))
# four bytes per word -> their absolute values
absolute_bytes = make_vector_op(1, _emit_absolute_bytes)


class PairOps(NamedTuple):
    """The parts of `dot4_avx2` and `dot4_neon`, to add several products in 16 bits before they become int32, as intrinsics.

    Attributes:
        multiply_pairs: (w, x) -> 16-bit products, or sums of two; w is unsigned with AVX2.
        add_pairs: (16-bit sums, w, x) -> 16-bit sums.
        widen_pairs: (sums, 16-bit sums) -> int32 sums plus the 16-bit sums of each word.
        make_word_adder: Number of words -> (sums, w, x, other w, other x, ...) -> int32 sums. It adds all words of a token before
            those of the next: 16-bit sums of all tokens would need more registers than there are.
    """

    multiply_pairs: CompiledFunction
    add_pairs: CompiledFunction
    widen_pairs: CompiledFunction
    make_word_adder: Callable[[int], CompiledFunction]


def make_pair_ops(multiply: simd.Emitter, widen: simd.Emitter, shorts_per_word: int) -> PairOps:
    """Return the `PairOps` of an instruction set.

    Args:
        multiply: Emits the 16-bit products of two vectors of bytes, or sums of two products.
        widen: Emits int32 sums plus the 16-bit sums of each word.
        shorts_per_word: Number of 16-bit numbers that `multiply` returns for a word.
    """

    def get_result(words: VectorType) -> VectorType:
        return VectorType(types.int16, shorts_per_word * words.lanes, words.n_parts)

    def make_word_adder(n_words: int) -> CompiledFunction:
        def emit(builder, acc, *factors):
            products = [multiply(builder, w, x) for w, x in zip(factors[::2], factors[1::2], strict=True)]
            return widen(builder, acc, functools.reduce(builder.add, products))

        return make_vector_op(1 + 2 * n_words, emit)

    add = make_vector_op(3, lambda b, shorts, w, x: b.add(shorts, multiply(b, w, x)))
    return PairOps(make_vector_op(2, multiply, get_result), add, make_vector_op(2, widen), make_word_adder)


PAIR_OPS_AVX2 = make_pair_ops(_emit_byte_pairs_avx2, _emit_add_pairs_avx2, 2)
PAIR_OPS_NEON = make_pair_ops(_emit_byte_products_neon, _emit_add_products_neon, 4)

# 16-byte tables

TABLE_BYTES = 16
Lookup = tuple[str, int]  # an LLVM intrinsic, "" for none, and the number of bytes that it looks up at a time


def choose_lookup(features: Sequence[str], max_bytes: int = 64) -> Lookup:
    """Return the `Lookup` for a table of 16 bytes on a CPU with the given LLVM features, of at most max_bytes at a time."""
    if "+avx512bw" in features and max_bytes >= 64:
        return "llvm.x86.avx512.pshuf.b.512", 64
    if "+avx2" in features and max_bytes >= 32:
        return "llvm.x86.avx2.pshuf.b", 32
    if "+ssse3" in features or "+avx" in features:
        return "llvm.x86.ssse3.pshuf.b.128", 16
    return ("llvm.aarch64.neon.tbl1.v16i8" if simd.IS_ARM64 else "", 64)


HAS_BYTE_LOOKUP = bool(choose_lookup(simd.FEATURES)[0])


def interleave(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Emit a vector of the lanes of vectors a and b with the given indexes; b's lanes are numbered after a's."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def emit_lookup(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, lookup: Lookup) -> ir.Value:
    """Emit a vector of the bytes of a table (16,) selected by codes (n,); the upper 4 bits of a code are ignored."""
    (name, size), n = lookup, codes.type.count
    if n > size:
        halves = [*range(n // 2)], [*range(n // 2, n)]
        first, last = (emit_lookup(builder, table, shuffle(builder, codes, lanes), lookup) for lanes in halves)
        return interleave(builder, first, last, range(n))
    codes = builder.and_(codes, simd.make_constant_vector(codes.type, TABLE_BYTES - 1))
    if name:
        return call_llvm_intrinsic(builder, name, codes.type, shuffle(builder, table, [i % TABLE_BYTES for i in range(n)]), codes)
    found = shuffle(builder, table, [0] * n)
    for i in range(1, TABLE_BYTES):
        is_match = builder.icmp_unsigned("==", codes, simd.make_constant_vector(codes.type, i))
        found = builder.select(is_match, shuffle(builder, table, [i] * n), found)
    return found


def emit_word_lookup(builder: ir.IRBuilder, words: ir.Value, table: ir.Value, lookup: Lookup | None = None) -> ir.Value:
    """Emit `emit_lookup` of the bytes of words in a table of 4 words; lookup: None chooses the one of this CPU."""
    codes = _cast_to_bytes(builder, words)
    lookup = lookup or choose_lookup(simd.FEATURES, codes.type.count)
    return builder.bitcast(emit_lookup(builder, _cast_to_bytes(builder, table), codes, lookup), words.type)


def _emit_joined_bytes(builder, low, high, first):
    low_bytes, high_bytes = _cast_to_bytes(builder, low), _cast_to_bytes(builder, high)
    count = low_bytes.type.count
    lanes = [i + j for i in range(first, count, 16) for j in range(8)]
    joined = interleave(builder, low_bytes, high_bytes, [lane for i in lanes for lane in (i, i + count)])
    return builder.bitcast(joined, low.type)


def make_lookup(numbers: Sequence[int]) -> CompiledFunction:
    """Return an intrinsic that replaces each byte of a vector of words, which is below 16, by a number of a table."""
    table = ir.Constant(ir.VectorType(I32, TABLE_BYTES // 4), np.array(numbers, np.uint8).view(np.uint32).tolist())
    return make_vector_op(1, lambda builder, words: emit_word_lookup(builder, words, table))


# (codes, table) -> words whose bytes are those of a table (4 words), selected by the lower 4 bits of each byte of the codes
look_up_bytes = make_vector_op(2, emit_word_lookup)
# (low, high) of words -> words of two numbers of 16 bits, whose lower bytes are from `low` and whose upper bytes are from `high`.
# They take the first 8 or the last 8 bytes of each 16.
join_first_bytes = make_vector_op(2, functools.partial(_emit_joined_bytes, first=0))
join_last_bytes = make_vector_op(2, functools.partial(_emit_joined_bytes, first=8))
# (a, b) -> a vector with the parts of both
join_parts = make_token_intrinsic(
    2,
    lambda a, b: VectorType(a.dtype, a.lanes, a.n_parts + b.n_parts),
    lambda builder, arg_types, a, b: simd.pack_vector(builder, simd.split_vector(builder, a) + simd.split_vector(builder, b)),
)


# Pointers, for tiles: they are cheaper to pass than arrays


def make_pointer_getter(
    storage: simd.StorageDtype | None, rows: int = simd.LANES, lanes: int = simd.REGISTER_LANES
) -> CompiledFunction:
    """Return an intrinsic (array or pointer, index) -> pointer to an item; the index counts items of the array or pointer.

    Args:
        storage: Storage format of the numbers; None: that of the pointer, or by the array's dtype (see `get_storage_dtype`).
        rows: Numbers that `load_vector` reads at a time.
        lanes: Numbers in a register.
    """

    def typing_function(typingctx, source, index):
        is_pointer = isinstance(source, PointerType)
        known = source.storage if is_pointer else simd.get_storage_dtype(source)
        result = PointerType(storage or known, rows, lanes)

        def codegen(context, builder, signature, args):
            start = args[0] if is_pointer else cgutils.create_struct_proxy(source)(context, builder, args[0]).data
            return builder.bitcast(builder.gep(start, [args[1]]), result.storage.item.as_pointer())

        return result(source, types.intp), codegen

    return simd.wrap_intrinsic(typing_function, 2)


# pointer -> bytes of an item
get_item_bytes = make_token_intrinsic(
    1, lambda pointer: types.int64, lambda b, arg_types, pointer: I64(arg_types[0].storage.item_bytes)
)


def make_row_splitter(n_tokens: int) -> CompiledFunction:
    """Return an intrinsic (pointer, stride) -> tuple of pointers to the rows of n_tokens tokens, `stride` items apart."""

    def typing_function(typingctx, pointer, stride):
        def codegen(context, builder, signature, args):
            rows = [builder.gep(args[0], [builder.mul(args[1], I64(token))]) for token in range(n_tokens)]
            return cgutils.pack_array(builder, rows)

        return types.UniTuple(pointer, n_tokens)(pointer, types.intp), codegen

    return simd.wrap_intrinsic(typing_function, 2)


def _emit_vector_load(
    builder: ir.IRBuilder, arg_types: Sequence[types.Type], pointer: ir.Value, index: ir.Value, step: int = 0
) -> ir.Value:
    """Emit a vector of widened numbers from an index on, whose parts are `step` numbers apart, or next to each other."""
    storage, vector = arg_types[0].storage, arg_types[0].vector
    parts = []
    for i in range(vector.n_parts):
        at = builder.gep(pointer, [builder.add(index, I64(i * (step or vector.lanes)))])
        at = builder.bitcast(at, storage.vector(vector.lanes).as_pointer())
        parts.append(storage.widen(builder, builder.load(at, align=storage.item_bytes)))
    return simd.pack_vector(builder, parts)


def _emit_prefetch(builder, arg_types, pointer, offset, is_write=0, cache_level=2):
    keep, data = 4 - cache_level, 1  # LLVM numbers the first level 3, the second 2
    at = builder.gep(builder.bitcast(pointer, I8.as_pointer()), [offset])
    flags = [ir.Constant(I32, flag) for flag in (is_write, keep, data)]
    call_llvm_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), at, *flags)


def _emit_vector_store(builder, arg_types, pointer, index, value):
    for i, part in enumerate(simd.split_vector(builder, value)):
        at = builder.gep(pointer, [builder.add(index, I64(i * part.type.count))])
        builder.store(part, builder.bitcast(at, part.type.as_pointer()), align=arg_types[0].storage.item_bytes)


def _emit_fill(builder, arg_types, pointer, number):
    vector_type = arg_types[0].vector
    return simd.pack_vector(builder, [simd.widen_to_vector(builder, number, vector_type.part)] * vector_type.n_parts)


def _emit_lane_sums(builder, arg_types, v):
    """Emit a vector of the sum of each of a power of two of parts; each sum is a tree that adds the halves of a part."""
    vectors = simd.split_vector(builder, v)
    n = vectors[0].type.count  # lanes per sum
    while n > 1:
        half, pairs = n // 2, [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = []
        for pair in pairs:
            starts = range(0, sum(vector.type.count for vector in pair), n)
            low, high = (
                interleave(builder, pair[0], pair[-1], [start + at + i for start in starts for i in range(half)])
                for at in (0, half)
            )
            vectors.append(builder.fadd(low, high))
        n = half
    return vectors[0]


# (pointer, index) -> the vector of numbers from an index on
load_vector = make_token_intrinsic(2, lambda pointer, index: pointer.vector, _emit_vector_load)
# (pointer, index) -> a vector whose parts are from rows that are PANEL_ROWS numbers apart
load_rows = make_token_intrinsic(
    2, lambda pointer, index: pointer.vector, functools.partial(_emit_vector_load, step=simd.PANEL_ROWS)
)
# a vector of several parts -> a vector of the sum of each
add_lanes = make_token_intrinsic(1, lambda v: VectorType(v.dtype, v.n_parts), _emit_lane_sums)
# (pointer, index, vector, n_tokens): write a vector from an index on
store_vector = make_token_intrinsic(4, lambda *arg_types: types.void, _emit_vector_store)
# (pointer, index) -> the number at an index
load_number = make_token_intrinsic(
    2, lambda pointer, index: pointer.vector.dtype, lambda b, arg_types, pointer, index: b.load(b.gep(pointer, [index]))
)
# (pointer, index) -> pointer to the number at an index
advance = make_token_intrinsic(2, lambda pointer, index: pointer, lambda b, arg_types, pointer, index: b.gep(pointer, [index]))
# (pointer, number) -> a vector like those that it points to, with the number in all lanes
fill_vector = make_token_intrinsic(2, lambda pointer, number: pointer.vector, _emit_fill)
# (pointer, offset, n_tokens): prefetch the cache line at an offset in bytes: to read it, into the second- or first-level cache
# (see docs/experiments/packed-panels.md), or to write it
prefetch = make_token_intrinsic(3, lambda *arg_types: types.void, _emit_prefetch)
prefetch_into_l1 = make_token_intrinsic(3, lambda *arg_types: types.void, functools.partial(_emit_prefetch, cache_level=1))
prefetch_for_writing = make_token_intrinsic(3, lambda *arg_types: types.void, functools.partial(_emit_prefetch, is_write=1))
