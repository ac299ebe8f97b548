"""A matmul: the equation, the tile that computes a part of it in registers, and the kernels that run a tile over all panels.

A matrix (rows, n) lies in panels of R = PANEL_ROWS rows, columns (k) outermost, so a vector holds the rows of one column. A
tile multiplies a panel by T tokens and keeps the sums in registers. Each sum is one chain, of one row and one token, so its
bits do not depend on the number of tokens that share the tile.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import types
from numba.extending import typeof_impl

from specdec.runtime import simd, tile_simd
from specdec.runtime.code_cache import CompiledFunction, inlined, jitable, make_dispatcher
from specdec.runtime.op_program import Floats2, Floats3, ForwardContext, Ints1, Ints2, Kernel
from specdec.runtime.simd import LINE_BYTES, LINE_WORDS, MAX_TILE_TOKENS, N_REGISTERS, PANEL_ROWS, REGISTER_LANES, ceil_div, fma
from specdec.runtime.work_stealing import get_chunk_range

MAX_PAIR_TOKENS = 4 if simd.HAS_AVX512 else int(2 * PANEL_ROWS // REGISTER_LANES < N_REGISTERS)  # of a tile over two panels
# 8 KiB, the best of 4, 8 and 16 on Zen 5: 15M int8 from L3, 8 tokens take 0.53 ms, with the others 0.61 and 0.56. One token of
# Q4_K from DRAM reads 43 GB/s with AVX2, and 19 with prefetches of the current group alone.
PREFETCH_WORDS = 2048
FLOAT_BYTES = 4
# (pointers, index) -> a number of each token. With 32 registers all are loaded at once, else each vector operation loads its own;
# so with AVX-512, one token of SmolLM2 Q4_K_M would take 1.05 times as long.
get_number = tile_simd.load_number if N_REGISTERS == 32 else tile_simd.advance


@jitable
def multiply_reference(out, w, x):
    """out[t, R p + r] = sum over k of w[p, k, r] * x[t, k], in ascending k, each product added with one rounding.

    The definition of a matmul: every tile over floats gives these bits, which tests compare.
    """
    n_panels, n, rows = w.shape
    for t in range(x.shape[0]):
        for p in range(n_panels):
            for r in range(rows):
                total = 0.0
                for k in range(n):
                    total = fma(w[p, k, r], x[t, k], total)
                out[t, p * rows + r] = total


class TileShape(NamedTuple):
    """The block of sums that a tile keeps in registers of `lanes` lanes: for each of n_tokens tokens, a vector of `rows` rows."""

    rows: int
    n_tokens: int
    lanes: int = REGISTER_LANES


def choose_tile_shape(rows: int, n_tokens: int, lanes: int = REGISTER_LANES, is_weight_stationary: bool = False) -> TileShape:
    """Return the tile shape with the most rows (`rows`, half of them and so on) for which all values fit in registers.

    The values are all sums, one more register, and the weights of one k if is_weight_stationary, otherwise the weights or the
    activations, whichever are fewer. So with 16 registers of 8 lanes a tile has a panel's rows for 1 to 3 tokens, and half of
    them for 4 to 6. One thread of Zen 3 reaches 35 to 37 GMAC/s with those, of a limit of 37. Tiles over integers have one more
    vector of sums for each token, those of a group, which the count leaves out.

    Args:
        rows: Rows of a panel.
        n_tokens: Tokens of the tile.
        lanes: Lanes of a register.
        is_weight_stationary: Whether the weights of one k stay in registers.
    """
    n = rows // lanes
    while n > 1 and n * n_tokens + (n if is_weight_stationary else min(n, n_tokens)) + 1 > N_REGISTERS:
        n //= 2
    return TileShape(n * lanes, n_tokens, lanes)


class Rows(NamedTuple):
    """Rows of floats, one for each token: a pointer to the first row, and the floats from one row to the next."""

    start: tile_simd.PointerType
    stride: int


class TileArgs(NamedTuple):
    """Arguments of a tile.

    Attributes:
        out: `Rows` of sums, PANEL_ROWS floats each.
        w: Pointer to the panel of weights.
        ahead: Pointer to where the prefetch starts.
        line_step: Bytes that the prefetch advances by for each line of weights: LINE_BYTES, or less if several tiles share it.
        x: `Rows` of activations, as floats or as the weight format quantizes them.
        n: Columns, groups or blocks.
        stride: Items to the second panel of a pair, words of one of the n, or bytes to the end of a matrix of 12 bits.
        accumulate: Whether to add to out.
    """

    out: Rows
    w: tile_simd.PointerType
    ahead: tile_simd.PointerType
    line_step: int
    x: Rows
    n: int
    stride: int
    accumulate: bool


point_to_floats, point_to_bytes, point_by_dtype = map(tile_simd.make_pointer_getter, (simd.FP32_STORAGE, simd.BYTE_STORAGE, None))


@jitable
def add_product(sums, w, x):
    """Return sums + w * x, with the arguments of `dot4`."""
    return fma(w, x, sums)


@jitable
def prefetch_lines(pointer, offset, n_bytes, into_l1=False):
    """Prefetch the cache lines of n_bytes bytes, but at least one, from a byte offset on, into the second- or first-level one.

    n_bytes must be a constant for LLVM, so tiles that share a prefetch fetch some lines again: with a loop over the lines, 64
    tokens of fp32 with AVX2 take 2.3 times as long.
    """
    for line in range(0, max(n_bytes, 1), LINE_BYTES):
        if into_l1:
            tile_simd.prefetch_into_l1(pointer, offset + line, 1)
        else:
            tile_simd.prefetch(pointer, offset + line, 1)


@inlined
def get_line_step(n_tiles):
    """Return the `line_step` of n_tiles tiles that share the prefetch."""
    return ceil_div(LINE_WORDS, n_tiles) * FLOAT_BYTES


@jitable
def start_sums(outs, rows, n_tokens, accumulate):
    """Return the initial sums of a tile: out if it accumulates, else 0.

    Also prefetches out's rows of the next panel: 64 rows of logits are 64 streams, more than the hardware prefetcher follows.
    Without it, 63 tokens of SmolLM2 Q4_1 with all their logits take 1.04 times as long, and 8 tokens 0.98 times.
    """
    for row in range(0, rows, LINE_WORDS):
        tile_simd.prefetch_for_writing(outs, (PANEL_ROWS + row) * FLOAT_BYTES, n_tokens)
    return tile_simd.load_vector(outs, 0) if accumulate else tile_simd.fill_vector(outs, 0.0)


def make_float_tile(storage: simd.StorageDtype | None, shape: TileShape) -> Callable[..., None]:
    """Return a tile over a panel of float weights.

    Args:
        storage: How the weights are stored; None: as the pointer's type says.
        shape: Its rows and its maximum number of tokens.
    """
    rows, max_tokens, _ = shape
    n_blocks = PANEL_ROWS // rows  # row blocks of the panel, one after another
    get_weights, get_out = tile_simd.make_pointer_getter(storage, rows), tile_simd.make_pointer_getter(simd.FP32_STORAGE, rows)
    split_tokens = tile_simd.make_row_splitter(max_tokens)

    def tile(n_tokens, p):
        """out[t, r] (+)= sum over k of w[k, r] * x[t, k] for the rows r of a panel, and tokens t < n_tokens.

        xs, outs and sums are tuples with a pointer or a vector for each token. `fma` multiplies the weights of a column by the
        number that each token has there, and adds each product to the token's sums.
        """
        xs = split_tokens(p.x.start, p.x.stride)
        column_bytes = PANEL_ROWS * tile_simd.get_item_bytes(get_weights(p.w, 0)) // n_blocks
        step = p.line_step * column_bytes // LINE_BYTES  # bytes that the prefetch advances by for each column
        for block in range(n_blocks):
            outs = split_tokens(get_out(p.out.start, block * rows), p.out.stride)
            w, ahead = tile_simd.advance(get_weights(p.w, 0), block * rows), tile_simd.advance(p.ahead, block * step * p.n)
            sums = start_sums(outs, rows, n_tokens, p.accumulate)
            for k in range(p.n):
                prefetch_lines(ahead, k * step, column_bytes)
                sums = fma(tile_simd.load_vector(w, k * PANEL_ROWS), get_number(xs, k), sums)
            tile_simd.store_vector(outs, 0, sums, n_tokens)

    return tile


def make_pair_tile(shape: TileShape) -> Callable[..., None]:
    """Return a tile over two panels, `stride` items apart, which has more chains for few tokens; see `make_float_tile`."""
    get_weights = tile_simd.make_pointer_getter(None, PANEL_ROWS)
    get_out = tile_simd.make_pointer_getter(simd.FP32_STORAGE, PANEL_ROWS)
    split_tokens = tile_simd.make_row_splitter(shape.n_tokens)

    def tile(n_tokens, p):
        """out[t, r] (+)= sum over k of w[k, r] * x[t, k] for the rows r of two panels, and tokens t < n_tokens."""
        xs, low, high = split_tokens(p.x.start, p.x.stride), get_weights(p.w, 0), get_weights(p.w, p.stride)
        column_bytes, to_high = PANEL_ROWS * tile_simd.get_item_bytes(low), p.stride * tile_simd.get_item_bytes(low)
        low_out = split_tokens(get_out(p.out.start, 0), p.out.stride)
        high_out = split_tokens(get_out(p.out.start, PANEL_ROWS), p.out.stride)
        low_sums = start_sums(low_out, PANEL_ROWS, n_tokens, p.accumulate)
        high_sums = start_sums(high_out, PANEL_ROWS, n_tokens, p.accumulate)
        for k in range(p.n):
            prefetch_lines(p.ahead, k * column_bytes, column_bytes)
            prefetch_lines(p.ahead, k * column_bytes + to_high, column_bytes)
            low_sums = fma(tile_simd.load_vector(low, k * PANEL_ROWS), get_number(xs, k), low_sums)
            high_sums = fma(tile_simd.load_vector(high, k * PANEL_ROWS), get_number(xs, k), high_sums)
        tile_simd.store_vector(low_out, 0, low_sums, n_tokens)
        tile_simd.store_vector(high_out, 0, high_sums, n_tokens)

    return tile


@dataclass(frozen=True, eq=False)
class Tile:
    """The tiles of a weight format, as one function that compiled code calls: tile(n_tokens, TileArgs).

    A tile is compiled once for each number of rows and lanes, with sums for the most tokens of such a shape, and then inlined for
    each number of tokens. There it stores only the sums of those tokens, and LLVM removes all that belongs to the others.

    Attributes:
        make: Returns the tile of a shape, a function (n_tokens, `TileArgs`).
        choose_shape: (rows, tokens) -> shape.
        max_tokens: Maximum number of tokens.
    """

    make: Callable[[TileShape], Callable[..., None]]
    choose_shape: Callable[[int, int], TileShape] = choose_tile_shape
    max_tokens: int = MAX_TILE_TOKENS

    @property
    def limits(self) -> tuple[int, int]:
        """The maximum numbers of tokens of a tile, and of one that still covers all rows of a panel at once."""
        fits = (t for t in range(1, self.max_tokens + 1) if self.choose_shape(PANEL_ROWS, t).rows == PANEL_ROWS)
        return self.max_tokens, max(fits, default=0)

    def get_shapes(self) -> list[TileShape]:
        """Return the shape for each number of tokens, with the maximum number of tokens of its rows and lanes."""
        shapes = [self.choose_shape(PANEL_ROWS, t) for t in range(1, self.max_tokens + 1)]
        max_tokens = {(shape.rows, shape.lanes): shape.n_tokens for shape in shapes}  # the last of each
        return [shape._replace(n_tokens=max_tokens[shape.rows, shape.lanes]) for shape in shapes]

    @functools.cached_property
    def dispatcher(self) -> CompiledFunction:
        """The numba dispatcher of tile(n_tokens, args)."""
        shapes = self.get_shapes()
        tiles = {shape: make_dispatcher(self.make(shape), is_inlined=True) for shape in dict.fromkeys(shapes)}
        return make_dispatcher(_make_switch([tiles[shape] for shape in shapes]))


def _make_switch(tiles: list[CompiledFunction]) -> Callable[..., None]:
    """Return a function that calls the tile for n_tokens tokens, with a constant number of tokens.

    Its source has a branch for each tile, since numba cannot index a tuple of different functions. With 16 registers of 4 lanes
    there is no tile over two panels.
    """
    cases = (f"    if n_tokens == {t}:\n        tile_{t}({t}, args)\n" for t in range(1, len(tiles) + 1))
    names: dict[str, Any] = {f"tile_{t}": tile for t, tile in enumerate(tiles, 1)}
    exec("def call_tile(n_tokens, args):\n" + ("".join(cases) or "    return\n"), names)
    call_tile: Callable[..., None] = names["call_tile"]
    return call_tile


@typeof_impl.register(Tile)
def _get_type_of_tile(tile: Tile, context: object) -> types.Type:
    return types.Dispatcher(tile.dispatcher)


@inlined
def get_rows(array, t, column):
    """Return the `Rows` of an array of floats (T, n) from row t on, each from a column on."""
    return Rows(point_to_floats(array, t * array.shape[1] + column), array.shape[1])


@inlined
def multiply_panels(tile, limits, out, first_panel, w, x, accumulate):
    """out[t] (+)= W x[t] for all panels w and rows x[t], by a `Tile` with its limits; w[0] is panel first_panel of out.

    A tile over all rows prefetches from its own panel. With several row blocks or tiles, the first finds its panel in the cache:
    each of the earlier ones has prefetched a part of it, so memory is never idle while they compute. On Zen 5 that takes 0.89
    and 0.94 of the time at 16 and 64 tokens in fp32, 0.95 and 0.97 in int8.
    """
    n_panels, n, stride = w.shape
    n_tokens, words = x.shape[0], n * stride
    n_tiles = ceil_div(n_tokens, limits[0])
    line_step = get_line_step(n_tiles)
    for panel in range(n_panels):
        start = panel * words
        for i in range(n_tiles):
            t, end = get_chunk_range(n_tokens, i, n_tiles)
            ahead = start + (PREFETCH_WORDS if n_tokens <= limits[1] else words + i * words // n_tiles)
            weights, ahead_start = point_to_floats(w, start), point_to_bytes(w, ahead)
            out_rows = get_rows(out, t, (first_panel + panel) * PANEL_ROWS)
            tile(end - t, TileArgs(out_rows, weights, ahead_start, line_step, get_rows(x, t, 0), n, stride, accumulate != 0))


class Panels(NamedTuple):
    """Several panels of stored floats.

    Attributes:
        start: Pointer to the first.
        stride: Items from one to the next.
        n_panels: Their number.
        ahead: Items from what is read to what is prefetched.
    """

    start: tile_simd.PointerType
    stride: int
    n_panels: int
    ahead: int


tile_by_dtype: CompiledFunction = Tile(functools.partial(make_float_tile, None))
pair_tile_by_dtype: CompiledFunction = Tile(make_pair_tile, lambda rows, n_tokens: TileShape(rows, n_tokens), MAX_PAIR_TOKENS)


@jitable
def multiply_stored_panels(out, w, x, n, n_tokens, accumulate):
    """out[t] (+)= w x[t] for w (`Panels` of float32, fp16 or int8 codes), where out and x are `Rows`.

    With up to MAX_PAIR_TOKENS tokens, a tile covers two panels: one has so few sums that each addition would wait for the
    previous one. Attention over 1,000 positions takes 0.88 (f16) and 0.94 (q8) of the time for one token.
    """
    panel = 0
    while panel < w.n_panels:
        start = tile_simd.advance(w.start, panel * w.stride)
        ahead = point_to_bytes(tile_simd.advance(start, w.ahead), 0)
        rows = Rows(tile_simd.advance(out.start, panel * PANEL_ROWS), out.stride)
        args = TileArgs(rows, start, ahead, LINE_BYTES, x, n, w.stride, accumulate)
        if n_tokens <= MAX_PAIR_TOKENS and panel + 1 < w.n_panels:
            pair_tile_by_dtype(n_tokens, args)
            panel += 2
        else:
            tile_by_dtype(n_tokens, args)
            panel += 1


# Kernels


class MatmulArgs(NamedTuple):
    """Arguments of the kernel that `Matrix.matmul` runs.

    accumulate and logits_only are 0 or 1; first_panel and n_total_panels: see `Matrix`.
    """

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    n: int
    group_size: int
    accumulate: int
    unit: int
    logits_only: int
    first_panel: int
    n_total_panels: int


class ExpertMatmulArgs(NamedTuple):
    """Arguments of the kernel that `Matrix.expert_matmul` runs; see there for per_token."""

    out: Floats2
    w: Floats3
    x: Floats3
    scratch: Floats3
    gathered: Floats3
    tokens: Ints2
    starts: Ints2
    n: int
    group_size: int
    per_token: int
    unit: int


@inlined
def get_chunk_panels(run, p):
    """Return the first and the end panel of `MatmulArgs.w` in this chunk of the whole matrix, split `unit` panels at a time."""
    first, last = get_chunk_range(p.n_total_panels // p.unit, run.chunk, run.n_chunks)
    first = max(p.unit * first - p.first_panel, 0)
    return first, max(min(p.unit * last - p.first_panel, p.w.shape[0]), first)


def make_matmul(tile: Tile, get_activations: CompiledFunction) -> Callable[..., None]:
    """Return the kernel function of `Matrix.matmul` that multiplies by a tile.

    Args:
        tile: The tile.
        get_activations: Inlined function (run, thread, args, n_tokens) that returns x in the form that the tile takes.
    """
    limits = tile.limits

    def matmul(run: ForwardContext, thread: int, p: MatmulArgs) -> None:
        first, last = get_chunk_panels(run, p)
        n_tokens = run.n_logits if p.logits_only else run.n_tokens
        x = get_activations(run, thread, p, n_tokens)
        multiply_panels(tile, limits, p.out, p.first_panel + first, p.w[first:last], x[:n_tokens], p.accumulate)

    return matmul


def make_expert_matmul(tile: Tile, get_activations: CompiledFunction) -> Callable[..., None]:
    """Return the kernel function of `Matrix.expert_matmul` that multiplies this chunk's panels of every expert by a tile.

    The tile needs the rows of x of one expert's tokens next to each other. With one row per slot they are; with one row per token
    they are copied if tokens lie between them.
    """
    limits = tile.limits

    def expert_matmul(run: ForwardContext, thread: int, p: ExpertMatmulArgs) -> None:
        rows = get_activations(run, thread, p, run.n_tokens * max(p.per_token, 1))
        starts, slot_tokens, gathered = p.starts[thread], p.tokens[thread], p.gathered[thread]
        expert_panels = p.w.shape[0] // (starts.size - 1)
        first, last = get_chunk_range(expert_panels // p.unit, run.chunk, run.n_chunks)
        first, last = p.unit * first, p.unit * last
        for expert in range(starts.size - 1):
            start, end = starts[expert], starts[expert + 1]
            n = end - start
            if n == 0:
                continue
            at = start if p.per_token > 0 else slot_tokens[start]
            x = rows[at : at + n]
            if p.per_token == 0 and slot_tokens[end - 1] != at + n - 1:  # tokens ascend, so these rows are not consecutive
                for i in range(n):
                    token = slot_tokens[start + i]
                    for k in range(rows.shape[1]):
                        gathered[i, k] = rows[token, k]
                x = gathered[:n]
            w = p.w[expert * expert_panels + first : expert * expert_panels + last]
            multiply_panels(tile, limits, p.out[start:end], first, w, x, False)

    return expert_matmul


def make_embed(get_weight: CompiledFunction) -> Callable[..., None]:
    """Return the kernel function of `Matrix.embed`, out[t] = W[tokens[t]]; get_weight: see `make_kernels`."""

    def embed(run: ForwardContext, thread: int, out: Floats2, w: Floats3, tokens: Ints1, n: int, group_size: int) -> None:
        first, last = get_chunk_range(n, run.chunk, run.n_chunks)
        for t in range(run.n_tokens):
            panel, row = divmod(tokens[t], PANEL_ROWS)
            out[t, n:] = 0.0  # an earlier pass may have left NaN there
            for k in range(first, last):
                out[t, k] = get_weight(w, panel, row, k, n, group_size)

    return embed


def make_kernels(
    module: str, prefix: str, tile: Tile, get_activations: CompiledFunction, get_weight: CompiledFunction
) -> dict[str, Kernel]:
    """Return the kernels of a `WeightFormat` by their names there, registered in a module with a prefix.

    Args:
        module: Name of the module.
        prefix: Prefix of their names in the module.
        tile: The tile; see `make_matmul`.
        get_activations: See `make_matmul`.
        get_weight: Inlined function (w, panel, row, k, n, group_size) that returns column k of a panel's row as float32.
    """
    functions = make_matmul(tile, get_activations), make_expert_matmul(tile, get_activations), make_embed(get_weight)
    return {function.__name__: Kernel(function).register(prefix + function.__name__, module) for function in functions}
