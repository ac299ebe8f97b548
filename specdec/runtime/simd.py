"""LLVM vectors for numba: one intrinsic for each instruction that the kernels need.

A vector has LANES floats on every machine, so results have the same bits; LLVM splits it if registers are shorter. Tiles have
vectors of whole rows (`VectorType`). Functions that emit LLVM code take the builder first. The intrinsics made from them are what
compiled functions call.
"""

import functools
import inspect
import itertools
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.manager import DataModelManager
from numba.extending import intrinsic, models, register_model

from specdec.runtime.code_cache import CompiledFunction, describe_target, jitable

Array = npt.NDArray[Any]  # of any dtype
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt16 = npt.NDArray[np.uint16]

LANES = 16
PANEL_ROWS = 2 * LANES  # divides 288, 512, 768, 1376, 2048 and 32000, so the known models need no padding
LINE_WORDS, LINE_BYTES = 16, 64  # cache line
CPU_FEATURES = describe_target()[2]  # LLVM's names; part of the cache key of machine code
FEATURES = CPU_FEATURES.split(",")
IS_ARM64 = platform.machine().lower() in ("arm64", "aarch64")
HAS_AVX512 = "+avx512f" in FEATURES
REGISTER_LANES = 16 if HAS_AVX512 else 8 if "+avx" in FEATURES else 4  # int32 or float32
N_REGISTERS = 32 if HAS_AVX512 or IS_ARM64 else 16
MAX_TILE_TOKENS = 8 if HAS_AVX512 else 4 if IS_ARM64 else 6  # over floats; ARM: by llvm-mca, 6 keep fewer units busy


@jitable
def ceil_div(n: int, d: int) -> int:
    """Return n / d, rounded up."""
    return (n + d - 1) // d


@jitable
def round_up(n: int, multiple: int) -> int:
    """Return n, or the next multiple above it."""
    return int(ceil_div(n, multiple)) * multiple


Emitter = Callable[..., ir.Value]  # (builder, values) -> the value that the emitted instructions compute
F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT_VECTOR = ir.VectorType(F32, LANES)
INT_VECTOR = ir.VectorType(I32, LANES)


class VectorType(types.Type):
    """numba's type of a vector: numbers of one type in registers.

    In LLVM it is a vector such as `<16 x float>`, or an array of several, each as long as a register, for the rows of a tile.
    """

    def __init__(self, dtype: types.Type, lanes: int, n_parts: int = 1) -> None:
        """Create the type of vectors of n_parts times `lanes` numbers of a numba type, float32, int32, int16 or uint8."""
        self.dtype, self.lanes, self.n_parts = dtype, lanes, n_parts
        self.part = ir.VectorType({types.float32: F32, types.int32: I32, types.int16: I16, types.uint8: I8}[dtype], lanes)
        self.llvm_type = self.part if n_parts == 1 else ir.ArrayType(self.part, n_parts)
        super().__init__(name=f"{n_parts}x{lanes}x{dtype}")


vector = VectorType(types.float32, LANES)


@register_model(VectorType)
class ValueModel(models.PrimitiveModel):
    """The data model of a numba type whose values are those of its `llvm_type`."""

    def __init__(self, dmm: DataModelManager, fe_type: Any) -> None:
        """Create the model, as numba does for each type."""
        super().__init__(dmm, fe_type, fe_type.llvm_type)


def split_vector(builder: ir.IRBuilder, v: ir.Value) -> list[ir.Value]:
    """Emit the parts of a vector as LLVM vectors."""
    return cgutils.unpack_tuple(builder, v) if isinstance(v.type, ir.ArrayType) else [v]


def pack_vector(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Emit the vector that has these parts."""
    return cgutils.pack_array(builder, parts) if len(parts) > 1 else parts[0]


def call_llvm_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Emit a call of the LLVM intrinsic `name` with the given arguments; its value has the LLVM type `result`."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def call_float_function(builder: ir.IRBuilder, name: str, x: ir.Value) -> ir.Value:
    """Emit a call of LLVM's function `name`, such as "fabs", of a vector of float32."""
    return call_llvm_intrinsic(builder, f"llvm.{name}.v{x.type.count}f32", x.type, x)


def make_intrinsic(return_type, *parameter_types, emit):
    """Return a numba intrinsic with parameters of the given numba types; emit(builder, *values) writes its LLVM code.

    The first parameter may be None: a C-contiguous array, and the next one a flat, non-negative index of it (numba's own indexing
    checks the sign). In their place emit gets the array's `StorageDtype` and a function that returns a pointer, given the LLVM
    type that the index counts and the type that is pointed to.
    """

    def typing_function(typingctx, *arg_types):
        value_types = [parameter_type or arg_type for parameter_type, arg_type in zip(parameter_types, arg_types, strict=True)]

        def codegen(context, builder, signature, args):
            values = list(args)
            if parameter_types[0] is None:

                def get_pointer(item, pointee):
                    data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
                    start = builder.bitcast(data, item.as_pointer())
                    return builder.bitcast(builder.gep(start, [args[1]]), pointee.as_pointer())

                values[:2] = get_storage_dtype(signature.args[0]), get_pointer
            result = emit(builder, *values)
            return context.get_dummy_value() if return_type is types.void else result

        return return_type(*value_types), codegen

    return wrap_intrinsic(typing_function, len(parameter_types))


def make_token_intrinsic(arity: int, get_result: Callable[..., types.Type], emit: Emitter) -> CompiledFunction:
    """Return an intrinsic of numbers, vectors and pointers that computes a value for each token of a tile.

    An argument may be a tuple with one value for each token; the others are the same for all tokens. The result is then a tuple,
    too. So the source of a tile reads as if there were one token. An intrinsic without a result has one more parameter, the
    number of the first tokens for which it has an effect.

    Args:
        arity: Number of parameters.
        get_result: Returns the numba type of the result for one token, given those of the arguments.
        emit: Writes the LLVM code for one token: emit(builder, numba types, *values).
    """

    def typing_function(typingctx, *arg_types):
        n_tokens = next((arg.count for arg in arg_types if isinstance(arg, types.UniTuple)), 0)
        arg_types = tuple(map(_get_argument_type, arg_types))
        own_types = [arg.dtype if isinstance(arg, types.UniTuple) else arg for arg in arg_types]
        result = get_result(*own_types)

        def codegen(context, builder, signature, args):
            def pick(token: int) -> list[ir.Value]:
                return [
                    builder.extract_value(value, token) if isinstance(arg, types.UniTuple) else value
                    for arg, value in zip(arg_types, args, strict=True)
                ]

            if result is types.void:
                for token in range(max(n_tokens, 1)):
                    *values, n_active = pick(token)
                    with builder.if_then(builder.icmp_signed(">", n_active, I64(token))):
                        emit(builder, own_types, *values)
                return context.get_dummy_value()
            values = [emit(builder, own_types, *pick(token)) for token in range(max(n_tokens, 1))]
            return cgutils.pack_array(builder, values) if n_tokens else values[0]

        return (types.UniTuple(result, n_tokens) if n_tokens and result is not types.void else result)(*arg_types), codegen

    return wrap_intrinsic(typing_function, arity)


def _get_argument_type(arg_type):
    """Return the numba type to which an argument of `make_token_intrinsic` is converted: numbers are int64 or float32."""
    if isinstance(arg_type, types.Integer):
        return types.int64
    return types.float32 if isinstance(arg_type, types.Float) else arg_type


def wrap_intrinsic(typing_function: CompiledFunction, arity: int) -> CompiledFunction:
    """Return the numba intrinsic of a typing function (typingctx, *argument types)."""
    names = ["typingctx", *(f"value_{i}" for i in range(arity))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing_function.__signature__ = inspect.Signature(parameters)
    return intrinsic(typing_function)


def make_vector_op(
    arity: int, emit: Emitter, get_result: Callable[[types.Type], types.Type] = lambda first: first
) -> CompiledFunction:
    """Return an intrinsic of vectors, and of numbers, which stand for vectors with the same number in all lanes.

    After the first vector, one of a single part stands for one that repeats this part. A pointer stands for the number that it
    points to. The number is loaded for one token after the other: a tile has no registers for those of all tokens.

    Args:
        arity: Number of parameters.
        emit: Writes the LLVM code of one vector: emit(builder, *vectors).
        get_result: Returns the type of the result, given that of the first vector.
    """

    def find_first(arg_types):
        return next((arg for arg in arg_types if isinstance(arg, VectorType)), None)

    def emit_vectors(builder, arg_types, *values):
        first = find_first(arg_types)
        if not first:
            value = emit(builder, *(widen_to_vector(builder, value, FLOAT_VECTOR) for value in values))
            return builder.extract_element(value, I32(0))
        scalar_type = next((arg for arg in arg_types if isinstance(arg, VectorType) and arg.dtype != types.int16), first)
        parts = [
            split_vector(builder, value) * (first.n_parts // arg.n_parts)
            if isinstance(arg, VectorType)
            else [widen_to_vector(builder, value, scalar_type.part)] * first.n_parts
            for arg, value in zip(arg_types, values, strict=True)
        ]
        return pack_vector(builder, [emit(builder, *each) for each in zip(*parts, strict=True)])

    def get_type(*arg_types):
        first = find_first(arg_types)
        return get_result(first) if first else types.float32

    return make_token_intrinsic(arity, get_type, emit_vectors)


def widen_to_vector(builder, value, vector_type):
    """Emit a vector with the number `value`, or the one that it points to, in all lanes."""
    if isinstance(value.type, ir.PointerType):
        value = builder.load(value)
    if isinstance(value.type, ir.IntType) and isinstance(vector_type.element, ir.IntType):
        value = builder.trunc(value, vector_type.element)
    elif isinstance(value.type, ir.IntType):
        value = builder.sitofp(value, vector_type.element)
    return broadcast(builder, value, vector_type)


def shuffle(builder: ir.IRBuilder, a: ir.Value, lanes: list[int]) -> ir.Value:
    """Emit a vector of the lanes of vector `a` with the given indexes."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined), mask)


def _make_reduction(combine):
    """Return an intrinsic that reduces a vector to one float; combine(builder, x, y) joins halves, in one fixed order."""

    def emit(builder, v):
        n = LANES
        while n > 1:
            n //= 2
            v = combine(builder, shuffle(builder, v, list(range(n))), shuffle(builder, v, list(range(n, 2 * n))))
        return builder.extract_element(v, ir.Constant(I32, 0))

    return make_intrinsic(types.float32, vector, emit=emit)


def _emit_maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_exp2_of_integer(builder, a):
    """Emit 2^a for a vector of integral floats in [-126, 127], by the exponent field of a float."""
    biased = builder.add(builder.fptosi(a, INT_VECTOR), make_constant_vector(INT_VECTOR, 127))
    return builder.bitcast(builder.shl(biased, make_constant_vector(INT_VECTOR, 23)), FLOAT_VECTOR)


def _emit_zero_unless_positive(builder, x, y):
    """Emit, lane by lane, x where y > 0 or y is NaN, else 0."""
    zero = make_constant_vector(FLOAT_VECTOR, 0.0)
    return builder.select(builder.fcmp_unordered(">", y, zero), x, zero)


def make_constant_vector(vector_type, value):
    """Return an LLVM constant of a vector type with this number in all lanes."""
    return ir.Constant(vector_type, [value] * vector_type.count)


def make_polynomial(*coefficients: float, numba_type: types.Type = vector) -> CompiledFunction:
    """Return an intrinsic that evaluates a polynomial of a vector or a float64, by Horner's method.

    Only the multiply-adds of vectors are fused.

    Args:
        coefficients: Coefficients, highest power first.
        numba_type: `vector` or float64.
    """

    def emit(builder, x):
        first, *others = (make_constant_vector(x.type, c) if numba_type is vector else x.type(c) for c in coefficients)
        for c in others:
            first = multiply_add(builder, first, x, c) if numba_type is vector else builder.fadd(builder.fmul(first, x), c)
        return first

    return make_intrinsic(numba_type, numba_type, emit=emit)


def integers_like(v):
    """Return the LLVM type of a vector of int32 with as many lanes as the vector v."""
    return ir.VectorType(I32, v.type.count)


def floats_like(v):
    """Return the LLVM type of a vector of float32 with as many lanes as the vector v."""
    return ir.VectorType(F32, v.type.count)


def portable_multiply_add(builder, x, y, z):
    """Emit x y + z of vectors, rounded once, for CPUs without the instruction.

    The product is exact in float64. The sum is rounded to odd there, so the second rounding cannot spoil it (Boldo and Melquiond
    2008): if the sum is not exact (by Knuth's TwoSum) and its last bit is even, it becomes its neighbour on the error's side.
    """
    floats, doubles, words = x.type, ir.VectorType(ir.DoubleType(), x.type.count), ir.VectorType(I64, x.type.count)
    product = builder.fmul(builder.fpext(x, doubles), builder.fpext(y, doubles))
    z = builder.fpext(z, doubles)
    total = builder.fadd(product, z)
    z_part = builder.fsub(total, product)
    error = builder.fadd(builder.fsub(product, builder.fsub(total, z_part)), builder.fsub(z, z_part))
    zero, one = make_constant_vector(doubles, 0.0), make_constant_vector(words, 1)
    bits = builder.bitcast(total, words)
    is_even = builder.icmp_signed("==", builder.and_(bits, one), make_constant_vector(words, 0))
    grows = builder.icmp_signed("==", builder.fcmp_ordered(">", error, zero), builder.fcmp_ordered(">", total, zero))
    neighbour = builder.select(grows, builder.add(bits, one), builder.sub(bits, one))
    must_be_odd = builder.and_(is_even, builder.fcmp_ordered("!=", error, zero))
    return builder.fptrunc(builder.bitcast(builder.select(must_be_odd, neighbour, bits), doubles), floats)


def _native_multiply_add(builder, x, y, z):
    """Emit x y + z of vectors, rounded once, by the CPU's own instruction."""
    return call_llvm_intrinsic(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


multiply_add = _native_multiply_add if IS_ARM64 or "+fma" in FEATURES else portable_multiply_add
add = make_vector_op(2, lambda b, x, y: b.fadd(x, y) if x.type.element == F32 else b.add(x, y))
mul = make_vector_op(2, lambda b, x, y: b.fmul(x, y))
div = make_vector_op(2, lambda b, x, y: b.fdiv(x, y))
maximum = make_vector_op(2, _emit_maximum)
minimum = make_vector_op(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = make_vector_op(3, multiply_add)
absolute = make_vector_op(1, lambda b, x: call_float_function(b, "fabs", x))
round_half_away = make_vector_op(1, lambda b, x: call_float_function(b, "round", x))
rint = make_vector_op(1, lambda b, x: call_float_function(b, "rint", x))
exp2_of_integer = make_vector_op(1, _emit_exp2_of_integer)
zero_unless_positive = make_vector_op(2, _emit_zero_unless_positive)
swap_pairs = make_vector_op(1, lambda b, x: shuffle(b, x, [i ^ 1 for i in range(LANES)]))
reduce_add = _make_reduction(lambda b, x, y: b.fadd(x, y))
reduce_max = _make_reduction(_emit_maximum)


def broadcast(builder, scalar, vector_type):
    """Emit a vector with the scalar in all lanes."""
    lane0 = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, lane0, [0] * vector_type.count)


# scalar -> a vector with it in all lanes
splat = make_intrinsic(vector, types.float32, emit=lambda b, scalar: broadcast(b, scalar, FLOAT_VECTOR))
# The correctly rounded square root of a float32; numba's own calls the C library
sqrt = make_intrinsic(types.float32, types.float32, emit=lambda b, x: call_llvm_intrinsic(b, "llvm.sqrt.f32", F32, x))
# (vector of one part, i) -> the number in lane i
extract_lane = make_token_intrinsic(2, lambda v, i: v.dtype, lambda b, arg_types, v, i: b.extract_element(v, i))


class StorageDtype(NamedTuple):
    """A storage format of numbers in memory, with its conversion to the numbers of a vector.

    Attributes:
        name: Name of the format.
        item_bytes: Bytes of an item.
        item: LLVM type of an item.
        widen: Emits the exact conversion of a vector of items.
        loaded: numba type of the converted numbers.
    """

    name: str
    item_bytes: int
    item: ir.Type
    widen: Emitter
    loaded: types.Type = types.float32

    def vector(self, lanes: int) -> ir.Type:
        """Return the LLVM type of a vector of `lanes` items."""
        return ir.VectorType(self.item, lanes)


def _widen_bf16(builder, bits):
    """Emit the conversion of a vector of bf16 bits, each the upper half of a float32, to float32."""
    wide = integers_like(bits)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), make_constant_vector(wide, 16)), floats_like(bits))


def _widen_fp16(builder, bits):
    """Emit the conversion of a vector of fp16 bits to float32 by the CPU's own instruction."""
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), bits.type.count)), floats_like(bits))


def _widen_fp16_portable(builder, bits):
    """Emit the conversion of a vector of fp16 bits to float32 without a CPU instruction for it.

    The bits of a float32 with an exponent 112 too small are multiplied by 2^112, which is exact for subnormals too.
    """
    floats, splat_int = floats_like(bits), functools.partial(make_constant_vector, integers_like(bits))
    wide = builder.shl(builder.sext(bits, integers_like(bits)), splat_int(13))
    small = builder.bitcast(builder.and_(wide, splat_int(~(7 << 28))), floats)
    scaled = builder.fmul(small, make_constant_vector(floats, 2.0**112))
    not_finite = builder.icmp_signed("==", builder.and_(wide, splat_int(0x1F << 23)), splat_int(0x1F << 23))
    return builder.select(not_finite, builder.bitcast(builder.or_(wide, splat_int(0xFF << 23)), floats), scaled)


_HALF_VECTOR = ir.VectorType(I16, LANES)
MIN_FP16_OVERFLOW = 65520.0  # from here on, no number rounds to a finite fp16


def _to_nearest_fp16(builder, v):
    """Emit the bits of the fp16 nearest to each float32 of a vector, ties to even, by the CPU's own conversion."""
    return builder.bitcast(builder.fptrunc(v, ir.VectorType(ir.HalfType(), LANES)), _HALF_VECTOR)


def portable_to_nearest_fp16(builder, v):
    """Emit the bits of the fp16 nearest to each float32 of a vector, ties to even, by integer arithmetic.

    Magnitudes must be below MIN_FP16_OVERFLOW. A carry out of the mantissa goes into the exponent. A subnormal is rounded by
    adding 0.5: the last bit of the sum weighs what an fp16 subnormal's last bit does.
    """
    splat_int = functools.partial(make_constant_vector, INT_VECTOR)
    bits = builder.bitcast(v, INT_VECTOR)
    size = builder.and_(bits, splat_int(0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(size, splat_int(13)), splat_int(1))
    normal = builder.lshr(builder.add(size, builder.add(is_odd, splat_int(0xFFF - (112 << 23)))), splat_int(13))
    plus_half = builder.fadd(builder.bitcast(size, FLOAT_VECTOR), make_constant_vector(FLOAT_VECTOR, 0.5))
    small = builder.sub(builder.bitcast(plus_half, INT_VECTOR), splat_int(126 << 23))
    rounded = builder.select(builder.icmp_signed("<", size, splat_int(113 << 23)), small, normal)
    sign = builder.and_(builder.lshr(bits, splat_int(16)), splat_int(0x8000))
    return builder.trunc(builder.or_(rounded, sign), _HALF_VECTOR)


# Without the instruction, LLVM would call a library function that is not available.
HAS_FP16_CONVERSION = IS_ARM64 or "+f16c" in FEATURES
to_nearest_fp16 = _to_nearest_fp16 if HAS_FP16_CONVERSION else portable_to_nearest_fp16


def narrow(builder: ir.IRBuilder, storage: StorageDtype, v: ir.Value, to_nearest: Emitter = to_nearest_fp16) -> ir.Value:
    """Emit the items that store a float32 vector: fp16 bits unless the storage format is float32.

    Numbers too large for fp16 become NaN, to detect the overflow.

    Args:
        builder: The builder.
        storage: Storage format of the items.
        v: The vector.
        to_nearest: Function that emits the bits of the nearest fp16, for numbers that fit.
    """
    if storage is FP32_STORAGE:
        return v
    fits = builder.fcmp_ordered("<", call_float_function(builder, "fabs", v), make_constant_vector(v.type, MIN_FP16_OVERFLOW))
    return builder.select(fits, to_nearest(builder, v), make_constant_vector(_HALF_VECTOR, 0x7E00))


def _widen_codes(builder, codes):
    """Emit the conversion of a vector of int8 codes to float32."""
    return builder.sitofp(builder.sext(codes, integers_like(codes)), floats_like(codes))


INT8_STORAGE = StorageDtype("int8", 1, I8, _widen_codes)
UINT8_STORAGE = StorageDtype("uint8", 1, I8, lambda builder, codes: builder.zext(codes, integers_like(codes)), types.int32)
BYTE_STORAGE = StorageDtype("byte", 1, I8, lambda builder, codes: codes, types.uint8)
INT32_STORAGE = StorageDtype("int32", 4, I32, lambda builder, words: words, types.int32)
FP32_STORAGE = StorageDtype("fp32", 4, F32, lambda builder, floats: floats)
BF16_STORAGE = StorageDtype("bf16", 2, I16, _widen_bf16)
PORTABLE_FP16_STORAGE = StorageDtype("portable fp16", 2, I16, _widen_fp16_portable)
FP16_STORAGE = StorageDtype("fp16", 2, I16, _widen_fp16) if HAS_FP16_CONVERSION else PORTABLE_FP16_STORAGE


def get_storage_dtype(array_type: types.Type) -> StorageDtype:
    """Return the `StorageDtype` of a numba array type: float32, int8, or uint16, which holds fp16 bits: numba has no fp16."""
    return {types.uint16: FP16_STORAGE, types.int8: INT8_STORAGE}.get(array_type.dtype, FP32_STORAGE)


def make_load(storage: StorageDtype | None) -> CompiledFunction:
    """Return an intrinsic (array, index) that loads LANES items from a flat index on and widens them to a float32 vector.

    storage: How the items are stored; None: by the array's dtype, see `get_storage_dtype`.
    """

    def emit(builder: ir.IRBuilder, array_storage: StorageDtype, get_pointer: Callable[..., ir.Value]) -> ir.Value:
        chosen = storage or array_storage
        return chosen.widen(builder, builder.load(get_pointer(chosen.item, chosen.vector(LANES)), align=chosen.item_bytes))

    return make_intrinsic(vector, None, types.intp, emit=emit)


load = make_load(None)
load_bf16 = make_load(BF16_STORAGE)
# (array, index) -> the float of an array of float32
load_item = make_intrinsic(types.float32, None, types.intp, emit=lambda b, _, get_pointer: b.load(get_pointer(F32, F32)))


def make_store(value_type: types.Type, convert: Emitter, item: ir.Type | None = None) -> CompiledFunction:
    """Return an intrinsic (array, index, value) that converts a value and stores it at a flat index.

    Args:
        value_type: numba type of the value.
        convert: Emits what is stored: convert(builder, `StorageDtype` of the array, value).
        item: LLVM type that the index counts; None: the array's items.
    """

    def emit(builder: ir.IRBuilder, storage: StorageDtype, get_pointer: Callable[..., ir.Value], value: ir.Value) -> None:
        converted = convert(builder, storage, value)
        builder.store(converted, get_pointer(item or storage.item, converted.type), align=1)

    return make_intrinsic(types.void, None, types.intp, value_type, emit=emit)


def _narrow_number(builder, storage, x):
    return builder.extract_element(narrow(builder, storage, broadcast(builder, x, FLOAT_VECTOR)), I32(0))


store = make_store(vector, narrow)
store_item = make_store(types.float32, _narrow_number)
# The next three count the index in bytes, and take integral floats.
store_bytes = make_store(vector, lambda b, storage, v: b.trunc(b.fptosi(v, INT_VECTOR), ir.VectorType(I8, LANES)), I8)
store_byte = make_store(types.float32, lambda b, storage, x: b.fptosi(x, I8), I8)
store_int = make_store(types.float32, lambda b, storage, x: b.fptosi(x, I32), I8)
# (array, index) -> the unsigned byte at an index in bytes
load_byte = make_intrinsic(types.int64, None, types.intp, emit=lambda b, _, get_pointer: b.zext(b.load(get_pointer(I8, I8)), I64))


@intrinsic
def call_address(typingctx, function, args):
    """Call function(*args) by the function's address; it takes int64 numbers, which may be addresses, and returns nothing."""

    def codegen(context, builder, signature, values):
        numbers = cgutils.unpack_tuple(builder, values[1])
        signature = ir.FunctionType(ir.VoidType(), [I64] * len(numbers))
        builder.call(builder.inttoptr(values[0], signature.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, args), codegen


def make_tuple_loader(tuple_type: types.BaseTuple) -> CompiledFunction:
    """Return an intrinsic address -> a tuple of numbers, C-contiguous arrays and tuples, read from int64 words at the address.

    A number takes a word, an array one for its address and one for each dimension. Arrays are not copied.
    """

    def typing_function(typingctx, address):
        def codegen(context, builder, signature, args):
            from numba.np.arrayobj import populate_array  # imports most of numba, so only when compiling

            words, numbers = builder.inttoptr(args[0], I64.as_pointer()), itertools.count()

            def load_number():
                return builder.load(builder.gep(words, [I64(next(numbers))]))

            def load_value(value_type):
                if isinstance(value_type, types.BaseTuple):
                    return context.make_tuple(builder, value_type, [load_value(each) for each in value_type])
                if value_type is types.float32:
                    return builder.bitcast(builder.trunc(load_number(), I32), F32)
                if value_type is types.int64:
                    return load_number()
                array = context.make_array(value_type)(context, builder)
                data = builder.inttoptr(load_number(), array.data.type)
                shape = [load_number() for _ in range(value_type.ndim)]
                item_bytes = context.get_constant(types.intp, value_type.dtype.bitwidth // 8)
                strides = [item_bytes]
                for size in reversed(shape[1:]):
                    strides.insert(0, builder.mul(strides[0], size))
                populate_array(array, data, shape, strides, item_bytes, meminfo=None)
                return array._getvalue()

            return load_value(tuple_type)

        return tuple_type(types.int64), codegen

    return wrap_intrinsic(typing_function, 1)


def emit_at_address(emit):
    """Return a version of `emit` that takes an int64 address in the place of a pointer to an int64."""
    return lambda builder, address, *values: emit(builder, builder.inttoptr(address, I64.as_pointer()), *values)


def _emit_compare_exchange(builder, word, expected, value):
    return builder.extract_value(builder.cmpxchg(word, expected, value, "seq_cst", "seq_cst"), 0)


# address -> the int64 there
load_word = make_intrinsic(types.int64, types.int64, emit=emit_at_address(lambda b, word: b.load(word)))
# (address, expected, value): replace the int64 if it equals expected, and return the previous value
atomic_compare_exchange = make_intrinsic(types.int64, *[types.int64] * 3, emit=emit_at_address(_emit_compare_exchange))
# (address, value): store after all earlier writes (release)
atomic_store = make_intrinsic(
    types.void, *[types.int64] * 2, emit=emit_at_address(lambda b, word, n: b.store_atomic(n, word, "release", 8))
)
# address -> the int64, with all writes before its store (acquire)
atomic_load = make_intrinsic(types.int64, types.int64, emit=emit_at_address(lambda b, word: b.load_atomic(word, "acquire", 8)))
