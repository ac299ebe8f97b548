"""int8 weights and activations in groups that share a scale: exact integer sums per group, and one chain of float sums.

Symmetric as in llama2.c's export.py: scale = max |w| / 127 over a group of consecutive weights, w is about value * scale.

A panel is (groups, words). A group of columns holds the scales of the R rows, then words, the rows innermost: a word holds a
row's weights of 4 columns as the bytes w + 128. Activations (T, words) hold for each group its scale, the correction for the zero
point of the weights, the sum of scale * codes, and the codes, 4 to a word.
"""

import math
import os
from collections.abc import Callable
from functools import partial

import numpy as np

from specdec.quant.dot4 import DOT4_BY_NAME, Dot4, choose_dot4
from specdec.quant.matmul import Tile, TileShape, get_number, make_kernels, prefetch_lines, start_sums
from specdec.quant.packed_matrix import Floats, Int8Rows, WeightFormat, to_float32
from specdec.runtime import simd, tile_simd
from specdec.runtime.code_cache import CompiledFunction, compiled, inlined, make_dispatcher
from specdec.runtime.op_program import Codes3, Floats2, ForwardContext, Words2, Words3, Words4, kernel, run_on_all_threads
from specdec.runtime.simd import LANES, PANEL_ROWS, Float32, absolute, ceil_div, div, fma, load, maximum, minimum, mul, splat
from specdec.runtime.work_stealing import get_chunk_range

BYTES_PER_WORD = 4
ZERO_CODES_WORD = np.uint32(0x80808080)  # four weights of 0 as stored
GROUP_HEADER_WORDS = 3  # words before a group's activation codes: its scale, its correction and its sum


def make_int8_tile(dot: Dot4, shape: TileShape) -> Callable[..., None]:
    """Return the tile of a shape over groups of int8 weights, with byte products by `dot`."""
    rows, max_tokens, lanes = shape
    n_blocks = PANEL_ROWS // rows  # row blocks of the panel, one after another
    get_words = tile_simd.make_pointer_getter(simd.INT32_STORAGE, rows, lanes)
    get_floats = tile_simd.make_pointer_getter(simd.FP32_STORAGE, rows, lanes)
    split_tokens = tile_simd.make_row_splitter(max_tokens)
    prepare, dot4 = dot.prepare, dot.dot4

    def tile(n_tokens, p):
        """out[t, r] (+)= sum over groups g of (sum over k in g of w[r, k] * x[t, k]) * scale of w[r, g] * scale of x[t, g].

        The integer sums of a group are exact, so their order is free. Its float sum enters its row's chain in order. p.n is the
        number of groups, p.stride the words of a group for all rows. The tuples of `xs` and the sums have an element for each
        token.
        """
        group_words, n_words = p.stride, p.stride // PANEL_ROWS - 1
        x_words = GROUP_HEADER_WORDS + n_words
        step = p.line_step * rows // simd.LINE_WORDS  # bytes that the prefetch advances by for a word
        xs = split_tokens(get_words(p.x.start, 0), p.x.stride)
        x_scales = split_tokens(get_floats(p.x.start, 0), p.x.stride)
        for block in range(n_blocks):
            outs = split_tokens(get_floats(p.out.start, block * rows), p.out.stride)
            ahead = tile_simd.advance(p.ahead, block * step * p.n * (1 + n_words))
            totals = start_sums(outs, rows, n_tokens, p.accumulate)
            for g in range(p.n):
                at, x_at = g * group_words + block * rows, g * x_words
                words, scales = get_words(p.w, at), tile_simd.load_vector(get_floats(p.w, at), 0)
                sums = tile_simd.fill_vector(words, get_number(xs, x_at + 1))
                for i in range(n_words):
                    prefetch_lines(ahead, (g * (1 + n_words) + 1 + i) * step, rows * BYTES_PER_WORD, into_l1=True)
                    weights = prepare(tile_simd.load_vector(words, (1 + i) * PANEL_ROWS))
                    sums = dot4(sums, weights, get_number(xs, x_at + GROUP_HEADER_WORDS + i))
                totals = fma(tile_simd.to_float(sums), mul(scales, get_number(x_scales, x_at)), totals)
            tile_simd.store_vector(outs, 0, totals, n_tokens)

    return tile


def make_tile(instruction_set: str) -> tuple[Tile, CompiledFunction]:
    """Return the tile over int8 weights for an instruction set of `choose_dot4`, and its function get_activations."""
    dot = DOT4_BY_NAME[instruction_set]
    zero_point = 0 if dot.is_signed else 128
    return Tile(partial(make_int8_tile, dot), dot.choose_tile_shape, dot.max_tokens), make_activation_getter(zero_point)


DOT4_NAME = "portable" if os.environ.get("SPECDEC_PORTABLE", "") not in ("", "0") else choose_dot4(simd.CPU_FEATURES)


def make_group_quantizer(round_to_integer: CompiledFunction, min_scale: np.float32) -> CompiledFunction:
    """Return the compiled function quantize_group(codes, at, rows, row, start, end, size) -> the scale and the sum of the codes.

    It quantizes the numbers `start` to `end` (exclusive) of a row to int8: code = round(number / scale), scale = max |number| /
    127. It writes `size` codes from byte `at` of the array codes on, zeros after the last. If a number is not finite, scale and
    sum are NaN.

    Args:
        round_to_integer: Rounds a vector.
        min_scale: A smaller scale becomes 0.
    """

    def quantize_group(codes, at, rows, row, start, end, size):
        lowest, limit, row_start = splat(-127.0), splat(127.0), row * rows.shape[1]
        whole = start + (end - start) // LANES * LANES
        top = splat(0.0)
        for i in range(start, whole, LANES):
            top = maximum(absolute(load(rows, row_start + i)), top)
        for i in range(whole, end):
            top = maximum(absolute(splat(rows[row, i])), top)
        scale = simd.reduce_max(top) / np.float32(127.0)
        if scale < min_scale:
            scale = np.float32(0.0)
        divisor = splat(scale if scale > 0.0 else np.float32(1.0))
        total = splat(0.0)
        for i in range(start, whole, LANES):
            code = round_to_integer(div(load(rows, row_start + i), divisor))
            code = maximum(lowest, minimum(limit, code))  # in this order a NaN stays one
            total = simd.add(total, code)
            simd.store_bytes(codes, at + i - start, code)
        group_total = simd.reduce_add(total)
        for i in range(whole, start + size):
            code = splat(rows[row, i] if i < end else np.float32(0.0))
            code = simd.reduce_max(maximum(lowest, minimum(limit, round_to_integer(div(code, divisor)))))
            group_total += code
            simd.store_byte(codes, at + i - start, code)
        return scale + np.float32(0.0) * group_total, group_total

    return make_dispatcher(quantize_group, is_inlined=True)


quantize_activation_group = make_group_quantizer(simd.round_half_away, np.float32(0.0))
# A smaller scale has so few bits that a code may reach 190.
quantize_weight_group = make_group_quantizer(simd.rint, np.finfo(np.float32).tiny)


@compiled
def quantize_activations(codes, x, n, group_size, n_tokens, zero_point, block_groups):
    """Quantize rows x[t, :n] to int8 in codes (the rule of runq.c), in groups; see `make_group_quantizer`.

    Halves round away from 0. codes (T, words) holds for each group its scale, the correction -zero_point * sum of codes, the sum
    of scale * codes, and the codes, 4 to a word, zeros after the last. A group that is not finite has a NaN scale. The last block
    of block_groups groups is filled up with groups of zeros.
    """
    group_words = ceil_div(group_size, BYTES_PER_WORD)
    for t in range(n_tokens):
        for g in range(simd.round_up(ceil_div(n, group_size), block_groups)):
            start, end = min(g * group_size, n), min((g + 1) * group_size, n)
            at = g * (GROUP_HEADER_WORDS + group_words)
            first_byte, size = (t * codes.shape[1] + at) * BYTES_PER_WORD, group_words * BYTES_PER_WORD
            codes_byte = first_byte + GROUP_HEADER_WORDS * BYTES_PER_WORD
            scale, total = quantize_activation_group(codes, codes_byte, x, t, start, end, size)
            codes[t, at] = scale
            simd.store_int(codes, first_byte + BYTES_PER_WORD, np.float32(-zero_point) * total)
            codes[t, at + 2] = scale * total


def make_activation_getter(zero_point: int, block_groups: int = 1) -> CompiledFunction:
    """Return the inlined function get_activations of `make_matmul` for a tile over weights with this zero point.

    block_groups: Groups of a block of weights.
    """

    @inlined
    def get_activations(run, thread, p, n_tokens):
        """Return this thread's activations x quantized to int8, as a tile over groups takes them.

        Quantizes x into the thread's scratch in its first chunk of the phase: x of one thread would need a phase of its own.
        """
        codes = p.scratch[thread]
        if run.is_first_chunk:
            x = p.x[thread if p.x.shape[0] > 1 else 0]
            quantize_activations(codes, x, p.n, p.group_size, n_tokens, zero_point, block_groups)
        return codes

    return get_activations


@inlined
def get_weight(w, panel, row, k, n, group_size):
    """Return the weight of a panel's row in column k as float32: code * scale."""
    i_group, i = divmod(k, group_size)
    word = (panel * w.shape[1] + i_group) * w.shape[2] + (1 + i // BYTES_PER_WORD) * PANEL_ROWS + row
    code = simd.load_byte(w, word * BYTES_PER_WORD + i % BYTES_PER_WORD) - 128
    return np.float32(code) * w[panel, i_group, row]


@kernel
def quantize_all_groups(
    run: ForwardContext, thread: int, values: Codes3, scales: Floats2, rows: Floats2, group_size: int
) -> None:
    """Quantize rows (rows, n) to int8, into values (rows, groups, group size) and scales (rows, groups).

    Zeros fill up the last group; see `make_group_quantizer`.
    """
    first, last = get_chunk_range(rows.shape[0], run.chunk, run.n_chunks)
    n, n_groups = rows.shape[1], scales.shape[1]
    for row in range(first, last):
        for g in range(n_groups):
            start, end = g * group_size, min((g + 1) * group_size, n)
            at = (row * n_groups + g) * group_size
            scales[row, g], _ = quantize_weight_group(values, at, rows, row, start, end, group_size)


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


class QuantizedFormat(WeightFormat):
    """A format whose activations are int8 in groups; see `quantize_activations`."""

    def get_scratch_words(self, n: int, group_size: int) -> int:
        """Return the words of a token's n activations in groups of int8."""
        return int(ceil_div(n, group_size) * (GROUP_HEADER_WORDS + ceil_div(group_size, BYTES_PER_WORD)))


class Int8Format(QuantizedFormat):
    """Panels (P, groups, words) of int8 weights in groups that share a scale; see the module."""

    def get_group_size(self, n: int, file_group: int) -> int:
        """Return 64, or 32 if 64 does not divide n: tiles reach 86 to 88% of the arithmetic with 64, and 76% with 32 (Zen 5).

        For a file with groups, it is the greatest common divisor of n and the file's group size, so that no group crosses the end
        of a row.
        """
        if file_group:
            return math.gcd(file_group, n)
        return 64 if n % 64 == 0 else 32

    def get_panel_shape(self, n: int, group_size: int) -> tuple[int, int]:
        """Return the groups and words of a panel."""
        return ceil_div(n, group_size), (1 + ceil_div(group_size, BYTES_PER_WORD)) * PANEL_ROWS

    def pack(self, panels: Float32, first: int, stride: int, rows: Floats | Int8Rows, group_size: int) -> None:
        """Pack rows, quantized if they are floats; see `WeightFormat.pack`. The weights that pad rows and groups are 0."""
        grouped = rows if isinstance(rows, Int8Rows) else quantize_rows(to_float32(rows), group_size)
        n_words = panels.shape[2] // PANEL_ROWS - 1
        words = panels.view(np.uint32).reshape(len(panels), -1, 1 + n_words, PANEL_ROWS)
        values = grouped.values
        if group_size % BYTES_PER_WORD:
            values = np.pad(values, ((0, 0), (0, 0), (0, -group_size % BYTES_PER_WORD)))
        codes, scales = (np.ascontiguousarray(array).view(np.uint32) for array in (values, grouped.scales))
        run_on_all_threads(pack_words(words, first, stride, codes, scales))


def _make_weight_format(prefix: str, instruction_set: str) -> Int8Format:
    return Int8Format(name="int8", **make_kernels(__name__, prefix, *make_tile(instruction_set), get_weight))


NATIVE_INT8 = _make_weight_format("", choose_dot4(simd.CPU_FEATURES))
PORTABLE_INT8 = _make_weight_format("portable_", "portable")
INT8 = PORTABLE_INT8 if DOT4_NAME == "portable" else NATIVE_INT8
