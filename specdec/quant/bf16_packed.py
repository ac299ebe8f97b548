"""bf16 weights in 12 bits, without a loss: the lower byte of each as it is, of the upper one a code of 4 bits.

The upper byte, a sign and 7 bits of the exponent, takes few values in a strip: the 16 commonest stand in its table. So unpacking
is a look-up of bytes and an interleaving of both, whose words of 32 bits become two floats each by a shift and by a mask, in as
many instructions as widening bf16 takes. Where a quad of columns holds an upper byte that is not in the table, the quad's upper
bytes lie in a pool as they are: every weight is there when its turn in the chain of products comes.

A strip is a head and quads, in lines of 192 bytes. Words of the head are counted back from the quads: the table, the number of
the strip's first slot in the pool, and a byte for each quad: whether it has a slot, the next one. A quad: 64 bytes of two codes,
the lower halves those of rows 0 to 15; 64 lower bytes of these rows, then 64 of the others. Byte 16 l + 8 (k // 2) + 2 j + k % 2
is that of row 4 l + j, column k of the quad. The pool is what all strips of a matrix leave free at its end: slots of 128 bytes,
from the end on.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specdec.quant.bf16_packed_llvm import (  # fmt: skip
    FIRST_SLOT,
    FLAGS_END,
    HALF,
    LINE_WORDS,
    QUAD,
    SLOT_BYTES,
    SLOTS_USED,
    TABLE,
    Quads,
    best_lookup,
    float_of,
    pack_quads,
    packed_body,
    packed_shape,
    unpack_by,
    words_between,
)
from specdec.quant.fp32 import turn_rows, unpack_rows
from specdec.quant.half import BF16, bits_as
from specdec.quant.matmul import Product, own_strips
from specdec.quant.matrix import ALL, Floats, NoRoom
from specdec.runtime.code_cache import inlined, inner
from specdec.runtime.program import Bytes2, Floats2, Floats3, Halves2, Halves3, Ints1, Pass, Words3, on_all_threads, operation
from specdec.runtime.simd import Float32, ceil_div, load_byte
from specdec.runtime.threads import available_threads
from specdec.runtime.tile import (  # fmt: skip
    FEATURES,
    FLOAT_TOKENS,
    HAS_AVX512,
    PREFETCH_WORDS,
    REGISTERS,
    STRIP_ROWS,
    Strided,
    Strip,
    make_tile,
    strip_tile,
)
from specdec.runtime.work_stealing import share

QUADS_PER_SLOT = 16  # of normal numbers .9% of the quads need a slot, of the worst matrix of SmolLM2 2.4%
MOST_TOKENS = 8 if REGISTERS == 32 else 5  # of a tile
# Tokens from which on a part of a strip becomes floats once for all of them: AVX2, 64 tokens 1.05 of bf16's speed, else 0.88.
# AVX-512 does 1.1 of it as it is.
MANY_TOKENS, HAS_PARTS = 9, not HAS_AVX512
COUNTED, COUNTERS = 1024, 4  # columns that a table looks at, of n at least half; that take turns, so that none waits for itself
PART = 256  # columns of that: its floats stay in the cache


@inner
def head_words(n):
    """Of a strip of n quads: whole lines."""
    return ceil_div(FLAGS_END + n, 4 * LINE_WORDS) * LINE_WORDS


@inner
def quads_of(w, n, strip):
    """The word at which a strip's quads begin in w (P, lines, words), and how many there are from it to the end."""
    head = head_words(n)
    at = strip * (head + n * LINE_WORDS) + head
    return at, w.shape[0] * w.shape[1] * w.shape[2] - at


@inner
def byte_of(row, k):
    """Of the 128 of a quad: the one of a row of its strip, column k."""
    half, row = divmod(row, 16)
    return half * HALF + row // 4 * 16 + k // 2 * 8 + row % 4 * 2 + k % 2


LOOKUP = best_lookup(FEATURES)
unpack = unpack_by(LOOKUP)
packed_tile, PACKED_TOKENS = make_tile("packed_tile", packed_body(LOOKUP), packed_shape, MOST_TOKENS)


@inlined
def multiply_by(tile, run, thread, p):
    """out[t] (+)= W x[t] by a tile over packed weights: this part's strips; see `Matrix.product` and `multiply_strips`."""
    first, last = own_strips(run, p)
    n_tokens = run.n_logits if p.of_logits else run.n_tokens
    x, n, n_parts = p.x[thread if p.x.shape[0] > 1 else 0], p.n // QUAD, ceil_div(n_tokens, MOST_TOKENS)
    words = quads_of(p.w, n, 1)[0] - quads_of(p.w, n, 0)[0]
    for strip in range(first, last):
        at, to_end = quads_of(p.w, n, strip)
        for part in range(n_parts):
            t, end = share(n_tokens, part, n_parts)
            ahead = at + (PREFETCH_WORDS if n_tokens <= PACKED_TOKENS.whole else words + part * words // n_parts)
            tile(
                Strided(p.out, t * p.out.shape[1] + (p.first + strip) * STRIP_ROWS, p.out.shape[1]),
                Strip(p.w, at, ahead, ceil_div(LINE_WORDS, n_parts)),
                Strided(x, t * x.shape[1], x.shape[1]), n, to_end, end - t, p.adding != 0,
            )  # fmt: skip


@inlined
def multiply_parts(run, thread, p):
    """The same for many tokens, by the tile over floats, which a part of a strip becomes once for all of them."""
    first, last = own_strips(run, p)
    n_tokens = run.n_logits if p.of_logits else run.n_tokens
    x, n, n_parts = p.x[thread if p.x.shape[0] > 1 else 0], p.n // QUAD, ceil_div(n_tokens, FLOAT_TOKENS.most)
    floats, step = p.scratch[thread], PART // QUAD
    away, slot = words_between(floats, p.w), np.int64(0)
    for strip in range(first, last):
        at, to_end = quads_of(p.w, n, strip)
        for q in range(0, n, step):
            q_end = min(q + step, n)
            slot = unpack(floats, 0, Quads(p.w, at, n, to_end), q, q_end, slot)
            for part in range(n_parts):
                t, end = share(n_tokens, part, n_parts)
                ahead = away + at + q_end * LINE_WORDS + part * (step * LINE_WORDS) // n_parts
                strip_tile(
                    Strided(p.out, t * p.out.shape[1] + (p.first + strip) * STRIP_ROWS, p.out.shape[1]),
                    Strip(floats, 0, ahead, ceil_div(LINE_WORDS // QUAD, n_parts)),
                    Strided(x, t * x.shape[1] + q * QUAD, x.shape[1]), (q_end - q) * QUAD, 0, end - t, p.adding != 0 or q > 0,
                )  # fmt: skip


@operation
def product(run: Pass, thread: int, p: Product) -> None:
    """By the one or the other."""
    if HAS_PARTS and (run.n_logits if p.of_logits else run.n_tokens) >= MANY_TOKENS:
        multiply_parts(run, thread, p)
    else:
        multiply_by(packed_tile, run, thread, p)


@operation
def embed(run: Pass, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group: int) -> None:
    """out[t] = W[tokens[t]]: this part's columns, those that it goes on with; see `Matrix.embedding`."""
    first, last = share(n, run.part, run.n_parts)
    for t in range(run.n_tokens):
        strip, row = divmod(tokens[t], STRIP_ROWS)
        out[t, n:] = 0.0  # what an earlier pass left there may be NaN
        at, to_end = quads_of(w, n // QUAD, strip)
        byte, slot = 4 * at, np.int64(0)
        for i in range(4):
            slot |= load_byte(w, byte - 4 * FIRST_SLOT + i) << 8 * i
        for q in range(ceil_div(last, QUAD)):
            has_slot = load_byte(w, byte - FLAGS_END - n // QUAD + q)
            if QUAD * (q + 1) > first:
                place = byte + 4 * LINE_WORDS * q
                for k in range(max(first - QUAD * q, 0), min(last - QUAD * q, QUAD)):
                    i = byte_of(row, k)
                    if has_slot:
                        upper = load_byte(w, byte + 4 * to_end - min((slot + 1) * SLOT_BYTES, 4 * to_end) + i)
                    else:
                        code = load_byte(w, place + i % HALF) >> i // HALF * 4 & 15
                        upper = load_byte(w, byte - TABLE + code)
                    out[t, QUAD * q + k] = float_of(upper, load_byte(w, place + HALF + i))
            slot += has_slot


@inner
def choose(octets, at, counts, columns):
    """The 16 commonest upper bytes of columns (n, R), or of some of those, from a byte on; counts (COUNTERS, 256)."""
    counts[:] = 0
    for k in range(0, columns.shape[0], max(columns.shape[0] // COUNTED, 1)):
        for r in range(0, STRIP_ROWS, COUNTERS):
            for i in range(COUNTERS):
                counts[i, columns[k, r + i] >> 8] += np.uint32(1)
    for i in range(1, COUNTERS):
        for upper in range(counts.shape[1]):
            counts[0, upper] += counts[i, upper]
    for i in range(TABLE):
        best = 0
        for upper in range(1, counts.shape[1]):
            if counts[0, upper] > counts[0, best]:
                best = upper
        octets[0, at + i] = best
        counts[0, best] = 0


class Filling(NamedTuple):
    """What `fill_quads` takes: every stride-th of strips, their bytes (1, all), rows (rows, n); of each thread room for columns
    (threads, n, R) and counts (threads, COUNTERS, 256); slots: how many each strip needs, which it tells, or its first one."""

    strips: Floats3
    octets: Bytes2
    first: int
    stride: int
    rows: Halves2
    columns: Halves3
    counts: Words3
    slots: Ints1


@operation
def fill_quads(run: Pass, thread: int, p: Filling) -> None:
    """Rows into strips, but for the pool."""
    n = p.rows.shape[1] // QUAD
    columns, first_column = p.columns[thread], thread * p.columns.shape[1] * STRIP_ROWS
    begin, end = share(p.slots.size, run.part, run.n_parts)
    for strip in range(begin, end):
        rows = p.rows[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS]
        turn_rows(columns, rows)
        for k in range(columns.shape[0]):
            for r in range(rows.shape[0], STRIP_ROWS):
                columns[k, r] = 0
        at, _ = quads_of(p.strips, n, p.first + p.stride * strip)
        choose(p.octets, 4 * at - TABLE, p.counts[thread], columns)
        p.slots[strip] = pack_quads(p.strips, at, n, p.columns, first_column)


@operation
def fill_pool(run: Pass, thread: int, p: Filling) -> None:
    """The upper bytes of quads that need a slot into the pool."""
    n = p.rows.shape[1] // QUAD
    begin, end = share(p.slots.size, run.part, run.n_parts)
    for strip in range(begin, end):
        at, to_end = quads_of(p.strips, n, p.first + p.stride * strip)
        rows, slot = p.rows[strip * STRIP_ROWS : (strip + 1) * STRIP_ROWS], p.slots[strip]
        for i in range(4):
            p.octets[0, 4 * (at - FIRST_SLOT) + i] = slot >> 8 * i & 255
        for q in range(n):
            if p.octets[0, 4 * at - FLAGS_END - n + q]:
                slot += 1
                place = 4 * (at + to_end) - slot * SLOT_BYTES
                for r in range(rows.shape[0]):
                    for k in range(QUAD):
                        p.octets[0, place + byte_of(r, k)] = rows[r, QUAD * q + k] >> 8


@operation
def unpack_strips(run: Pass, thread: int, out: Floats3, strips: Floats3, strip: int) -> None:
    """The floats (P, n, R) of strips from one of them on."""
    n, first_slot = out.shape[1] // QUAD, np.int64(0)
    begin, end = share(out.shape[0], run.part, run.n_parts)
    for i in range(begin, end):
        at, to_end = quads_of(strips, n, strip + i)
        unpack(out, i * out.shape[1] * STRIP_ROWS, Quads(strips, at, n, to_end), 0, n, first_slot)


def slots_of(n: int) -> int:
    """For a strip of n quads."""
    return int(ceil_div(n, QUADS_PER_SLOT))


def fill(strips: Float32, first: int, stride: int, rows: Floats, group: int) -> None:
    """`Kind.fill`. Raises ValueError for rows of another type, NoRoom where the pool is full."""
    rows = np.ascontiguousarray(bits_as("bf16", rows))
    n, threads, octets = rows.shape[1] // QUAD, available_threads(), strips.view(np.uint8).reshape(1, -1)
    slots = np.zeros(ceil_div(len(rows), STRIP_ROWS), np.int64)
    room = np.empty((threads, rows.shape[1], STRIP_ROWS), np.uint16), np.empty((threads, COUNTERS, 256), np.uint32)
    filling = strips, octets, first, stride, rows, *room, slots
    on_all_threads(fill_quads(*filling))
    used = strips.view(np.uint32).reshape(-1)[quads_of(strips, n, 0)[0] - SLOTS_USED :][:1]
    *slots[:], total = itertools.accumulate(slots.tolist(), initial=int(used[0]))  # from how many to the first of each
    if total > len(strips) * slots_of(n):
        raise NoRoom
    used[0] = total
    on_all_threads(fill_pool(*filling))


def rows_of(strips: Float32, n: int, group: int, block: slice = ALL) -> Float32:
    """`Kind.rows`, widened."""
    first, last, _ = block.indices(len(strips))
    floats = np.empty((last - first, n, STRIP_ROWS), np.float32)
    on_all_threads(unpack_strips(floats, strips, first))
    return unpack_rows(floats, n)


def strip_shape(n: int, group: int) -> tuple[int, int]:
    """`Kind.strip_shape`: a head, quads, and a strip's share of the pool."""
    quads = n // QUAD
    n_pool = ceil_div(slots_of(quads) * SLOT_BYTES, 4 * LINE_WORDS)
    return head_words(quads) // LINE_WORDS + quads + n_pool, LINE_WORDS


def scratch_words(n: int, group: int) -> int:
    """`Kind.scratch_words`: together a part's floats, of as many tokens as take parts."""
    return int(ceil_div(PART * STRIP_ROWS, MANY_TOKENS)) if HAS_PARTS else 1


def is_whole(n: int) -> bool:
    """Whether rows of n columns can be packed: they are quads."""
    return n % QUAD == 0


PACKED_BF16 = replace(
    BF16, name="bf16 in 12 bits", product=product, embed=embed, strip_shape=strip_shape, fill=fill, rows=rows_of,
    scratch_words=scratch_words, of_experts=BF16, instead=BF16,
)  # fmt: skip
