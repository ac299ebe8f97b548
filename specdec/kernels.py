"""The operations that the programs of passes are made of, top to bottom as a token meets them. Knows no architecture.

Two promises hold by construction, and the tests compare bits:

- Batch and thread invariance: the logits at a position depend on the tokens up to it and on nothing else. Every dot product
  is one chain of fused multiply-adds in ascending k for its own (row, token), whatever the tile, T or the thread count.
- What is not finite stays so: no operation makes a number of a NaN.

Embedding and matrix products are the kinds of weights' own (`weights/`). Every operation does its thread's share.

Shapes: T tokens of this pass, S cached positions, D dim, F hidden_dim, L n_layers, H query heads, G kv heads, K head_dim,
V vocab_size, R rows of a strip. `run` is the pass: n_tokens, the first of them in slot pos of the cache.

A text lies in the cache's slots position by position. Behind it, from slot n_text on, may lie the nodes of a token tree, each
behind its parent: siblings share a position, and of the tree a node sees its ancestors and itself alone, as depths and paths tell
(see `trace`). All that it is computed from enters by position, not by slot, as in a chain of the same tokens: bit for bit.
"""

from typing import NamedTuple

import numpy as np

from specdec.runtime.code_cache import compiled, inlined, inner
from specdec.runtime.elementary import exp, sine_and_cosine
from specdec.runtime.program import Floats1, Floats2, Floats3, Floats4, Halves4, Ints1, Ints2, Operation, Pass, operation
from specdec.runtime.simd import (  # fmt: skip
    LANES,
    add,
    ceil_div,
    fma,
    item,
    lane,
    load,
    load_either,
    maximum,
    mul,
    put_either,
    reduce_add,
    reduce_max,
    splat,
    sqrt,
    store,
    store_either,
    swap_pairs,
)
from specdec.runtime.tile import PREFETCH_WORDS, STRIP_ROWS, TILE_TOKENS, Strided, Strips, multiply_either
from specdec.runtime.work_stealing import share

MAX_TOKENS = 64  # of one pass; longer prompts go in several


class KVCache(NamedTuple):
    """What a kind of KV cache consists of: its dtype, the operations that write and read it, and whether it has scales."""

    dtype: type
    store_keys: Operation
    store_values: Operation
    attention: Operation
    is_scaled: bool = False


@inner
def sum_of_squares(x, start, n):
    """Of n numbers from a flat index on: of whole vectors, then of what is left one by one."""
    whole, squares = n // LANES * LANES, splat(0.0)
    for i in range(start, start + whole, LANES):
        v = load(x, i)
        squares = fma(v, v, squares)
    total = reduce_add(squares)
    for i in range(start + whole, start + n):
        total += item(x, i) * item(x, i)
    return total


@inner
def norm_scale(x, row, width, dim, eps):
    """1 / sqrt(mean(x^2) + eps) of the dim numbers from `row` on, behind which a row of that width is padded with zeros."""
    total = sum_of_squares(x, row, width)
    # where the squares overflow, the row is NaN: 1 / infinity would make zeros of it, and logits of those
    return np.float32(1.0) / sqrt(total / np.float32(dim) + eps) + np.float32(0.0) * total


class RMSNorm(NamedTuple):
    """What `rms_norm` takes: out (threads, T, ...) is filled from that column on; x (1, T, dim padded)."""

    out: Floats3
    x: Floats3
    weight: Floats1
    dim: int
    eps: float
    of_logits: int
    column: int


@operation
def rms_norm(run: Pass, thread: int, p: RMSNorm) -> None:
    """out[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps)  (Zhang and Sennrich 2019); rows are padded with zeros.

    Each thread fills an out of its own, which spares a barrier. of_logits: of the last n_logits tokens, from out[0] on.
    """
    if run.begins == 0:
        return
    out, x, weight, dim, eps, of_logits, column = p
    n_tokens = run.n_logits if of_logits else run.n_tokens
    first, width = run.n_tokens - n_tokens, x.shape[2]
    for t in range(n_tokens):
        row, target = (first + t) * width, (thread * out.shape[1] + t) * out.shape[2] + column
        scale = splat(norm_scale(x, row, width, dim, eps))
        for i in range(0, width, LANES):
            store(out, target + i, mul(load(weight, i), mul(load(x, row + i), scale)))


@operation
def add_norm(run: Pass, thread: int, x: Floats2, branch: Floats3, weight: Floats1, dim: int, eps: float, factor: float) -> None:
    """x[t] = factor (x[t] + rms_norm(branch[t])) of branch (1, T, D padded), which all have written: this part's strips."""
    width = x.shape[1]
    first, last = share(width // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        scale = splat(norm_scale(branch, t * width, width, dim, eps))
        for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            at = t * width + i
            store(x, at, mul(splat(factor), fma(load(weight, i), mul(load(branch, at), scale), load(x, at))))


class LayerNorm(NamedTuple):
    """What `layer_norm` takes."""

    out: Floats3
    x: Floats3
    weight: Floats1
    bias: Floats1
    dim: int
    eps: float
    of_logits: int


@operation
def layer_norm(run: Pass, thread: int, p: LayerNorm) -> None:
    """out[t] = weight * (x[t] - mean) / sqrt(variance + eps) + bias  (Ba et al. 2016); in all else as `rms_norm`."""
    if run.begins == 0:
        return
    out, x, weight, bias, dim, eps, of_logits = p
    n_tokens = run.n_logits if of_logits else run.n_tokens
    first, width = run.n_tokens - n_tokens, x.shape[2]
    for t in range(n_tokens):
        row, target = (first + t) * width, (thread * out.shape[1] + t) * width
        sums = splat(0.0)
        for i in range(0, width, LANES):
            sums = add(load(x, row + i), sums)
        minus_mean = splat(-reduce_add(sums) / np.float32(dim))
        for i in range(0, width, LANES):
            store(out, target + i, add(load(x, row + i), minus_mean))
        out[thread, t, dim:] = 0.0  # what pads the row is no part of the variance
        scale = splat(norm_scale(out, target, width, dim, eps))
        for i in range(0, width, LANES):
            store(out, target + i, fma(load(weight, i), mul(load(out, target + i), scale), load(bias, i)))


@inlined
def position_of(run, depths, t):
    """Where token t of the pass stands in its text, or in the text that its path through the tree makes."""
    slot = run.pos + t
    return slot if slot < run.n_text else run.n_text + depths[slot - run.n_text]


@operation
def copy_rows(run: Pass, thread: int, out: Floats2, x: Floats3, to: int, start: int, n: int, by_slot: int) -> None:
    """n columns of x[t], from `start` on, to column `to` of out[t]: this part's. by_slot: of out[slot of t] instead.

    x (threads or 1, T, columns): each thread's own or everybody's.
    """
    first, last = share(n, run.part, run.n_parts)
    row, source = run.pos if by_slot else 0, thread if x.shape[0] > 1 else 0
    for t in range(run.n_tokens):
        for k in range(first, last):
            out[row + t, to + k] = x[source, t, start + k]


@compiled
def trace(depths, paths, parents, n):
    """depths and paths of n nodes, whose parents are earlier nodes, or -1 for those that follow the text.

    A node's position is n_text + its depth; paths[node, depth] is the node at that depth on the way to it, itself the last.
    """
    for node in range(n):
        parent, depth = parents[node], 0
        if parent >= 0:
            depth = depths[parent] + 1
            for i in range(depth):
                paths[node, i] = paths[parent, i]
        depths[node], paths[node, depth] = depth, node


@compiled
def move_slots(keys, values, key_scales, value_scales, path, n_text):
    """What keys and values (L, ...) hold of a tree's path, nodes from depth 0 on, to the slots that follow the text; and scales
    (L, G, S), or nothing."""
    for layer in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            for depth in range(path.size):
                if path[depth] == depth:  # so a tree whose likeliest path is laid first mostly has nothing to move
                    continue
                (block, lane), (strip, row) = divmod(n_text + depth, STRIP_ROWS), divmod(n_text + path[depth], STRIP_ROWS)
                if key_scales.size:
                    key_scales[layer, head, n_text + depth] = key_scales[layer, head, n_text + path[depth]]
                    value_scales[layer, head, n_text + depth] = value_scales[layer, head, n_text + path[depth]]
                for k in range(keys.shape[3]):
                    keys[layer, head, block, k, lane] = keys[layer, head, strip, k, row]
                for k in range(values.shape[2]):
                    for r in range(STRIP_ROWS):  # assigned as rows they would bring numba's messages of shapes, 3 s of compiling
                        values[layer, head, k, n_text + depth, r] = values[layer, head, k, n_text + path[depth], r]


@inlined
def own_rows(run, width, unit, base, n_rows):
    """Which of n_rows, the first of them row `base` of a product of that width, this part has computed, counted from base.

    Its share of the product's strips, `unit` of them at a time: see `Matrix.product`.
    """
    first, last = share(width // (unit * STRIP_ROWS), run.part, run.n_parts)
    return max(first * unit * STRIP_ROWS - base, 0), min(last * unit * STRIP_ROWS - base, n_rows)


@operation
def add_bias(run: Pass, thread: int, out: Floats2, bias: Floats1, unit: int) -> None:
    """out[t] += bias: this part's rows of the product before."""
    first, last = own_rows(run, out.shape[1], unit, 0, out.shape[1])
    for t in range(run.n_tokens):
        for row in range(first, last, LANES):
            at = t * out.shape[1] + row
            store(out, at, add(load(out, at), load(bias, row)))


@operation
def add_positions(run: Pass, thread: int, x: Floats2, positions: Floats2, depths: Ints1, dim: int) -> None:
    """x[t] += positions[the position of t]: the columns that this part's embedding filled."""
    first, last = share(dim, run.part, run.n_parts)
    for t in range(run.n_tokens):
        position = position_of(run, depths, t)
        for k in range(first, last):
            x[t, k] += positions[position, k]


@operation
def scale_rows(run: Pass, thread: int, x: Floats2, factor: float, dim: int) -> None:
    """x[t] *= factor: the columns that this part's embedding filled."""
    first, last = share(dim, run.part, run.n_parts)
    for t in range(run.n_tokens):
        for k in range(first, last):
            x[t, k] *= factor


class HeadNorm(NamedTuple):
    """What `head_norm` takes: n_heads begin at row `base` of x (T, rows), a product of that unit; weight (K,)."""

    x: Floats2
    unit: int
    base: int
    n_heads: int
    head_dim: int
    weight: Floats1
    eps: float


@operation
def head_norm(run: Pass, thread: int, p: HeadNorm) -> None:
    """`rms_norm` of each of n_heads by one weight: this part's, which are whole."""
    x, unit, base, n_heads, head_dim, weight, eps = p
    first, last = own_rows(run, x.shape[1], unit, base, n_heads * head_dim)
    whole = head_dim // LANES * LANES
    for t in range(run.n_tokens):
        for head in range(first, last, head_dim):
            at = t * x.shape[1] + base + head
            scale = norm_scale(x, at, head_dim, head_dim, eps)
            for k in range(0, whole, LANES):
                store(x, at + k, mul(load(weight, k), mul(load(x, at + k), splat(scale))))
            for k in range(whole, head_dim):
                x[t, base + head + k] = weight[k] * (x[t, base + head + k] * scale)


@compiled
def fill_rotations(cos, sin, periods, start, head_dim, scale):
    """scale times cos and signed sin (S, K + LANES) of the pairs' angles from position `start` on, periodic in K, head_dim.

    periods: how many positions a pair takes to turn by one radian, 1 or more; what lies behind the pairs stays as it is.
    """
    for position in range(start, cos.shape[0]):
        for i in range(periods.size):
            sine, cosine = sine_and_cosine(position / periods[i])
            cosine, sine = cosine * scale, sine * scale
            cos[position, 2 * i] = cos[position, 2 * i + 1] = cosine
            sin[position, 2 * i], sin[position, 2 * i + 1] = -sine, sine
        for row in range(2 * periods.size, head_dim):
            cos[position, row], sin[position, row] = 1.0, 0.0
        for row in range(head_dim, cos.shape[1]):
            cos[position, row], sin[position, row] = cos[position, row - head_dim], sin[position, row - head_dim]


class Rope(NamedTuple):
    """What `rope` takes: heads begin at row `base` of x (T, rows), a product of that unit; cos, sin: see `fill_rotations`."""

    x: Floats2
    unit: int
    base: int
    n_rows: int
    cos: Floats2
    sin: Floats2
    depths: Ints1
    head_dim: int


@operation
def rope(run: Pass, thread: int, p: Rope) -> None:
    """Rotate n_rows of heads (Su et al. 2021), those of this thread.

    The pair (2i, 2i + 1) of a head turns by the position times its frequency: x * cos + swapped x * signed sin.
    """
    x, unit, base, n_rows, cos, sin, depths, head_dim = p
    first, last = own_rows(run, x.shape[1], unit, base, n_rows)
    for t in range(run.n_tokens):
        angles, place = position_of(run, depths, t) * cos.shape[1], first % head_dim
        for row in range(first, last, LANES):
            at = t * x.shape[1] + base + row
            v = load(x, at)
            store(x, at, fma(swap_pairs(v), load(sin, angles + place), mul(v, load(cos, angles + place))))
            place += LANES
            while place >= head_dim:
                place -= head_dim


@operation
def store_keys_f32(run: Pass, thread: int, keys: Floats4, scales: Floats2, x: Floats2, unit: int, base: int) -> None:
    """Put the heads that begin at row `base` of x at pos.. of keys (G, S / R, K, R): this part's rows of them."""
    head_dim = keys.shape[2]
    first, last = own_rows(run, x.shape[1], unit, base, keys.shape[0] * head_dim)
    if first >= last:
        return
    for head in range(first // head_dim, (last - 1) // head_dim + 1):
        row = head * head_dim
        for t in range(run.n_tokens):
            block, lane = divmod(run.pos + t, STRIP_ROWS)
            at = (head * keys.shape[1] + block) * head_dim * STRIP_ROWS + lane
            for k in range(max(first - row, 0), min(last - row, head_dim)):
                put_either(keys, at + k * STRIP_ROWS, x[t, base + row + k])


@operation
def store_values_f32(
    run: Pass, thread: int, values: Floats4, scales: Floats2, x: Floats2, unit: int, base: int, head_dim: int
) -> None:
    """Put the heads that begin at row `base` of x at pos.. of values (G, K / R, S, R): this part's rows of them."""
    first, last = own_rows(run, x.shape[1], unit, base, values.shape[0] * head_dim)
    row = first
    while row < last:
        head, k = divmod(row, head_dim)
        n = min(last - row, head_dim - k, LANES - k % LANES)  # to the end of a vector, a head or these rows
        strip, lane = divmod(k, STRIP_ROWS)
        for t in range(run.n_tokens):
            at = ((head * values.shape[1] + strip) * values.shape[2] + run.pos + t) * STRIP_ROWS + lane
            if n == LANES:
                store_either(values, at, load(x, t * x.shape[1] + base + row))
            else:
                for i in range(n):
                    put_either(values, at + i, x[t, base + row + i])
        row += n


@inner
def softmax(scores, row, start, end, scale, sink):
    """x = scores[row, start:end] becomes e^(scale (x - max x)) / sum; the rest of the vectors it touches becomes 0.

    sink: one x more, which the maximum and the sum go over, too (Xiao et al. 2023, arXiv:2309.17453); -inf: there is none.
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
    minus_top = splat(-reduce_max(top))
    total = splat(0.0)
    for s in range(first, last, LANES):
        e = exp(mul(splat(scale), add(load(scores, base + s), minus_top)))
        store(scores, base + s, e)
        total = add(total, e)
    of_sink = lane(exp(mul(splat(scale), add(splat(sink), minus_top))), 0)
    inverse = splat(np.float32(1.0) / (reduce_add(total) + of_sink))
    for s in range(first, last, LANES):
        store(scores, base + s, mul(load(scores, base + s), inverse))


class Attention(NamedTuple):
    """What attention takes.

    heads (1, T, H K padded); qkv (T, rows of q, of k and of v); of a layer keys (G, S / R, K, R) and values (G, K / R, S, R), and
    what codes of them stand for, key_scales and value_scales (G, S), or nothing where they are no codes;
    scores (threads, TILE_TOKENS, S) and mixed (threads, TILE_TOKENS, K padded); sinks (H): of each head one score more, that of
    no position; window: how many positions a token sees at most; scale: of scores.
    """

    heads: Floats3
    qkv: Floats2
    keys: Floats4
    values: Floats4
    key_scales: Floats2
    value_scales: Floats2
    scores: Floats3
    mixed: Floats3
    depths: Ints1
    paths: Ints2
    sinks: Floats1
    n_heads: int
    window: int
    scale: float


@inner
def mix_values(mixed, values, scores, token, n_tokens, start, end):
    """mixed[t] += sum_s scores[t, s] values[s] for start <= s < end: values (K / R, S, R), n_tokens from `token`."""
    if start >= end:
        return
    multiply_either(
        Strided(mixed, token * mixed.shape[1], mixed.shape[1]),
        Strips(values, start * STRIP_ROWS, values.shape[1] * STRIP_ROWS, values.shape[0], PREFETCH_WORDS),
        Strided(scores, token * scores.shape[1] + start, scores.shape[1]), end - start, n_tokens, True,
    )  # fmt: skip


@inner
def gather_path(scores, token, start, end, n_text, path):
    """scores[token, p] = scores[token, slot of p] for start <= p < end behind the text, on a node's path.

    No slot is before its position, so none that is still to be read has been written.
    """
    for position in range(start, end):
        scores[token, position] = scores[token, n_text + path[position - n_text]]


@inner
def scale_scores(scores, row, start, end, scales):
    """scores[row, s] *= scales[s] for start <= s < end, where there are scales."""
    if scales.size:
        for s in range(start, end):
            scores[row, s] *= scales[s]


@inner
def mix_path(mixed, cached, scores, token, start, end, n_text, path):
    """mixed[token] += sum_p scores[token, p] values[slot of p] for start <= p < end behind the text, on a node's path; cached:
    values and their scales."""
    values, scales = cached
    for k in range(0, values.shape[0] * STRIP_ROWS, LANES):
        (strip, lane), at = divmod(k, STRIP_ROWS), token * mixed.shape[1] + k
        acc = load(mixed, at)
        for position in range(start, end):
            slot = n_text + path[position - n_text]
            v = load_either(values, (strip * values.shape[1] + slot) * STRIP_ROWS + lane)
            weight = scores[token, position] * scales[slot] if scales.size else scores[token, position]
            acc = fma(v, splat(weight), acc)
        store(mixed, at, acc)


@inner
def attend(run, thread, p, head, token, n_queries, along_heads):
    """heads[t, head] = softmax(scale q[t] . keys) values for n_queries from that token's head on  (Vaswani et al. 2017).

    They are those of as many tokens, or along_heads: of heads that share keys and values. A token sees the last `window`
    positions up to its own, by loop bounds: the positions of the text that all of them see are mixed in one go, those before
    and after them query by query, so that each query's chain is the one that it would have alone.
    """
    zero, one, n_text = np.int64(0), np.int64(1), run.n_text  # literals would have what they go into compiled once more
    kv_head = head // (p.n_heads // p.keys.shape[0])
    keys, values, scores, mixed = p.keys[kv_head], p.values[kv_head], p.scores[thread], p.mixed[thread]
    cached = values, p.value_scales[kv_head]
    head_dim = keys.shape[1]
    next_token, next_head = (0, 1) if along_heads else (1, 0)
    slot = run.pos + token
    last_slot = slot + next_token * (n_queries - 1)
    first_pos, last_pos, has_nodes = slot, last_slot, last_slot >= n_text
    if has_nodes:
        first_pos = last_pos = position_of(run, p.depths, token)
        for i in range(1, next_token * n_queries):
            pos = position_of(run, p.depths, token + i)
            first_pos, last_pos = min(first_pos, pos), max(last_pos, pos)
    block, strip_items = max(0, first_pos + 1 - p.window) // STRIP_ROWS, head_dim * STRIP_ROWS
    n_strips, q_stride = last_slot // STRIP_ROWS + 1 - block, next_token * p.qkv.shape[1] + next_head * head_dim
    multiply_either(
        Strided(scores, block * STRIP_ROWS, scores.shape[1]),
        Strips(keys, block * strip_items, strip_items, n_strips, 2 * strip_items),
        Strided(p.qkv, token * p.qkv.shape[1] + head * head_dim, q_stride), head_dim, n_queries, False,
    )  # fmt: skip
    common_start = max(0, last_pos + 1 - p.window)
    common_end = max(common_start, min(first_pos + 1, n_text))
    mixed[:n_queries] = 0.0
    for i in range(n_queries):
        t = token + next_token * i
        end = (position_of(run, p.depths, t) if has_nodes else run.pos + t) + 1
        start = max(0, end - p.window)
        scale_scores(scores, i, block * STRIP_ROWS, (block + n_strips) * STRIP_ROWS, p.key_scales[kv_head])
        if has_nodes:
            gather_path(scores, i, max(start, n_text), end, n_text, p.paths[run.pos + t - n_text])
        softmax(scores, i, start, end, p.scale, p.sinks[head + next_head * i])
        scale_scores(scores, i, start, min(end, n_text), cached[1])
        mix_values(mixed, values, scores, i, one, start, min(common_start, end, n_text))
        if has_nodes:
            mix_path(mixed, cached, scores, i, max(start, n_text), min(common_start, end), n_text, p.paths[run.pos + t - n_text])
    mix_values(mixed, values, scores, zero, n_queries, common_start, common_end)
    for i in range(n_queries):
        t = token + next_token * i
        end = (position_of(run, p.depths, t) if has_nodes else run.pos + t) + 1
        start = max(0, end - p.window, common_end)
        mix_values(mixed, values, scores, i, one, start, min(end, n_text))
        if has_nodes:
            mix_path(mixed, cached, scores, i, max(start, n_text), end, n_text, p.paths[run.pos + t - n_text])
        for k in range(head_dim):
            p.heads[0, t, (head + next_head * i) * head_dim + k] = mixed[i, k]


@operation
def attention_f32(run: Pass, thread: int, p: Attention) -> None:
    """Every head of every token, this part's share of them; query head h reads kv head h G / H.

    In chunks of up to TILE_TOKENS queries of the same keys and values: a head's tokens, or a token's heads where those are more.
    """
    kv_heads = p.keys.shape[0]
    n_sharing = p.n_heads // kv_heads
    along_heads = n_sharing > run.n_tokens
    length = n_sharing if along_heads else run.n_tokens
    first, last = share(run.n_tokens * p.n_heads, run.part, run.n_parts)
    if run.n_parts > run.n_threads:  # whole chunks
        per_line = ceil_div(length, TILE_TOKENS)
        begin, end = share(run.n_tokens * p.n_heads // length * per_line, run.part, run.n_parts)
        first, last = begin * length // per_line, end * length // per_line
    for line in range(first // length, ceil_div(last, length)):
        begin, end = max(first - line * length, 0), min(last - line * length, length)
        token, head = (line // kv_heads, line % kv_heads * n_sharing) if along_heads else (0, line)
        n_chunks = ceil_div(end - begin, TILE_TOKENS)
        for chunk in range(n_chunks):
            start, stop = share(end - begin, chunk, n_chunks)
            at = begin + start
            first_head, first_token = (head + at, token) if along_heads else (head, at)
            attend(run, thread, p, first_head, first_token, stop - start, along_heads)


# of one of fp16
store_keys_f16 = store_keys_f32.over("store_keys_f16", keys=Halves4)
store_values_f16 = store_values_f32.over("store_values_f16", values=Halves4)
attention_f16 = attention_f32.over("attention_f16", keys=Halves4, values=Halves4)
