"""Kernels of the forward pass: norms, RoPE, KV cache writes and attention. No kernel depends on an architecture.

Two properties hold by construction, and the tests compare bits:

- Batch and thread invariance: the logits at a position depend only on the tokens up to it. Every dot product is one chain of
  fused multiply-adds in ascending k for its own (row, token), whatever the tile, T or the thread count.
- NaN and infinity propagate: no kernel turns a NaN into a number.

The weight formats (`quant/`) define embedding and matmul. Every kernel computes its own chunk of the work.

Shapes: T tokens of this pass, S cached positions, D dim, F hidden_dim, L n_layers, H query heads, G KV heads, K head_dim,
V vocab_size, R rows of a panel. `run` is the forward context: n_tokens tokens, the first of them in cache slot `pos`.

A sequence fills the cache slots in order of position. From slot seq_len on, the slots may hold the nodes of a token tree, each
after its parent. Siblings share a position, and a node attends only to the sequence, its ancestors and itself; `depths` and
`paths` describe the tree (see `build_tree_paths`). Every computation depends on positions, not on slots, so the results equal
those of a chain of the same tokens bit for bit.
"""

from typing import NamedTuple

import numpy as np

from specdec.quant.matmul import PREFETCH_WORDS, Panels, Rows, multiply_stored_panels, point_by_dtype, point_to_floats
from specdec.runtime import simd
from specdec.runtime.code_cache import compiled, inlined, jitable
from specdec.runtime.elementary import exp, sincos, tanh
from specdec.runtime.op_program import Floats1, Floats2, Floats3, Floats4, ForwardContext, Halves4, Ints1, Ints2, Kernel, kernel
from specdec.runtime.simd import LANES, MAX_TILE_TOKENS, PANEL_ROWS, add, fma, load, maximum, mul, splat, sqrt, store
from specdec.runtime.work_stealing import get_chunk_range

MAX_BATCH_TOKENS = 64  # tokens of one forward pass; longer prompts take several passes


class KVFormat(NamedTuple):
    """A format of the KV cache: its dtype, the kernels that write and read the cache, and whether it has scales."""

    dtype: type
    store_keys: Kernel
    store_values: Kernel
    attention: Kernel
    is_scaled: bool = False


@jitable
def sum_squares(x, start, n):
    """Return the sum of squares of n floats of x from flat index `start` on: whole vectors first, then the rest one by one."""
    whole, squares = n // LANES * LANES, splat(0.0)
    for i in range(start, start + whole, LANES):
        v = load(x, i)
        squares = fma(v, v, squares)
    total = simd.reduce_add(squares)
    for i in range(start + whole, start + n):
        total += simd.load_item(x, i) * simd.load_item(x, i)
    return total


@jitable
def compute_norm_scale(x, row, width, dim, eps):
    """Return 1 / sqrt(mean(x^2) + eps) of the dim numbers of x from flat index `row` on; zeros pad the row to `width`."""
    total = sum_squares(x, row, width)
    # The last term makes the row NaN where the squares overflow: 1 / infinity would give zeros, and finite logits from them.
    return np.float32(1.0) / sqrt(total / np.float32(dim) + eps) + np.float32(0.0) * total


@inlined
def norm_row(out, to, x, at, weight, weight_at, n, eps):
    """Compute out[to + k] = weight[weight_at + k] x[at + k] / sqrt(mean(x^2) + eps) for k < n; indexes are flat."""
    scale = compute_norm_scale(x, at, n, n, eps)
    whole = n // LANES * LANES
    for k in range(0, whole, LANES):
        store(out, to + k, mul(load(weight, weight_at + k), mul(load(x, at + k), splat(scale))))
    for k in range(whole, n):
        simd.store_item(out, to + k, simd.load_item(weight, weight_at + k) * (simd.load_item(x, at + k) * scale))


class RMSNormArgs(NamedTuple):
    """Arguments of the kernel `rms_norm`.

    Attributes:
        out: Output (threads, T, ...), filled from `column` on.
        x: Input (1, T, D padded).
        weight: (D padded,).
        dim: D.
        eps: Number added to the mean of the squares.
        logits_only: 1: only the last n_logits tokens, written from out[0] on; 0: all tokens.
        column: First column of out that is filled.
    """

    out: Floats3
    x: Floats3
    weight: Floats1
    dim: int
    eps: float
    logits_only: int
    column: int


@kernel
def rms_norm(run: ForwardContext, thread: int, p: RMSNormArgs) -> None:
    """out[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps)  (Zhang and Sennrich 2019); zeros pad the rows.

    Each thread fills its own copy of out, which saves a barrier. logits_only: takes only the last n_logits tokens and writes them
    from out[0] on.
    """
    if run.is_first_chunk == 0:
        return
    out, x, weight, dim, eps, logits_only, column = p
    n_tokens = run.n_logits if logits_only else run.n_tokens
    first, width = run.n_tokens - n_tokens, x.shape[2]
    for t in range(n_tokens):
        row, target = (first + t) * width, (thread * out.shape[1] + t) * out.shape[2] + column
        scale = splat(compute_norm_scale(x, row, width, dim, eps))
        for i in range(0, width, LANES):
            store(out, target + i, mul(load(weight, i), mul(load(x, row + i), scale)))


class AddNormArgs(NamedTuple):
    """Arguments of `add_norm`; see `RMSNormArgs`.

    Attributes:
        x: Residual stream (T, D padded).
        branch: Output of a branch (1, T, D padded), complete when this phase starts.
        factor: Factor of the sum.
        adds: 1: add to x; 0: replace x.
    """

    x: Floats2
    branch: Floats3
    weight: Floats1
    dim: int
    eps: float
    factor: float
    adds: int


@kernel
def add_norm(run: ForwardContext, thread: int, p: AddNormArgs) -> None:
    """x[t] = factor (x[t] + rms_norm(branch[t])) for the panels of this chunk, without x[t] if adds is 0."""
    x, branch, weight, dim, eps, factor, adds = p
    width = x.shape[1]
    first, last = get_chunk_range(width // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        scale = splat(compute_norm_scale(branch, t * width, width, dim, eps))
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            at = t * width + i
            normed = mul(load(branch, at), scale)
            total = fma(load(weight, i), normed, load(x, at)) if adds else mul(load(weight, i), normed)
            store(x, at, mul(splat(factor), total))


class LayerNormArgs(NamedTuple):
    """Arguments of `layer_norm`; see `RMSNormArgs`."""

    out: Floats3
    x: Floats3
    weight: Floats1
    bias: Floats1
    dim: int
    eps: float
    logits_only: int


@kernel
def layer_norm(run: ForwardContext, thread: int, p: LayerNormArgs) -> None:
    """out[t] = weight * (x[t] - mean) / sqrt(variance + eps) + bias  (Ba et al. 2016); otherwise like `rms_norm`."""
    if run.is_first_chunk == 0:
        return
    out, x, weight, bias, dim, eps, logits_only = p
    n_tokens = run.n_logits if logits_only else run.n_tokens
    first, width = run.n_tokens - n_tokens, x.shape[2]
    for t in range(n_tokens):
        row, target = (first + t) * width, (thread * out.shape[1] + t) * width
        sums = splat(0.0)
        for i in range(0, width, LANES):
            sums = add(load(x, row + i), sums)
        minus_mean = splat(-simd.reduce_add(sums) / np.float32(dim))
        for i in range(0, width, LANES):
            store(out, target + i, add(load(x, row + i), minus_mean))
        out[thread, t, dim:] = 0.0  # the padding must not count in the variance
        scale = splat(compute_norm_scale(out, target, width, dim, eps))
        for i in range(0, width, LANES):
            store(out, target + i, fma(load(weight, i), mul(load(out, target + i), scale), load(bias, i)))


@inlined
def get_position(run, depths, t):
    """Return the position of token t of the pass in its sequence, or on its path through the tree."""
    slot = run.pos + t
    return slot if slot < run.seq_len else run.seq_len + depths[slot - run.seq_len]


@kernel
def copy_rows(run: ForwardContext, thread: int, out: Floats2, x: Floats3, to: int, start: int, n: int, by_slot: int) -> None:
    """Copy n columns of each token's row of x, from column `start` on, to out, from column `to` on; this chunk copies its share.

    by_slot: 1: the row of out is the token's cache slot; 0: its index in the pass. x (threads or 1, T, columns): one copy per
    thread, or one for all threads.
    """
    first, last = get_chunk_range(n, run.chunk, run.n_chunks)
    row, source = run.pos if by_slot else 0, thread if x.shape[0] > 1 else 0
    for t in range(run.n_tokens):
        for k in range(first, last):
            out[row + t, to + k] = x[source, t, start + k]


@compiled
def build_tree_paths(depths, paths, parents, n):
    """Fill the depth of each of n nodes of a token tree, and the path to it, from the nodes' parents.

    A parent is an earlier node, or -1 for nodes that follow the sequence. A node's position is seq_len + its depth.
    paths[node, depth] is the node at that depth on the way to `node`; the last entry is the node itself.
    """
    for node in range(n):
        parent, depth = parents[node], 0
        if parent >= 0:
            depth = depths[parent] + 1
            for i in range(depth):
                paths[node, i] = paths[parent, i]
        depths[node], paths[node, depth] = depth, node


@compiled
def move_kv_slots(keys, values, key_scales, value_scales, path, seq_len):
    """Move a layer's KV cache entries of one path of a token tree to the slots that follow the sequence.

    path: Nodes from depth 0 on. keys, values (G, ...) and their scales (G, S), which may be empty.
    """
    for head in range(values.shape[0]):
        for depth in range(path.size):
            if path[depth] == depth:  # a tree that stores its likeliest path first mostly has nothing to move
                continue
            (block, lane), (panel, row) = divmod(seq_len + depth, PANEL_ROWS), divmod(seq_len + path[depth], PANEL_ROWS)
            if key_scales.size:
                key_scales[head, seq_len + depth] = key_scales[head, seq_len + path[depth]]
            if value_scales.size:
                value_scales[head, seq_len + depth] = value_scales[head, seq_len + path[depth]]
            for k in range(keys.shape[2]):
                keys[head, block, k, lane] = keys[head, panel, k, row]
            for k in range(values.shape[1]):
                for r in range(PANEL_ROWS):  # assigning rows would add 3 s of compiling for numba's shape error messages
                    values[head, k, seq_len + depth, r] = values[head, k, seq_len + path[depth], r]


@inlined
def get_chunk_rows(run, width, unit, base, n_rows):
    """Return the first and the end row, out of n_rows rows of a matmul's output, that this chunk has computed.

    Rows are counted from `base`, the first of them in the output of `width` rows. They are this chunk's share of the matmul's
    panels, `unit` panels at a time: see `Matrix.matmul`.
    """
    first, last = get_chunk_range(width // (unit * PANEL_ROWS), run.chunk, run.n_chunks)
    return max(first * unit * PANEL_ROWS - base, 0), min(last * unit * PANEL_ROWS - base, n_rows)


@kernel
def add_bias(run: ForwardContext, thread: int, out: Floats2, bias: Floats1, unit: int, logits_only: int) -> None:
    """out[t] += bias for this chunk's rows of the preceding matmul, of n_logits or all tokens; its last rows may have no bias."""
    first, last = get_chunk_rows(run, out.shape[1], unit, 0, bias.size)
    for t in range(run.n_logits if logits_only else run.n_tokens):
        for row in range(first, last, LANES):
            at = t * out.shape[1] + row
            store(out, at, add(load(out, at), load(bias, row)))


@kernel
def scale_columns(run: ForwardContext, thread: int, out: Floats2, factors: Floats1, unit: int) -> None:
    """out[t] *= factors for this chunk's rows of the preceding matmul."""
    first, last = get_chunk_rows(run, out.shape[1], unit, 0, out.shape[1])
    for t in range(run.n_tokens):
        for row in range(first, last, LANES):
            at = t * out.shape[1] + row
            store(out, at, mul(load(out, at), load(factors, row)))


@kernel
def add_positions(run: ForwardContext, thread: int, x: Floats2, positions: Floats2, depths: Ints1, dim: int) -> None:
    """x[t] += positions[position of t], the position embedding, for the columns that this chunk's token embedding filled."""
    first, last = get_chunk_range(dim, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        position = get_position(run, depths, t)
        for k in range(first, last):
            x[t, k] += positions[position, k]


@kernel
def scale_rows(run: ForwardContext, thread: int, x: Floats2, factor: float, dim: int) -> None:
    """x[t] *= factor for the columns that this chunk's token embedding filled."""
    first, last = get_chunk_range(dim, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for k in range(first, last):
            x[t, k] *= factor


class HeadNormArgs(NamedTuple):
    """Arguments of the kernel `head_norm`.

    Attributes:
        x: Attention heads (T, rows), the output of a matmul with this `unit`; n_heads heads start at row `base`.
        weight: (K,).
    """

    x: Floats2
    unit: int
    base: int
    n_heads: int
    head_dim: int
    weight: Floats1
    eps: float


@kernel
def head_norm(run: ForwardContext, thread: int, p: HeadNormArgs) -> None:
    """Normalize each attention head in place by `rms_norm` with one weight (K,), for this chunk's share of whole heads."""
    x, unit, base, n_heads, head_dim, weight, eps = p
    first, last = get_chunk_rows(run, x.shape[1], unit, base, n_heads * head_dim)
    for t in range(run.n_tokens):
        for head in range(first, last, head_dim):
            at = t * x.shape[1] + base + head
            norm_row(x, at, x, at, weight, 0, head_dim, eps)


@compiled
def fill_rope_tables(cos, sin, periods, head_dim, scale):
    """Fill the RoPE tables (S, K + LANES), the cosines and signed sines of each pair's angle at each position.

    Rows are periodic with period K, head_dim. periods: positions per radian of each pair, 1 or more. scale: factor of all cosines
    and sines. Dimensions after the pairs stay unrotated.
    """
    for position in range(cos.shape[0]):
        for i in range(periods.size):
            sine, cosine = sincos(position / periods[i])
            cosine, sine = cosine * scale, sine * scale
            cos[position, 2 * i] = cos[position, 2 * i + 1] = cosine
            sin[position, 2 * i], sin[position, 2 * i + 1] = -sine, sine
        for row in range(2 * periods.size, head_dim):
            cos[position, row], sin[position, row] = 1.0, 0.0
        for row in range(head_dim, cos.shape[1]):
            cos[position, row], sin[position, row] = cos[position, row - head_dim], sin[position, row - head_dim]


class RopeArgs(NamedTuple):
    """Arguments of the kernel `rope`.

    Attributes:
        x: Attention heads (T, rows), the output of a matmul with this `unit`; n_rows rows of heads start at row `base`.
        cos, sin: See `fill_rope_tables`.
        depths: Depths of the token tree's nodes, see `build_tree_paths`.
    """

    x: Floats2
    unit: int
    base: int
    n_rows: int
    cos: Floats2
    sin: Floats2
    depths: Ints1
    head_dim: int


@kernel
def rope(run: ForwardContext, thread: int, p: RopeArgs) -> None:
    """Rotate query or key heads in place by their positions (RoPE, Su et al. 2021), for this chunk's share of n_rows rows.

    The pair (2i, 2i + 1) of a head turns by the position times its frequency: x * cos + swapped x * signed sin.
    """
    x, unit, base, n_rows, cos, sin, depths, head_dim = p
    first, last = get_chunk_rows(run, x.shape[1], unit, base, n_rows)
    for t in range(run.n_tokens):
        angles, k = get_position(run, depths, t) * cos.shape[1], first % head_dim
        for row in range(first, last, LANES):
            at = t * x.shape[1] + base + row
            v = load(x, at)
            store(x, at, fma(simd.swap_pairs(v), load(sin, angles + k), mul(v, load(cos, angles + k))))
            k += LANES
            while k >= head_dim:
                k -= head_dim


@kernel
def store_keys_f32(run: ForwardContext, thread: int, keys: Floats4, scales: Floats2, x: Floats2, unit: int, base: int) -> None:
    """Copy new keys, the heads that start at row `base` of x, to the KV cache: keys (G, S / R, K, R) from slot `pos` on.

    Copies only the rows that this chunk has computed, head by head: token by token, 8 tokens of 15M int8 take 1.1 times as long.
    scales is unused.
    """
    head_dim = keys.shape[2]
    first, last = get_chunk_rows(run, x.shape[1], unit, base, keys.shape[0] * head_dim)
    if first >= last:
        return
    for head in range(first // head_dim, (last - 1) // head_dim + 1):
        row = head * head_dim
        for t in range(run.n_tokens):
            block, lane = divmod(run.pos + t, PANEL_ROWS)
            at = (head * keys.shape[1] + block) * head_dim * PANEL_ROWS + lane
            for k in range(max(first - row, 0), min(last - row, head_dim)):
                simd.store_item(keys, at + k * PANEL_ROWS, x[t, base + row + k])


@kernel
def store_values_f32(
    run: ForwardContext, thread: int, values: Floats4, scales: Floats2, x: Floats2, unit: int, base: int, head_dim: int
) -> None:
    """Copy new values, the heads that start at row `base` of x, to the KV cache: values (G, K / R, S, R) from slot `pos` on.

    Copies only the rows that this chunk has computed. scales is unused.
    """
    first, last = get_chunk_rows(run, x.shape[1], unit, base, values.shape[0] * head_dim)
    for row in range(first, last):
        head, k = divmod(row, head_dim)
        panel, lane = divmod(k, PANEL_ROWS)
        at = ((head * values.shape[1] + panel) * values.shape[2] + run.pos) * PANEL_ROWS + lane
        for t in range(run.n_tokens):
            simd.store_item(values, at + t * PANEL_ROWS, x[t, base + row])


@jitable
def softmax(scores, row, start, end, scale, sink):
    """Replace x = scores[row, start:end] by e^(scale (x - max x)) / sum, and set the rest of the touched vectors to 0.

    sink: one more score that counts in the maximum and the sum (Xiao et al. 2023, arXiv:2309.17453); -inf: no sink.
    """
    first = start // LANES * LANES
    last = (end + LANES - 1) // LANES * LANES
    for s in range(first, start):
        scores[row, s] = -np.inf
    for s in range(end, last):
        scores[row, s] = -np.inf
    base = row * scores.shape[1]
    top = splat(sink)
    for s in range(first, last, LANES):
        top = maximum(load(scores, base + s), top)
    minus_top = splat(-simd.reduce_max(top))
    total = splat(0.0)
    for s in range(first, last, LANES):
        e = exp(mul(splat(scale), add(load(scores, base + s), minus_top)))
        store(scores, base + s, e)
        total = add(total, e)
    sink_weight = simd.extract_lane(exp(mul(splat(scale), add(splat(sink), minus_top))), 0)
    inverse = splat(np.float32(1.0) / (simd.reduce_add(total) + sink_weight))
    for s in range(first, last, LANES):
        store(scores, base + s, mul(load(scores, base + s), inverse))


class AttentionArgs(NamedTuple):
    """Arguments of the attention kernels, for one layer.

    Attributes:
        out: (1, T, H K padded).
        qkv: (T, rows of q, of k and of v).
        keys: (G, S / R, K, R) of one layer.
        values: (G, K / R, S, R) of one layer.
        key_scales, value_scales: Scales (G, S) of quantized codes, empty if the cache is not quantized.
        scores: Scratch (threads, MAX_TILE_TOKENS, S).
        acc: Scratch (threads, MAX_TILE_TOKENS, K padded).
        depths, paths: The token tree; see `build_tree_paths`.
        sinks: (H,), one extra score per head without a position.
        window: Number of positions a token attends to at most.
        scale: Factor of the scores.
        softcap: Bound of the scaled scores; see `cap_scores`. 0: no bound.
    """

    out: Floats3
    qkv: Floats2
    keys: Floats4
    values: Floats4
    key_scales: Floats2
    value_scales: Floats2
    scores: Floats3
    acc: Floats3
    depths: Ints1
    paths: Ints2
    sinks: Floats1
    n_heads: int
    window: int
    scale: float
    softcap: float


@jitable
def accumulate_values(acc, values, scores, token, n_tokens, start, end):
    """acc[t] += sum_s scores[t, s] values[s] over slots start <= s < end, for n_tokens rows t from `token` on.

    values (K / R, S, R).
    """
    if start >= end:
        return
    multiply_stored_panels(
        Rows(point_to_floats(acc, token * acc.shape[1]), acc.shape[1]),
        Panels(point_by_dtype(values, start * PANEL_ROWS), values.shape[1] * PANEL_ROWS, values.shape[0], PREFETCH_WORDS),
        Rows(point_to_floats(scores, token * scores.shape[1] + start), scores.shape[1]), end - start, n_tokens, True,
    )  # fmt: skip


@jitable
def gather_path_scores(scores, token, start, end, seq_len, path):
    """scores[token, p] = scores[token, slot of p] for positions start <= p < end after the sequence, along a tree node's path.

    A slot never precedes its position, so no score is overwritten before it is read.
    """
    for position in range(start, end):
        scores[token, position] = scores[token, seq_len + path[position - seq_len]]


@jitable
def scale_scores(scores, row, start, end, scales):
    """scores[row, s] *= scales[s] for start <= s < end, if there are scales.

    One by one, 8 and 64 tokens of SmolLM2 at position 1,000 of a q8 cache would take 1.10 and 1.13 times as long.
    """
    if scales.size:
        whole = start + (end - start) // LANES * LANES
        for s in range(start, whole, LANES):
            at = row * scores.shape[1] + s
            store(scores, at, mul(load(scores, at), load(scales, s)))
        for s in range(whole, end):
            scores[row, s] *= scales[s]


@jitable
def cap_scores(scores, row, start, end, scale, softcap):
    """Replace x = scores[row, start:end] by softcap tanh(scale x / softcap) / scale, which `softmax` multiplies by scale.

    Gemma 2 (arXiv:2408.00118) bounds scores so. Also changes the rest of the touched vectors.
    """
    factor, bound = splat(np.float32(scale) / np.float32(softcap)), splat(np.float32(softcap) / np.float32(scale))
    base = row * scores.shape[1]
    for s in range(start // LANES * LANES, end, LANES):
        store(scores, base + s, mul(bound, tanh(mul(load(scores, base + s), factor))))


@jitable
def accumulate_path_values(acc, cached, scores, token, start, end, seq_len, path):
    """acc[token] += sum_p scores[token, p] values[slot of p] for positions start <= p < end after the sequence, on a node's path.

    cached: values and their scales.
    """
    values, scales = cached
    for k in range(0, values.shape[0] * PANEL_ROWS, LANES):
        (panel, lane), at = divmod(k, PANEL_ROWS), token * acc.shape[1] + k
        total = load(acc, at)
        for position in range(start, end):
            slot = seq_len + path[position - seq_len]
            v = load(values, (panel * values.shape[1] + slot) * PANEL_ROWS + lane)
            weight = scores[token, position] * scales[slot] if scales.size else scores[token, position]
            total = fma(v, splat(weight), total)
        store(acc, at, total)


class QueryTile(NamedTuple):
    """Up to MAX_TILE_TOKENS queries that share keys and values: tokens of one head, or heads of one token.

    Attributes:
        token, head: The first query.
        n_queries: Number of queries.
        next_token, next_head: Steps from one query to the next; one of them is 1, the other 0.
        first_pos, last_pos: Lowest and highest position of a query.
        has_nodes: Whether a query is a node of a token tree.
    """

    token: int
    head: int
    n_queries: int
    next_token: int
    next_head: int
    first_pos: int
    last_pos: int
    has_nodes: bool


@jitable
def make_query_tile(run, depths, head, token, n_queries, along_heads):
    """Return the `QueryTile` of n_queries from a token and head on: along_heads: heads of one token, else tokens of one head."""
    next_token, next_head = (0, 1) if along_heads else (1, 0)
    slot = run.pos + token
    last_slot = slot + next_token * (n_queries - 1)
    first_pos, last_pos, has_nodes = slot, last_slot, last_slot >= run.seq_len
    if has_nodes:
        first_pos = last_pos = get_position(run, depths, token)
        for i in range(1, next_token * n_queries):
            pos = get_position(run, depths, token + i)
            first_pos, last_pos = min(first_pos, pos), max(last_pos, pos)
    return QueryTile(token, head, n_queries, next_token, next_head, first_pos, last_pos, has_nodes)


@jitable
def find_score_panels(run, tile, window):
    """Return the index of the first panel of cache slots that a query of a tile may see, and the number of panels from it on."""
    block = max(0, tile.first_pos + 1 - window) // PANEL_ROWS
    return block, (run.pos + tile.token + tile.next_token * (tile.n_queries - 1)) // PANEL_ROWS + 1 - block


@jitable
def mix_values(run, p, tile, scores, acc, cached, key_scales):
    """acc[i] = softmax(scale scores[i]) values for each query i of a tile; scores hold the products with the keys it may see.

    A token sees the last `window` positions up to its own; the loop bounds enforce this. The values at the positions of the
    sequence that all queries see are accumulated in one go, those before and after query by query, so each query's chain is the
    same as alone. Query by query throughout, 8 tokens of SmolLM2 Q8_0 at position 1,000 would take 1.18 times as long.

    cached: values and their scales.
    """
    zero, one, seq_len = np.int64(0), np.int64(1), run.seq_len  # literals would compile the callees once more
    values, n_queries = cached[0], tile.n_queries
    block, n_panels = find_score_panels(run, tile, p.window)
    # softmax, and values before the common positions
    common_start = max(0, tile.last_pos + 1 - p.window)
    common_end = max(common_start, min(tile.first_pos + 1, seq_len))
    acc[:n_queries] = 0.0
    for i in range(n_queries):
        t = tile.token + tile.next_token * i
        end = (get_position(run, p.depths, t) if tile.has_nodes else run.pos + t) + 1
        start = max(0, end - p.window)
        scale_scores(scores, i, block * PANEL_ROWS, (block + n_panels) * PANEL_ROWS, key_scales)
        if tile.has_nodes:
            gather_path_scores(scores, i, max(start, seq_len), end, seq_len, p.paths[run.pos + t - seq_len])
        if p.softcap > 0.0:
            cap_scores(scores, i, start, end, p.scale, p.softcap)
        softmax(scores, i, start, end, p.scale, p.sinks[tile.head + tile.next_head * i])
        scale_scores(scores, i, start, min(end, seq_len), cached[1])
        accumulate_values(acc, values, scores, i, one, start, min(common_start, end, seq_len))
        if tile.has_nodes:
            accumulate_path_values(
                acc, cached, scores, i, max(start, seq_len), min(common_start, end), seq_len, p.paths[run.pos + t - seq_len]
            )
    # values at the common positions
    accumulate_values(acc, values, scores, zero, n_queries, common_start, common_end)
    # values after the common positions
    for i in range(n_queries):
        t = tile.token + tile.next_token * i
        end = (get_position(run, p.depths, t) if tile.has_nodes else run.pos + t) + 1
        start = max(0, end - p.window, common_end)
        accumulate_values(acc, values, scores, i, one, start, min(end, seq_len))
        if tile.has_nodes:
            accumulate_path_values(acc, cached, scores, i, max(start, seq_len), end, seq_len, p.paths[run.pos + t - seq_len])


@jitable
def attend(run, thread, p, head, token, n_queries, along_heads):
    """out[t, head] = softmax(scale q[t] . keys) values for n_queries from the given token and head on  (Vaswani et al. 2017).

    The queries are one head of n_queries tokens, or along_heads: heads of one token that share keys and values.
    """
    kv_head = head // (p.n_heads // p.keys.shape[0])
    keys, scores, acc = p.keys[kv_head], p.scores[thread], p.acc[thread]
    head_dim = keys.shape[1]
    tile = make_query_tile(run, p.depths, head, token, n_queries, along_heads)
    # attention scores
    block, n_panels = find_score_panels(run, tile, p.window)
    panel_items, q_stride = head_dim * PANEL_ROWS, tile.next_token * p.qkv.shape[1] + tile.next_head * head_dim
    multiply_stored_panels(
        Rows(point_to_floats(scores, block * PANEL_ROWS), scores.shape[1]),
        Panels(point_by_dtype(keys, block * panel_items), panel_items, n_panels, 2 * panel_items),
        Rows(point_to_floats(p.qkv, token * p.qkv.shape[1] + head * head_dim), q_stride), head_dim, n_queries, False,
    )  # fmt: skip
    mix_values(run, p, tile, scores, acc, (p.values[kv_head], p.value_scales[kv_head]), p.key_scales[kv_head])
    for i in range(n_queries):
        at = (head + tile.next_head * i) * head_dim
        for k in range(head_dim):
            p.out[0, token + tile.next_token * i, at + k] = acc[i, k]


@inlined
def attend_in_tiles(attend, run, thread, p, kv_heads):
    """Call `attend` for this chunk's share of all heads of all tokens, in tiles of up to MAX_TILE_TOKENS queries.

    The queries of a tile share keys and values: the tokens of a head, or the heads of a token if more heads share keys than the
    pass has tokens. Head by head, a token of SmolLM2 Q8_0 at position 1,000 would take 1.12 times as long. Query head h reads KV
    head h G / H, where G is kv_heads.
    """
    n_sharing = p.n_heads // kv_heads
    along_heads = n_sharing > run.n_tokens
    length = n_sharing if along_heads else run.n_tokens
    first, last = get_chunk_range(run.n_tokens * p.n_heads, run.chunk, run.n_chunks)
    if run.n_chunks > run.n_threads:  # chunk boundaries fall between query tiles
        per_line = simd.ceil_div(length, MAX_TILE_TOKENS)
        begin, end = get_chunk_range(run.n_tokens * p.n_heads // length * per_line, run.chunk, run.n_chunks)
        first, last = begin * length // per_line, end * length // per_line
    for line in range(first // length, simd.ceil_div(last, length)):
        begin, end = max(first - line * length, 0), min(last - line * length, length)
        token, head = (line // kv_heads, line % kv_heads * n_sharing) if along_heads else (0, line)
        n_tiles = simd.ceil_div(end - begin, MAX_TILE_TOKENS)
        for tile in range(n_tiles):
            start, stop = get_chunk_range(end - begin, tile, n_tiles)
            at = begin + start
            first_head, first_token = (head + at, token) if along_heads else (head, at)
            attend(run, thread, p, first_head, first_token, stop - start, along_heads)


@kernel
def attention_f32(run: ForwardContext, thread: int, p: AttentionArgs) -> None:
    """Compute attention for this chunk's share of all heads of all tokens into out; see `attend` and `attend_in_tiles`."""
    attend_in_tiles(attend, run, thread, p, p.keys.shape[0])


# The same kernels for an fp16 cache
store_keys_f16 = store_keys_f32.specialize("store_keys_f16", keys=Halves4)
store_values_f16 = store_values_f32.specialize("store_values_f16", values=Halves4)
attention_f16 = attention_f32.specialize("attention_f16", keys=Halves4, values=Halves4)
