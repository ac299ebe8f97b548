"""LLVM's vectors as numba sees them: one intrinsic for each instruction that the arithmetic needs. Knows nothing of models.

A vector is LANES floats on every machine, for the sake of the bits; LLVM splits it where registers are shorter. The functions
that emit LLVM's code take its builder first; those above them, the intrinsics, are what compiled functions call.
"""

import functools
import inspect
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_jitable, register_model

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
UInt16 = npt.NDArray[np.uint16]

LANES = 16
CPU_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # LLVM's names; what machine code is kept by
IS_ARM64 = platform.machine().lower() in ("arm64", "aarch64")


@register_jitable
def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up."""
    return (n + d - 1) // d


@register_jitable
def round_up(n: int, multiple: int) -> int:
    """n, or the next multiple above it."""
    return int(ceil_div(n, multiple)) * multiple


F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)


class VectorType(types.Type):
    """numba's name for `<16 x float>`."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VECTOR)


def llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call the LLVM intrinsic of that name."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def emitted(returned: Any, *parameters: Any, emit: Any) -> Any:
    """An intrinsic of parameters of those numba types: what emit(builder, *values) makes.

    A parameter None is a C-contiguous array, and the one behind it a flat index of it, which is not negative: numba's own
    indexing asks. In their place emit gets the array's `Storage`, and what gives a pointer: of an item's LLVM type, which the
    index counts, and of what is pointed to.
    """
    names = ["typingctx", *(f"value_{i}" for i in range(len(parameters)))]

    def typed(typingctx: Any, *given: Any) -> Any:
        kinds = [kind or own for kind, own in zip(parameters, given, strict=True)]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = list(args)
            if parameters[0] is None:

                def place(item: Any, pointee: Any) -> Any:
                    start = element_pointer(context, builder, signature.args[0], args[0], ir.Constant(I64, 0), item)
                    return builder.bitcast(builder.gep(start, [args[1]]), pointee.as_pointer())

                values[:2] = storage_of(signature.args[0]), place
            made = emit(builder, *values)
            return context.get_dummy_value() if returned is types.void else made

        return returned(*kinds), codegen

    parameters_of = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = inspect.Signature(parameters_of)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _vector_op(arity: int, emit: Any) -> Any:
    """An intrinsic from `arity` vectors to one."""
    return emitted(vector, *[vector] * arity, emit=emit)


def shuffle(builder: Any, a: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined), mask)


def _reduce(combine: Any) -> Any:
    """An intrinsic from a vector to a scalar, halves combined pairwise: one fixed order."""

    def emit(builder: Any, v: Any) -> Any:
        n = LANES
        while n > 1:
            n //= 2
            v = combine(builder, shuffle(builder, v, list(range(n))), shuffle(builder, v, list(range(n, 2 * n))))
        return builder.extract_element(v, ir.Constant(I32, 0))

    return emitted(types.float32, vector, emit=emit)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp2_of_integer(builder: Any, a: Any) -> Any:
    """2^a for integral a in [-126, 127]: the exponent field of a float."""
    biased = builder.add(builder.fptosi(a, INTEGERS), constants(INTEGERS, 127))
    return builder.bitcast(builder.shl(biased, constants(INTEGERS, 23)), VECTOR)


def _zero_unless_positive(builder: Any, x: Any, y: Any) -> Any:
    """x where y > 0 or y is NaN."""
    return builder.select(builder.fcmp_unordered(">", y, constants(VECTOR, 0.0)), x, constants(VECTOR, 0.0))


def constants(vector_type: Any, value: Any) -> Any:
    """A vector whose lanes all hold that number."""
    return ir.Constant(vector_type, [value] * vector_type.count)


def polynomial(*coefficients: float, kind: Any = vector) -> Any:
    """An intrinsic of a vector or a float64 x: the polynomial of those coefficients, the highest power's first (Horner).

    Multiply-adds are fused for vectors alone.
    """

    def emit(builder: Any, x: Any) -> Any:
        first, *others = (constants(x.type, c) if kind is vector else x.type(c) for c in coefficients)
        for c in others:
            first = multiply_add(builder, first, x, c) if kind is vector else builder.fadd(builder.fmul(first, x), c)
        return first

    return emitted(kind, kind, emit=emit)


def integers_like(v: Any) -> Any:
    """The type of as many int32."""
    return ir.VectorType(I32, v.type.count)


def floats_like(v: Any) -> Any:
    """The type of as many float32."""
    return ir.VectorType(F32, v.type.count)


def portable_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z rounded once, of vectors, for CPUs without the instruction.

    The product is exact in float64, where the sum is rounded to odd, which no second rounding can spoil (Boldo and Melquiond
    2008): where the sum is not exact (Knuth's TwoSum tells) and its last bit is even, it is its neighbour on the error's side.
    """
    floats, doubles, words = x.type, ir.VectorType(ir.DoubleType(), x.type.count), ir.VectorType(I64, x.type.count)
    product = builder.fmul(builder.fpext(x, doubles), builder.fpext(y, doubles))
    z = builder.fpext(z, doubles)
    total = builder.fadd(product, z)
    rest = builder.fsub(total, product)
    error = builder.fadd(builder.fsub(product, builder.fsub(total, rest)), builder.fsub(z, rest))
    nothing, one = constants(doubles, 0.0), constants(words, 1)
    bits = builder.bitcast(total, words)
    is_even = builder.icmp_signed("==", builder.and_(bits, one), constants(words, 0))
    grows = builder.icmp_signed("==", builder.fcmp_ordered(">", error, nothing), builder.fcmp_ordered(">", total, nothing))
    neighbour = builder.select(grows, builder.add(bits, one), builder.sub(bits, one))
    is_odd_wanted = builder.and_(is_even, builder.fcmp_ordered("!=", error, nothing))
    return builder.fptrunc(builder.bitcast(builder.select(is_odd_wanted, neighbour, bits), doubles), floats)


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The same by the CPU's own instruction."""
    return llvm(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


multiply_add = _multiply_add if IS_ARM64 or "+fma" in CPU_FEATURES.split(",") else portable_multiply_add
add = _vector_op(2, lambda b, x, y: b.fadd(x, y))
mul = _vector_op(2, lambda b, x, y: b.fmul(x, y))
div = _vector_op(2, lambda b, x, y: b.fdiv(x, y))
maximum = _vector_op(2, _maximum)
minimum = _vector_op(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = _vector_op(3, multiply_add)
portable_fma = _vector_op(3, portable_multiply_add)
absolute = _vector_op(1, lambda b, x: llvm(b, "llvm.fabs.v16f32", VECTOR, x))
round_half_away = _vector_op(1, lambda b, x: llvm(b, "llvm.round.v16f32", VECTOR, x))
rint = _vector_op(1, lambda b, x: llvm(b, "llvm.rint.v16f32", VECTOR, x))
exp2_of_integer = _vector_op(1, _exp2_of_integer)
zero_unless_positive = _vector_op(2, _zero_unless_positive)
swap_pairs = _vector_op(1, lambda b, x: shuffle(b, x, [i ^ 1 for i in range(LANES)]))
reduce_add = _reduce(lambda b, x, y: b.fadd(x, y))
reduce_max = _reduce(_maximum)


def broadcast(builder: Any, scalar: Any, vector_type: Any) -> Any:
    lane0 = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, lane0, [0] * vector_type.count)


# A vector whose lanes all hold the scalar
splat = emitted(vector, types.float32, emit=lambda b, scalar: broadcast(b, scalar, VECTOR))
# The square root of a float32, correctly rounded; numba's own calls the C library
sqrt = emitted(types.float32, types.float32, emit=lambda b, x: llvm(b, "llvm.sqrt.f32", F32, x))
# (a vector, i): the float in lane i
lane = emitted(types.float32, vector, types.intp, emit=lambda b, v, i: b.extract_element(v, i))


def element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


class Storage(NamedTuple):
    """How floats lie in memory: bytes of each, its LLVM type, and what makes float32 of a vector of them, exactly."""

    item_bytes: int
    item: Any
    widen: Callable[[Any, Any], Any]

    @property
    def type(self) -> Any:
        """The vector of LANES of them."""
        return self.vector(LANES)

    def vector(self, lanes: int) -> Any:
        return ir.VectorType(self.item, lanes)


def _widen_bf16(builder: Any, bits: Any) -> Any:
    """The upper half of a float32."""
    wide = integers_like(bits)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), constants(wide, 16)), floats_like(bits))


def _widen_fp16(builder: Any, bits: Any) -> Any:
    """By the CPU's own conversion."""
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), bits.type.count)), floats_like(bits))


def _widen_fp16_portable(builder: Any, bits: Any) -> Any:
    """The bits of a float32 whose exponent is 112 too small, times 2^112, which is exact; subnormals are no special case."""
    floats, every = floats_like(bits), functools.partial(constants, integers_like(bits))
    wide = builder.shl(builder.sext(bits, integers_like(bits)), every(13))
    small = builder.bitcast(builder.and_(wide, every(~(7 << 28))), floats)
    scaled = builder.fmul(small, constants(floats, 2.0**112))
    not_finite = builder.icmp_signed("==", builder.and_(wide, every(0x1F << 23)), every(0x1F << 23))
    return builder.select(not_finite, builder.bitcast(builder.or_(wide, every(0xFF << 23)), floats), scaled)


_HALVES = ir.VectorType(I16, LANES)
FP16_END = 65520.0  # rounds to no finite fp16, nor does anything beyond


def _to_nearest_fp16(builder: Any, v: Any) -> Any:
    """The bits of fp16, ties to even, by the CPU's own conversion."""
    return builder.bitcast(builder.fptrunc(v, ir.VectorType(ir.HalfType(), LANES)), _HALVES)


def _to_nearest_fp16_portable(builder: Any, v: Any) -> Any:
    """The same by integers below FP16_END: what carries out of the mantissa is the exponent's. A subnormal is rounded by adding
    0.5, whose last bit weighs what an fp16 subnormal's does.
    """
    every = functools.partial(constants, INTEGERS)
    bits = builder.bitcast(v, INTEGERS)
    size = builder.and_(bits, every(0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(size, every(13)), every(1))
    normal = builder.lshr(builder.add(size, builder.add(is_odd, every(0xFFF - (112 << 23)))), every(13))
    plus_half = builder.fadd(builder.bitcast(size, VECTOR), constants(VECTOR, 0.5))
    small = builder.sub(builder.bitcast(plus_half, INTEGERS), every(126 << 23))
    rounded = builder.select(builder.icmp_signed("<", size, every(113 << 23)), small, normal)
    sign = builder.and_(builder.lshr(bits, every(16)), every(0x8000))
    return builder.trunc(builder.or_(rounded, sign), _HALVES)


def narrowing_fp16(to_nearest: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What emits the bits of fp16 that are nearest to a vector's floats: NaN where none is finite, so that it is told."""

    def narrow(builder: Any, v: Any) -> Any:
        size = llvm(builder, "llvm.fabs.v16f32", VECTOR, v)
        fits = builder.fcmp_ordered("<", size, constants(VECTOR, FP16_END))
        return builder.select(fits, to_nearest(builder, v), constants(_HALVES, 0x7E00))

    return narrow


def _widen_codes(builder: Any, codes: Any) -> Any:
    """Of int8."""
    return builder.sitofp(builder.sext(codes, integers_like(codes)), floats_like(codes))


CODE_STORAGE = Storage(1, I8, _widen_codes)
FP32_STORAGE = Storage(4, F32, lambda builder, floats: floats)
BF16_STORAGE = Storage(2, I16, _widen_bf16)
PORTABLE_FP16_STORAGE = Storage(2, I16, _widen_fp16_portable)
# without the instruction LLVM would call a function of a library that is not there
CONVERTS_FP16 = IS_ARM64 or "+f16c" in CPU_FEATURES.split(",")
FP16_STORAGE = Storage(2, I16, _widen_fp16) if CONVERTS_FP16 else PORTABLE_FP16_STORAGE
narrow_fp16 = narrowing_fp16(_to_nearest_fp16 if CONVERTS_FP16 else _to_nearest_fp16_portable)
portable_narrow_fp16 = narrowing_fp16(_to_nearest_fp16_portable)


def storage_of(array_type: Any) -> Storage:
    """Of an array of float32, of int8, or of uint16, which stands for the bits of fp16: numba has no such type."""
    return {types.uint16: FP16_STORAGE, types.int8: CODE_STORAGE}.get(array_type.dtype, FP32_STORAGE)


def load_as(given: Storage | None) -> Any:
    """An intrinsic (array, index): LANES floats of an array's memory, from a flat index in floats as stored there.

    given: how they are stored; None: as `storage_of` says.
    """

    def emit(builder: Any, own: Storage, place: Any) -> Any:
        storage = given or own
        return storage.widen(builder, builder.load(place(storage.item, storage.type), align=storage.item_bytes))

    return emitted(vector, None, types.intp, emit=emit)


load = load_as(FP32_STORAGE)
load_bf16 = load_as(BF16_STORAGE)
load_fp16 = load_as(FP16_STORAGE)
load_either = load_as(None)
# (array, index): the float of an array of float32
item = emitted(types.float32, None, types.intp, emit=lambda b, _, place: b.load(place(F32, F32)))
# (array, index, value): write LANES floats to an array of float32
store = emitted(
    types.void, None, types.intp, vector, emit=lambda b, _, place, value: b.store(value, place(F32, VECTOR), align=4)
)  # fmt: skip


def _store_either(narrow: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic (array, index, value): LANES floats, or the nearest fp16 of them, to a flat index: see `storage_of`."""

    def emit(builder: Any, storage: Storage, place: Any, value: Any) -> None:
        value = value if storage is FP32_STORAGE else narrow(builder, value)
        builder.store(value, place(storage.item, storage.type), align=storage.item_bytes)

    return emitted(types.void, None, types.intp, vector, emit=emit)


store_either = _store_either(narrow_fp16)
portable_store_either = _store_either(portable_narrow_fp16)


def _put_either(builder: Any, storage: Storage, place: Any, value: Any) -> None:
    """The same of one float32."""
    if storage is not FP32_STORAGE:
        value = builder.extract_element(narrow_fp16(builder, broadcast(builder, value, VECTOR)), ir.Constant(I32, 0))
    builder.store(value, place(storage.item, storage.item))


put_either = emitted(types.void, None, types.intp, types.float32, emit=_put_either)


def _store_as(value: Any, convert: Any) -> Any:
    """An intrinsic (array, index, value): a value of that type, converted, to an array's memory at an index in bytes."""

    def emit(builder: Any, storage: Storage, place: Any, value: Any) -> None:
        converted = convert(builder, value)
        builder.store(converted, place(I8, converted.type), align=1)

    return emitted(types.void, None, types.intp, value, emit=emit)


_bytes = ir.VectorType(I8, LANES)
store_bytes = _store_as(vector, lambda b, v: b.trunc(b.fptosi(v, INTEGERS), _bytes))  # a vector of integral floats
store_byte = _store_as(types.float32, lambda b, v: b.fptosi(v, I8))  # an integral float32
store_int = _store_as(types.float32, lambda b, v: b.fptosi(v, I32))  # likewise
# (array, index): the unsigned byte of an array's memory at an index in bytes
load_byte = emitted(types.int64, None, types.intp, emit=lambda b, _, place: b.zext(b.load(place(I8, I8)), I64))


def offset(builder: Any, pointer: Any, n_floats: Any, pointee: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [n_floats]), pointee.as_pointer())


@intrinsic
def call(typingctx, function, args):
    """function(*args) for the address of a function of int64 numbers, addresses among them."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, values[1])
        signature = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
        builder.call(builder.inttoptr(values[0], signature.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, args), codegen


def _at(emit: Any) -> Any:
    """What emits code of the int64 at an address."""
    return lambda builder, address, *values: emit(builder, builder.inttoptr(address, I64.as_pointer()), *values)


def _exchange(builder: Any, word: Any, expected: Any, value: Any) -> Any:
    return builder.extract_value(builder.cmpxchg(word, expected, value, "seq_cst", "seq_cst"), 0)


# of the int64 at an address
load_word = emitted(types.int64, types.int64, emit=_at(lambda b, word: b.load(word)))
# add to it, seen by every thread in one order
atomic_add = emitted(types.int64, *[types.int64] * 2, emit=_at(lambda b, word, n: b.atomic_rmw("add", word, n, "seq_cst")))
# (address, expected, value): put a value in its place, if it is what is expected; what was there
atomic_exchange = emitted(types.int64, *[types.int64] * 3, emit=_at(_exchange))
# write it, behind everything that was written before
atomic_store = emitted(types.void, *[types.int64] * 2, emit=_at(lambda b, word, n: b.store_atomic(n, word, "release", 8)))
# read it, with everything that was written before it was
atomic_load = emitted(types.int64, types.int64, emit=_at(lambda b, word: b.load_atomic(word, "acquire", 8)))
