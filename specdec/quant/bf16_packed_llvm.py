"""Quads of bf16 weights in 12 bits, as LLVM's code reads and writes them; `packed` says how they lie."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specdec.runtime.simd import (  # fmt: skip
    F32,
    I8,
    I16,
    I32,
    I64,
    IS_ARM64,
    broadcast,
    constants,
    element_pointer,
    emitted,
    llvm,
    multiply_add,
    shuffle,
)
from specdec.runtime.tile import LINE_BYTES, REGISTER_LANES, REGISTERS, STRIP_ROWS, Shape, Sweep, Tile, cells, const, prefetch

QUAD = 4  # columns
HALF = 64  # bytes of 16 rows of a quad
LINE_WORDS, SLOT_BYTES = 48, 2 * HALF
TABLE = 16  # bytes
FIRST_SLOT, SLOTS_USED = 5, 6  # words back from the quads; how many slots are taken stands in the first head alone
FLAGS_END = 4 * SLOTS_USED  # bytes back
TOGETHER = REGISTERS // 8  # vectors that are unpacked before they are multiplied

Lookup = tuple[str, int]  # an instruction, "" for none, and the bytes that it looks up at a time


def best_lookup(features: Sequence[str], most: int = 64) -> Lookup:
    """What looks bytes up in a table of 16, at most so many at a time, on a CPU of those LLVM features."""
    if "+avx512vbmi" in features and most >= 64:
        return "llvm.x86.avx512.permvar.qi.512", 64
    if "+avx512bw" in features and most >= 64:
        return "llvm.x86.avx512.pshuf.b.512", 64
    if "+avx2" in features and most >= 32:
        return "llvm.x86.avx2.pshuf.b", 32
    if "+ssse3" in features or "+avx" in features:
        return "llvm.x86.ssse3.pshuf.b.128", 16
    return ("llvm.aarch64.neon.tbl1.v16i8" if IS_ARM64 else "", 64)


def interleaved(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Those lanes of both vectors, of b behind those of a."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def looked_up(builder: Any, table: Any, codes: Any, lookup: Lookup) -> Any:
    """The bytes of a table (16,) that codes (n,) say, whose upper 4 bits are of no meaning."""
    (name, size), n = lookup, codes.type.count
    if n > size:
        first, last = (looked_up(builder, table, shuffle(builder, codes, part), lookup) for part in halves(n))
        return interleaved(builder, first, last, range(n))
    if size < HALF or "permvar" not in name:
        codes = builder.and_(codes, constants(codes.type, TABLE - 1))
    if name:
        return llvm(builder, name, codes.type, shuffle(builder, table, [i % TABLE for i in range(n)]), codes)
    found = shuffle(builder, table, [0] * n)
    for i in range(1, TABLE):
        is_it = builder.icmp_unsigned("==", codes, constants(codes.type, i))
        found = builder.select(is_it, shuffle(builder, table, [i] * n), found)
    return found


def halves(n: int) -> tuple[list[int], list[int]]:
    """The lanes of both halves of a vector."""
    return [*range(n // 2)], [*range(n // 2, n)]


class Quad(NamedTuple):
    """Of a strip: where it lies, whether it has a slot, and which one."""

    place: Any
    has_slot: Any
    slot: Any


class Quads(NamedTuple):
    """Of a strip: the array that it is in, the word at which they begin, their number, and the words from there to the end."""

    array: Any
    at: Any
    n: Any
    to_end: Any


class Packed:
    """A strip as LLVM's code reads it, in vectors of so many rows, from its quads on.

    n: how many it has; to_end: words from them to the matrix's end, where the pool begins; slot: what makes the next slot of the
    strip's first one. A head that was damaged names what lies between the strip and that end at the most.
    """

    def __init__(self, builder: Any, quads: Any, n: Any, to_end: Any, lanes: int, lookup: Lookup, slot: Any = None) -> None:
        self.builder, self.lanes, self.lookup = builder, lanes, lookup
        self.octets, self.words, self.floats = (
            ir.VectorType(kind, n) for kind, n in ((I8, QUAD * lanes), (I32, lanes), (F32, lanes))
        )
        self.quads, self.to_end = builder.bitcast(quads, I8.as_pointer()), builder.shl(to_end, const(2))
        self.flags = builder.gep(self.quads, [builder.sub(const(-FLAGS_END), n)])
        self.table = self.load(self.quads, const(-TABLE), ir.VectorType(I8, TABLE), TABLE)
        first = builder.zext(self.load(self.quads, const(-4 * FIRST_SLOT), I32, 4), I64)
        self.slot = cgutils.alloca_once_value(builder, first if slot is None else slot(first))

    def load(self, pointer: Any, at: Any, kind: Any, align: int) -> Any:
        """What lies so many bytes behind a pointer."""
        place = self.builder.gep(pointer, [at])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=align)

    def quad(self, number: Any) -> Quad:
        """Quads follow each other."""
        builder, slot = self.builder, self.builder.load(self.slot)
        flag = builder.load(builder.gep(self.flags, [number]))
        builder.store(builder.add(slot, builder.zext(flag, I64)), self.slot)
        place = builder.gep(self.quads, [builder.mul(number, const(4 * LINE_WORDS))])
        return Quad(place, builder.icmp_unsigned("!=", flag, I8(0)), slot)

    def weights(self, quad: Quad, rows: list[Any]) -> list[list[Any]]:
        """The floats of each of its columns, in a vector from each of those rows on."""
        builder, align = self.builder, QUAD * self.lanes
        uppers = [cgutils.alloca_once(builder, self.octets) for _ in rows]
        halves = [builder.lshr(row, const(4)) for row in rows]
        within = [builder.shl(builder.and_(row, const(15)), const(2)) for row in rows]
        places = [builder.add(builder.mul(half, const(HALF)), at) for half, at in zip(halves, within, strict=True)]
        with builder.if_else(quad.has_slot, likely=False) as (in_pool, coded):
            with in_pool:
                back = builder.mul(builder.add(quad.slot, const(1)), const(SLOT_BYTES))
                back = builder.select(builder.icmp_unsigned("<", back, self.to_end), back, self.to_end)
                slot = builder.gep(self.quads, [builder.sub(self.to_end, back)])
                for upper, place in zip(uppers, places, strict=True):
                    builder.store(self.load(slot, place, self.octets, align), upper)
            with coded:
                for upper, half, at in zip(uppers, halves, within, strict=True):
                    shift = broadcast(builder, builder.trunc(builder.shl(half, const(2)), I32), self.words)
                    codes = builder.lshr(self.load(quad.place, at, self.words, align), shift)
                    codes = builder.bitcast(codes, self.octets)
                    builder.store(looked_up(builder, self.table, codes, self.lookup), upper)
        columns: list[list[Any]] = [[] for _ in range(QUAD)]
        for upper, place in zip(uppers, places, strict=True):
            lower = self.load(quad.place, builder.add(place, const(HALF)), self.octets, align)
            for pair in range(2):
                first = [16 * i + 8 * pair + j for i in range(self.lanes // 4) for j in range(8)]
                lanes = [lane for j in first for lane in (j, j + align)]
                both = builder.bitcast(interleaved(builder, lower, builder.load(upper), lanes), self.words)
                even, odd = builder.shl(both, constants(self.words, 16)), builder.and_(both, constants(self.words, -1 << 16))
                columns[2 * pair].append(builder.bitcast(even, self.floats))
                columns[2 * pair + 1].append(builder.bitcast(odd, self.floats))
        return columns


def packed_shape(rows: int, n_tokens: int) -> Shape:
    """Half of that many rows, a quarter and so on, until sums and the words of a few vectors fit in registers."""
    n_vectors = rows // REGISTER_LANES
    while n_vectors > 1 and n_vectors * n_tokens + 2 * min(n_vectors, TOGETHER) + 2 > REGISTERS:
        n_vectors //= 2
    return Shape(REGISTER_LANES, n_vectors, n_tokens)


def packed_body(lookup: Lookup) -> Any:
    """The body of a tile over packed weights, n quads, n_quads words from them to the matrix's end."""

    def emit(builder: Any, shape: Shape, sweep: Sweep, tile: Tile) -> None:
        lanes, n_vectors, n_tokens = shape
        places, starts = cells(builder, shape, sweep, tile)
        totals = [cgutils.alloca_once_value(builder, start) for start in starts]
        strip = Packed(builder, tile.w, tile.n, tile.n_quads, lanes, lookup)
        ahead, ahead_stride = sweep.ahead(builder, tile.ahead, tile.ahead_stride, tile.n)
        starts_of_x = [builder.gep(tile.x, [builder.mul(tile.x_stride, const(t))]) for t in range(n_tokens)]
        together = min(n_vectors, TOGETHER)

        def activations(t: int, k: int, at: Any) -> Any:
            place = builder.gep(starts_of_x[t], [at])
            if not IS_ARM64:
                return broadcast(builder, builder.load(builder.gep(place, [const(k)])), strip.floats)
            four = builder.load(builder.bitcast(place, strip.floats.as_pointer()), align=4)  # whose lanes fmla takes
            return shuffle(builder, four, [k] * lanes)

        with cgutils.for_range(builder, tile.n) as quads:
            quad, at = strip.quad(quads.index), builder.shl(quads.index, const(2))
            fetched = builder.gep(ahead, [builder.mul(quads.index, ahead_stride)])
            for line in range(0, 4 * LINE_WORDS // sweep.total, LINE_BYTES):
                prefetch(builder, fetched, const(line))
            for first in range(0, n_vectors, together):
                vectors = range(first, first + together)
                weights = strip.weights(quad, [builder.add(sweep.row, const(lanes * v)) for v in vectors])
                for k in range(QUAD):
                    for t in range(n_tokens):
                        x_k = activations(t, k, at)
                        for v in vectors:
                            total = totals[t * n_vectors + v]
                            builder.store(multiply_add(builder, weights[k][v - first], x_k, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)

    return emit


def pointer_to(context: Any, builder: Any, signature: Any, args: Any, i: int, at: Any, kind: Any = F32) -> Any:
    """To an item of the array that is argument i."""
    return element_pointer(context, builder, signature.args[i], args[i], at, kind)


def unpack_by(lookup: Lookup) -> Any:
    """The intrinsic unpack(out, out_at, strip: `Quads`, first, last, slot).

    Quads of a strip from first to last become floats (k, R), from an item of out on; slot: of the first of them, which
    the strip's head tells of quad 0. Returns that of the next one.
    """

    @intrinsic
    def unpack(typingctx, out, out_at, strip, first, last, slot):
        signature = types.int64(out, types.int64, strip, *[types.int64] * 3)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            begin = pointer_to(context, builder, signature, args, 0, args[1])
            given, (first, last, slot) = Quads(*cgutils.unpack_tuple(builder, args[2])), args[3:]
            quads = element_pointer(context, builder, signature.args[2][0], given.array, given.at, F32)

            def slot_of(head: Any) -> Any:
                return builder.select(builder.icmp_signed("==", first, const(0)), head, slot)

            lanes = REGISTER_LANES
            strip = Packed(builder, quads, given.n, given.to_end, lanes, lookup, slot_of)
            with cgutils.for_range(builder, builder.sub(last, first)) as indexes:
                quad = strip.quad(builder.add(first, indexes.index))
                place = builder.gep(begin, [builder.mul(indexes.index, const(QUAD * STRIP_ROWS))])
                for row in range(0, STRIP_ROWS, TOGETHER * lanes):
                    rows = [row + lanes * v for v in range(min(TOGETHER, STRIP_ROWS // lanes))]
                    for k, vectors in enumerate(strip.weights(quad, [const(r) for r in rows])):
                        for r, floats in zip(rows, vectors, strict=True):
                            to = builder.gep(place, [const(k * STRIP_ROWS + r)])
                            builder.store(floats, builder.bitcast(to, strip.floats.as_pointer()), align=4)
            return builder.load(strip.slot)

        return signature, codegen

    return unpack


@intrinsic
def words_between(typingctx, a, b):
    """From an array's begin to that of another one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        begin, end = (pointer_to(context, builder, signature, args, i, const(0)) for i in range(2))
        return builder.ashr(builder.sub(builder.ptrtoint(end, I64), builder.ptrtoint(begin, I64)), const(2))

    return types.int64(a, b), codegen


def _float_of(builder: Any, upper: Any, lower: Any) -> Any:
    """The float32 of the two bytes of a bf16."""
    bits = builder.or_(builder.shl(upper, const(24)), builder.shl(lower, const(16)))
    return builder.bitcast(builder.trunc(bits, I32), F32)


float_of = emitted(types.float32, *[types.int64] * 2, emit=_float_of)


@intrinsic
def pack_quads(typingctx, strips, quads_at, n, columns, columns_at):
    """n quads from a word of strips on, by the table in front of them, of columns (k, R) of halves from an item on.

    Tells of each whether it needs a slot; returns how many do.
    """
    signature = types.int64(strips, types.int64, types.int64, columns, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n, octets, of_half = args[2], ir.VectorType(I8, HALF), ir.VectorType(I16, STRIP_ROWS // 2)
        quads = builder.bitcast(pointer_to(context, builder, signature, args, 0, args[1]), I8.as_pointer())
        source = pointer_to(context, builder, signature, args, 3, args[4], I16)
        table = builder.load(builder.bitcast(builder.gep(quads, [const(-TABLE)]), ir.VectorType(I8, TABLE).as_pointer()), align=1)
        needed = cgutils.alloca_once_value(builder, const(0))
        lanes = [k * 16 + 4 * i + j for i in range(4) for pair in range(2) for j in range(4) for k in (2 * pair, 2 * pair + 1)]
        with cgutils.for_range(builder, n) as indexes:
            q, codes, known = indexes.index, [], []
            place = builder.gep(quads, [builder.mul(q, const(4 * LINE_WORDS))])
            here = builder.gep(source, [builder.mul(q, const(QUAD * STRIP_ROWS))])
            for half in range(2):
                items = [builder.gep(here, [const(k * STRIP_ROWS + half * 16)]) for k in range(QUAD)]
                columns = [builder.load(builder.bitcast(item, of_half.as_pointer()), align=2) for item in items]
                low, high = (interleaved(builder, columns[k], columns[k + 1], range(STRIP_ROWS)) for k in (0, 2))
                both = interleaved(builder, low, high, lanes)
                upper = builder.trunc(builder.lshr(both, constants(both.type, 8)), octets)
                code, is_known = constants(octets, 0), constants(octets, 0)
                for i in reversed(range(TABLE)):
                    is_it = builder.icmp_unsigned("==", upper, shuffle(builder, table, [i] * HALF))
                    code = builder.select(is_it, constants(octets, i), code)
                    is_known = builder.or_(is_known, builder.sext(is_it, octets))
                to = builder.gep(place, [const(HALF + half * HALF)])
                builder.store(builder.trunc(both, octets), builder.bitcast(to, octets.as_pointer()), align=1)
                codes.append(code)
                known.append(is_known)
            byte = builder.or_(codes[0], builder.shl(codes[1], constants(octets, 4)))
            builder.store(byte, builder.bitcast(place, octets.as_pointer()), align=1)
            all_known = llvm(builder, f"llvm.vector.reduce.and.v{HALF}i8", I8, builder.and_(*known))
            needs = builder.zext(builder.icmp_signed("!=", all_known, I8(-1)), I64)
            flag = builder.gep(quads, [builder.add(builder.sub(const(-FLAGS_END), n), q)])
            builder.store(builder.trunc(needs, I8), flag)
            builder.store(builder.add(builder.load(needed), needs), needed)
        return builder.load(needed)

    return signature, codegen
