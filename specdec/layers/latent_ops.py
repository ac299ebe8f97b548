"""Kernels of latent attention (MLA): the latent vector and rotated keys of a token, its queries, and attention over latents.

Shapes: T tokens of this pass, S cached positions, H heads, N and E rows of a head that RoPE leaves and rotates, C rows of the
latent vector, V rows of a value head, R rows of a panel; W, the columns of a cached position: C and E, each padded to panels.
A slot is one head of one token; the slots of a head follow each other, so that each head's own matrix is read once.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.kernels import AttentionArgs, attend_in_tiles, find_score_panels, get_position, make_query_tile, mix_values, norm_row
from specdec.quant.matmul import Rows, Tile, TileShape, point_by_dtype, point_to_floats
from specdec.runtime import tile_simd
from specdec.runtime.code_cache import CompiledFunction, jitable
from specdec.runtime.op_program import Codes4, Floats2, Floats3, ForwardContext, Halves4, Ints1, Ints2, Kernel, kernel
from specdec.runtime.simd import FP32_STORAGE, HAS_AVX512, LANES, PANEL_ROWS, ceil_div, fma, load, round_up, store
from specdec.runtime.work_stealing import get_chunk_range

MAX_DOT_QUERIES = 4 if HAS_AVX512 else 2
# Rows of a tile of up to half of these, and of one of more: enough sums to hide an addition's time, few enough for registers.
DOT_ROWS, MANY_DOT_ROWS = (8, 4) if HAS_AVX512 else (4, 2)


@jitable
def rotate_pairs(out, to, x, at, cos, sin, n):
    """out[to : to + n] = x[at : at + n] with each pair rotated by a position's angles; cos, sin: its rows of RoPE's tables."""
    for k in range(0, n, 2):
        first, second = x[at + k], x[at + k + 1]
        out[to + k] = first * cos[k] + second * sin[k]
        out[to + k + 1] = second * cos[k + 1] + first * sin[k + 1]


class LatentArgs(NamedTuple):
    """Arguments of the kernel `compute_latents`.

    Attributes:
        out: Output (T, W); padding columns are 0.
        x: (T, ...); the latent vector and the rows to rotate are the columns from `base` on.
        weight: Norm weights of the latent vector (1, C padded).
        kv_rank: C.
        rope_dim: E.
        cos, sin: See `fill_rope_tables`.
        depths: See `build_tree_paths`.
    """

    out: Floats2
    x: Floats2
    base: int
    weight: Floats2
    eps: float
    kv_rank: int
    rope_dim: int
    cos: Floats2
    sin: Floats2
    depths: Ints1


@kernel
def compute_latents(run: ForwardContext, thread: int, p: LatentArgs) -> None:
    """out[t] = what the cache keeps of this chunk's tokens: rms_norm(latent vector), and the rotated rows of keys."""
    first, last = get_chunk_range(run.n_tokens, run.chunk, run.n_chunks)
    for t in range(first, last):
        norm_row(p.out, t * p.out.shape[1], p.x, t * p.x.shape[1] + p.base, p.weight, 0, p.kv_rank, p.eps)
        position, to = get_position(run, p.depths, t), round_up(p.kv_rank, PANEL_ROWS)
        rotate_pairs(p.out[t], to, p.x[t], p.base + p.kv_rank, p.cos[position], p.sin[position], p.rope_dim)


@kernel
def gather_heads(run: ForwardContext, thread: int, out: Floats3, starts: Ints2, x: Floats2, stride: int, n: int) -> None:
    """out[thread, slot] = the n columns of the slot's head in its token's row x[t]; heads are `stride` columns apart.

    Also fills starts[thread] (H + 1): the first slot of each head. Each thread fills its own copies. For 64 tokens, 16 heads of
    512 columns take 47 us; one number after the other, they would take 226.
    """
    if run.is_first_chunk == 0:
        return
    n_heads = starts.shape[1] - 1
    starts[thread, n_heads] = n_heads * run.n_tokens
    whole = n // LANES * LANES
    for head in range(n_heads):
        starts[thread, head] = head * run.n_tokens
        for t in range(run.n_tokens):
            slot, at = head * run.n_tokens + t, head * stride
            to, row = (thread * out.shape[1] + slot) * out.shape[2], t * x.shape[1] + at
            for k in range(0, whole, LANES):
                store(out, to + k, load(x, row + k))
            for k in range(whole, n):
                out[thread, slot, k] = x[t, at + k]


@kernel
def scatter_heads(run: ForwardContext, thread: int, out: Floats2, slots: Floats2, n_heads: int, stride: int, n: int) -> None:
    """out[t] = the first n columns of the slots of token t, heads `stride` columns apart: those that this chunk has computed.

    They are this chunk's share of the panels of each head in the preceding `Matrix.expert_matmul`.
    """
    first, last = get_chunk_range(ceil_div(n, PANEL_ROWS), run.chunk, run.n_chunks)
    for head in range(n_heads):
        for t in range(run.n_tokens):
            slot = head * run.n_tokens + t
            for k in range(first * PANEL_ROWS, min(last * PANEL_ROWS, n)):
                out[t, head * stride + k] = slots[slot, k]


class RotateQueriesArgs(NamedTuple):
    """Arguments of the kernel `rotate_queries`.

    Attributes:
        out: Queries (T, H W).
        x: Heads of N + E columns (T, ...).
        cos, sin: See `fill_rope_tables`.
        depths: See `build_tree_paths`.
    """

    out: Floats2
    x: Floats2
    n_heads: int
    head_dim: int
    rope_dim: int
    cache_width: int
    latent_width: int
    cos: Floats2
    sin: Floats2
    depths: Ints1


@kernel
def rotate_queries(run: ForwardContext, thread: int, p: RotateQueriesArgs) -> None:
    """Write the rotated rows of this chunk's share of the query heads behind their absorbed rows."""
    first, last = get_chunk_range(p.n_heads, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        position = get_position(run, p.depths, t)
        for head in range(first, last):
            at = (head + 1) * p.head_dim - p.rope_dim
            to = head * p.cache_width + p.latent_width
            rotate_pairs(p.out[t], to, p.x[t], at, p.cos[position], p.sin[position], p.rope_dim)


class DotArgs(NamedTuple):
    """Arguments of the tile of `make_dot_tile`.

    Attributes:
        out: `Rows` of dot products, one for each query.
        rows: Pointer to the first row in the first of its panels; PANEL_ROWS numbers from one row to the next.
        panel_stride: Numbers from a panel to the next.
        queries: `Rows` of floats.
        n_panels: Panels of a row.
    """

    out: Rows
    rows: tile_simd.PointerType
    panel_stride: int
    queries: Rows
    n_panels: int


def choose_dot_shape(rows: int, n_queries: int) -> TileShape:
    """Return the shape of a tile of dot products: the rows and the queries of its sums."""
    return TileShape(DOT_ROWS if n_queries <= MAX_DOT_QUERIES // 2 else MANY_DOT_ROWS, n_queries)


def make_dot_tile(shape: TileShape) -> Callable[..., None]:
    """Return a tile of dot products between queries and rows that lie in panels of columns, such as the cached positions."""
    n_rows, max_queries, _ = shape
    get_rows = tile_simd.make_pointer_getter(None, n_rows * LANES, LANES)
    get_floats = tile_simd.make_pointer_getter(FP32_STORAGE, LANES, LANES)
    split_queries = tile_simd.make_row_splitter(max_queries)

    def tile(n_queries, p):
        """out[q, r] = queries[q] . row r for a few rows, and queries q < n_queries.

        A sum is one chain per lane, over the vectors of a row in order, then a tree over lanes. So its bits do not depend on the
        other sums of the tile. `queries`, `outs` and `sums` are tuples with an element for each query.
        """
        queries = split_queries(get_floats(p.queries.start, 0), p.queries.stride)
        outs = split_queries(get_floats(p.out.start, 0), p.out.stride)
        rows = get_rows(p.rows, 0)
        sums = tile_simd.fill_vector(split_queries(rows, 0), 0.0)  # of n_rows parts
        for panel in range(p.n_panels):
            for half in range(0, PANEL_ROWS, LANES):
                query = tile_simd.load_vector(queries, panel * PANEL_ROWS + half)
                sums = fma(tile_simd.load_rows(rows, panel * p.panel_stride + half), query, sums)
        tile_simd.store_vector(outs, 0, tile_simd.add_lanes(sums), n_queries)

    return tile


dot_tile: CompiledFunction = Tile(make_dot_tile, choose_dot_shape, MAX_DOT_QUERIES)


@jitable
def compute_dots(p, n_rows, n_queries):
    """Compute the dot products of `DotArgs` for n_queries queries and n_rows rows, a multiple of PANEL_ROWS."""
    query = 0
    while query < n_queries:
        n = min(n_queries - query, MAX_DOT_QUERIES)
        step = DOT_ROWS if n <= MAX_DOT_QUERIES // 2 else MANY_DOT_ROWS
        queries = Rows(tile_simd.advance(p.queries.start, query * p.queries.stride), p.queries.stride)
        for row in range(0, n_rows, step):
            out = Rows(tile_simd.advance(p.out.start, query * p.out.stride + row), p.out.stride)
            dot_tile(n, DotArgs(out, tile_simd.advance(p.rows, row * PANEL_ROWS), p.panel_stride, queries, p.n_panels))
        query += n


@jitable
def attend_to_latents(run, thread, p, head, token, n_queries, along_heads):
    """out[t, head] = softmax(scale q[t, head] . keys) latents for n_queries from the given token and head on; see `attend`.

    p: `AttentionArgs` with out (1, T, H C padded), absorbed and rotated queries (T, H W), and values (1, W / R, S, R): a key is a
    whole row, a value its first C columns. acc (threads, MAX_TILE_TOKENS, C padded).
    """
    cached, scores, acc, width = p.values[0], p.scores[thread], p.acc[thread], p.values.shape[1] * PANEL_ROWS
    tile = make_query_tile(run, p.depths, head, token, n_queries, along_heads)
    block, n_panels = find_score_panels(run, tile, p.window)
    queries = point_to_floats(p.qkv, token * p.qkv.shape[1] + head * width)
    dots = DotArgs(
        Rows(point_to_floats(scores, block * PANEL_ROWS), scores.shape[1]),
        point_by_dtype(cached, block * PANEL_ROWS * PANEL_ROWS),
        cached.shape[1] * PANEL_ROWS,
        Rows(queries, tile.next_token * p.qkv.shape[1] + tile.next_head * width),
        cached.shape[0],
    )
    compute_dots(dots, n_panels * PANEL_ROWS, n_queries)
    latents = cached[: acc.shape[1] // PANEL_ROWS]
    mix_values(run, p, tile, scores, acc, (latents, p.value_scales[0]), p.value_scales[0])
    for i in range(n_queries):
        t, at = token + tile.next_token * i, (head + tile.next_head * i) * acc.shape[1]
        for k in range(0, acc.shape[1], LANES):
            store(p.out, t * p.out.shape[2] + at + k, load(acc, i * acc.shape[1] + k))


@kernel
def latent_attention_f32(run: ForwardContext, thread: int, p: AttentionArgs) -> None:
    """Compute attention over latent vectors for this chunk's share of all heads of all tokens; see `attend_in_tiles`."""
    attend_in_tiles(attend_to_latents, run, thread, p, 1)


# For each dtype of the KV cache, the kernel that reads latent vectors
LATENT_ATTENTION: dict[type, Kernel] = {
    np.float32: latent_attention_f32,
    np.uint16: latent_attention_f32.specialize("latent_attention_f16", keys=Halves4, values=Halves4),
    np.int8: latent_attention_f32.specialize("latent_attention_q8", keys=Codes4, values=Codes4),
}
