"""Kernels with a recurrent state: what a token reads of earlier tokens that no slot of a KV cache holds.

A convolution over tokens keeps its inputs in a ring buffer: that of position p lies in row p mod N. The ring has MAX_BATCH_TOKENS
more rows than a token looks back to. So whatever a pass writes, it holds the last inputs of every sequence that ended up to
MAX_BATCH_TOKENS ago. Truncating after a rejection costs nothing, and an interrupted pass spoils nothing.

The state of a delta net is a matrix for each head, too large to keep one for each length. There are two: the tip, of all accepted
tokens, and the base, of a shorter sequence. A ring holds the updates of the tokens since then. Continuing from either gives the
same bits. States and rings of Qwen3.5-0.8B take 96 MB; a state for each of 64 lengths would take 1.2 GB.
"""

from typing import NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, compute_norm_scale, get_chunk_rows, sum_squares
from specdec.layers.block import BASE, TIP
from specdec.layers.buffers import Allocator, ScanState, pad
from specdec.runtime import simd
from specdec.runtime.code_cache import compiled, inlined, jitable
from specdec.runtime.elementary import exp_scalar, sigmoid, silu, softplus_scalar
from specdec.runtime.op_program import Floats1, Floats2, Floats3, Floats4, ForwardContext, Ints2, kernel
from specdec.runtime.simd import LANES, PANEL_ROWS, Float32, add, fma, load, load_item, mul, round_up, splat, sqrt, store
from specdec.runtime.work_stealing import get_chunk_range

RING_SLOTS = MAX_BATCH_TOKENS + 32  # of the updates of a state: the base advances by 32 tokens at a time
# Of updates that a pass writes before its bases advance
KEY_RING_SLOTS = RING_SLOTS + MAX_BATCH_TOKENS
SCAN_COLUMNS = PANEL_ROWS if simd.N_REGISTERS == 32 else LANES  # columns of a state panel that `scan` advances at a time
LAST_COLUMNS = SCAN_COLUMNS - LANES  # the second half of them, if there is one
L2_NORM_EPS = 1e-6  # of the norms of queries and keys, in all families


def make_ring(new: Allocator, width: int, n_channels: int) -> Float32:
    """Return a ring buffer (N, n_channels) for the inputs of a convolution of kernel size `width`, an array of a sequence."""
    return new.sequence(MAX_BATCH_TOKENS + width - 1, n_channels)


def make_scan_state(new: Allocator, n_heads: int, head_dim: int, n_rows: int, key_ring: tuple[int, int, int]) -> ScanState:
    """Return the state of a scan, arrays of a sequence: n_heads matrices of n_rows rows and head_dim columns, and rings.

    key_ring: Shape of the ring of keys.
    """
    width = pad(head_dim)
    return ScanState(
        new.sequence(2, n_heads * (width // PANEL_ROWS), n_rows, PANEL_ROWS),
        new.sequence(n_heads, 2, dtype=np.int64),
        new.sequence(*key_ring),
        new.sequence(n_heads, RING_SLOTS, width),
        new.sequence(n_heads, RING_SLOTS),
    )


@inlined
def convolve_position(inputs, weight, bias, position, k):
    """Return a convolution's output, bias + sum_j weight[j] inputs[position - width + 1 + j], for channels from k on.

    The sum is one chain of multiply-adds, from the oldest input on. inputs (N, channels) is a ring; weight (width,
    channels); bias (channels), or empty. Inputs before the sequence are zero.
    """
    width = weight.shape[0]
    acc = load(bias, k) if bias.size > 0 else splat(0.0)
    for j in range(max(width - 1 - position, 0), width):
        row = (position - width + 1 + j) % inputs.shape[0]
        acc = fma(load(weight, j * weight.shape[1] + k), load(inputs, row * inputs.shape[1] + k), acc)
    return acc


@kernel
def convolve(run: ForwardContext, thread: int, x: Floats2, inputs: Floats2, weight: Floats2, bias: Floats1) -> None:
    """Compute x[t] = silu(conv x)[t] in place, for the channels that this chunk's share of the preceding matmul wrote.

    Channels are the first columns of x (T, rows). The convolution's inputs are stored in the ring `inputs`; see
    `convolve_position`.
    """
    n_channels = weight.shape[1]
    first, last = get_chunk_rows(run, x.shape[1], 1, 0, n_channels)
    for t in range(run.n_tokens):
        position = run.pos + t
        row = position % inputs.shape[0] * n_channels
        for k in range(first, last, LANES):
            at = t * x.shape[1] + k
            store(inputs, row + k, load(x, at))
            v = convolve_position(inputs, weight, bias, position, k)
            store(x, at, mul(v, sigmoid(v)))


@kernel
def gated_convolution(
    run: ForwardContext, thread: int, out: Floats3, x: Floats2, inputs: Floats2, weight: Floats2, bias: Floats1
) -> None:
    """Compute out[t] = c[t] * conv(b x)[t], for the channels that this chunk's share of the preceding matmul wrote.

    out (1, T, channels). x (T, 3 channels) holds panels of b, c and x, interleaved: the matmul has unit 3. The convolution's
    inputs b x are stored in the ring `inputs`; see `convolve_position`.
    """
    n_channels = weight.shape[1]
    first, last = get_chunk_range(n_channels // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        position = run.pos + t
        row = position % inputs.shape[0] * n_channels
        for k in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            panel, lane = divmod(k, PANEL_ROWS)
            at = t * x.shape[1] + 3 * panel * PANEL_ROWS + lane
            store(inputs, row + k, mul(load(x, at), load(x, at + 2 * PANEL_ROWS)))
            v = convolve_position(inputs, weight, bias, position, k)
            store(out, t * n_channels + k, mul(load(x, at + PANEL_ROWS), v))


# States that advance token by token. Shapes: T tokens of this pass, N slots of a ring, H heads, K rows of a state, C columns of a
# state, R panel rows.


@compiled
def fill_decay_rates(rates, logarithms):
    """Write rates[i] = -e^logarithms[i], the decay rates of a delta net, in float32."""
    for i in range(rates.size):
        rates[i] = -exp_scalar(logarithms[i])


@jitable
def compute_decay(rate, dt):
    """Return e^(rate dt), the factor of a state; NaN if the rate is infinite, where `exp` has a finite limit."""
    return exp_scalar(rate * dt) + np.float32(0.0) * rate


@inlined
def load_rows(states, at):
    """Return LANES columns of four consecutive rows of a state panel, from flat index `at` on, as four vectors."""
    return (
        load(states, at),
        load(states, at + PANEL_ROWS),
        load(states, at + 2 * PANEL_ROWS),
        load(states, at + 3 * PANEL_ROWS),
    )


@inlined
def store_rows(states, at, rows):
    """Store four vectors as `load_rows` loads them."""
    for i in range(4):
        store(states, at + i * PANEL_ROWS, rows[i])


@inlined
def load_items(x, at):
    """Return four numbers of x, from flat index `at` on."""
    return load_item(x, at), load_item(x, at + 1), load_item(x, at + 2), load_item(x, at + 3)


@inlined
def update_rows(rows, keys, decay, delta):
    """Return rows of a state after a token, decay * rows + keys * delta, given the number of the key for each row."""
    return fma(keys, delta, mul(rows, decay))


class Scan(NamedTuple):
    """A range of tokens over which `scan` advances one state panel (K, R) of a head.

    The panel at flat index `source` is the state after `start` tokens. The state after `stop` tokens is stored at flat index
    `target`; the tokens up to `end` are run, but the states after them are not stored.
    """

    head: int
    panel: int
    source: int
    target: int
    start: int
    stop: int
    end: int


@inlined
def add_product(sums, at, rows, query):
    """Add the product of four rows of a state and four numbers of a query to LANES sums."""
    total = fma(rows[3], query[3], fma(rows[2], query[2], fma(rows[1], query[1], mul(rows[0], query[0]))))
    store(sums, at, add(load(sums, at), total))


@jitable  # its helpers are inlined: a call copies a whole record of arrays
def scan(run, thread, p, s):
    """Advance the state panel S that the `Scan` s names, S = g S + k d' per token, and add S' q to scratch for the pass's tokens.

    Four rows stay in registers while the tokens run, so a pass of any length reads the state once: whole rows if there are 32
    registers, else half of them at a time. With AVX2 a prompt of 512 in 28 layers of Granite 4 H 350M took 353 ms in whole rows,
    and 200 with half rows and a base that is copied from the tip. A token's sum adds the sums of four rows each, in the order of
    the rows.
    """
    n_rows, width, n_keys, n_slots = p.states.shape[2], p.deltas.shape[2], p.keys.shape[2], p.keys.shape[1]
    group = s.head // (p.lengths.shape[0] // (n_keys // n_rows)) * n_rows
    first_key = s.head * n_slots * n_keys if p.keys.shape[0] > 1 else group
    queries = p.lengths.shape[0] * p.head_dim + n_keys + group
    deltas, decays = s.head * RING_SLOTS * width + s.panel * PANEL_ROWS, s.head * RING_SLOTS
    sums = thread * p.scratch.shape[1] * width + s.panel * PANEL_ROWS
    fours = n_rows // 4 * 4
    for part in range(n_rows // 4 * (PANEL_ROWS // SCAN_COLUMNS)):
        k, column = part // (PANEL_ROWS // SCAN_COLUMNS) * 4, part % (PANEL_ROWS // SCAN_COLUMNS) * SCAN_COLUMNS
        first = k * PANEL_ROWS + column
        left, right = load_rows(p.states, s.source + first), load_rows(p.states, s.source + first + LAST_COLUMNS)
        slot, key_slot = s.start % RING_SLOTS, s.start % n_slots
        if s.start == s.stop:
            store_rows(p.states, s.target + first, left)
            store_rows(p.states, s.target + first + LAST_COLUMNS, right)
        for position in range(s.start, s.end):
            decay, keys = splat(load_item(p.decays, decays + slot)), load_items(p.keys, first_key + key_slot * n_keys + k)
            delta = deltas + slot * width + column
            left = update_rows(left, keys, decay, load(p.deltas, delta))
            if LAST_COLUMNS > 0:
                right = update_rows(right, keys, decay, load(p.deltas, delta + LAST_COLUMNS))
            if position + 1 == s.stop:
                store_rows(p.states, s.target + first, left)
                if LAST_COLUMNS > 0:
                    store_rows(p.states, s.target + first + LAST_COLUMNS, right)
            if position >= run.pos:
                t = position - run.pos
                to, query = sums + t * width + column, load_items(p.x, t * p.x.shape[1] + queries + k)
                add_product(p.scratch, to, left, query)
                if LAST_COLUMNS > 0:
                    add_product(p.scratch, to + LAST_COLUMNS, right, query)
            slot, key_slot = slot + 1, key_slot + 1
            slot, key_slot = 0 if slot == RING_SLOTS else slot, 0 if key_slot == n_slots else key_slot
    for at in range(fours * PANEL_ROWS, n_rows * PANEL_ROWS, LANES):
        k, column = at // PANEL_ROWS, at % PANEL_ROWS
        row = load(p.states, s.source + at)
        if s.start == s.stop:
            store(p.states, s.target + at, row)
        for position in range(s.start, s.end):
            slot, key = position % RING_SLOTS, first_key + position % n_slots * n_keys + k
            delta = load(p.deltas, deltas + slot * width + column)
            row = update_rows(row, splat(load_item(p.keys, key)), splat(load_item(p.decays, decays + slot)), delta)
            if position + 1 == s.stop:
                store(p.states, s.target + at, row)
            if position >= run.pos:
                to, query = sums + (position - run.pos) * width + column, (position - run.pos) * p.x.shape[1] + queries + k
                store(p.scratch, to, fma(row, splat(load_item(p.x, query)), load(p.scratch, to)))


@inlined
def advance_base(run, thread, p, head):
    """Advance a head's base if the pass would overwrite updates in the ring that it needs; at position 0, zero base and tip.

    Returns:
        The new length of the base, and the length and the flat index of the state that the tip continues from: the tip itself,
        or the base if the sequence was truncated to before the tip or if the pass overwrites updates that the tip needs.
    """
    n_panels, panel_items = p.deltas.shape[2] // PANEL_ROWS, p.states.shape[2] * PANEL_ROWS
    base, tip, end = p.lengths[head, BASE], p.lengths[head, TIP], run.pos + run.n_tokens
    base_at = head * n_panels * panel_items
    tip_at = base_at + p.states.shape[1] * panel_items
    if run.pos == 0:
        base = tip = 0
        for i in range(0, n_panels * panel_items, LANES):
            store(p.states, base_at + i, splat(0.0))
            store(p.states, tip_at + i, splat(0.0))
    elif end - base > RING_SLOTS:
        to = end - MAX_BATCH_TOKENS
        # The tip unless it is ahead; within a prompt it is the state after `to` tokens, so no token is run again
        start, source = (tip, tip_at) if base <= tip <= to else (base, base_at)
        for panel in range(n_panels):
            at = panel * panel_items
            scan(run, thread, p, Scan(head, panel, source + at, base_at + at, start, to, to))
        base = to
    start, source = (tip, tip_at) if base <= tip <= run.pos else (base, base_at)
    return base, start, source


# The gated delta rule. Shapes: T tokens of this pass, N slots of a ring, H value heads, K rows of a key, C rows of a value, R
# panel rows.


@jitable
def sigmoid_scalar(x):
    """Return the sigmoid 1 / (1 + e^-x) of a float32 scalar."""
    return simd.extract_lane(sigmoid(splat(x)), 0)


class DeltaNetArgs(NamedTuple):
    """Arguments of the kernel `delta_net`.

    Attributes:
        out: Output (1, T, H C or more).
        x: (T, columns): queries, keys and values, then in panels of their own gates, betas and decays.
        states: (2, H C / R, K, R): panels of the base's state and of the tip's state.
        lengths: (H, 2): number of tokens in each head's base and tip.
        keys, deltas, decays: Rings (H, N, K), (H, N, C) and (H, N). K is a multiple of 4; further rows of a key are 0.
        scratch: (threads, T, words): a head's queries, keys and outputs.
        draft_state: (threads, K, R): panel of a state after draft tokens.
        rates: Decay rates (H padded), then biases of the decays (H padded).
        weight: (C): weights of the norm of heads.
        eps: Eps of this norm.
        head_dim: C without padding.
        key_dim: K without padding.
        n_key_heads: Number of key heads; each serves several value heads.
        tiled_heads: Value head h uses key head h % n_key_heads; else consecutive value heads share one.
    """

    out: Floats3
    x: Floats2
    states: Floats4
    lengths: Ints2
    keys: Floats3
    deltas: Floats3
    decays: Floats2
    scratch: Floats3
    draft_state: Floats3
    rates: Floats1
    weight: Floats1
    eps: float
    head_dim: int
    key_dim: int
    n_key_heads: int
    tiled_heads: int


@jitable
def normalize_rows(scratch, thread, t, to, x, column, n, scale):
    """Compute scratch[thread, t, to : to + n] = scale y / |y| of the n numbers y = x[t, column : column + n]."""
    at, start = (thread * scratch.shape[1] + t) * scratch.shape[2] + to, t * x.shape[1] + column
    whole, total = n // LANES * LANES, sum_squares(x, start, n)
    factor = scale / sqrt(total + np.float32(L2_NORM_EPS)) + np.float32(0.0) * total  # not finite if the squares are not
    for k in range(0, whole, LANES):
        store(scratch, at + k, mul(load(x, start + k), splat(factor)))
    for k in range(whole, n):
        scratch[thread, t, to + k] = x[t, column + k] * factor


class TokenStep(NamedTuple):
    """A token of the pass in one head of a delta net, for a thread.

    Attributes:
        t: Index of the token in the pass.
        slot: Slot of the token's position, counted through the rings of all heads.
        beta: Factor of the token's delta.
    """

    thread: int
    t: int
    head: int
    slot: int
    beta: float


@inlined
def load_row(states, at):
    """Return a row of a state panel, from flat index `at` on, as two vectors."""
    return load(states, at), load(states, at + LANES)


@inlined
def store_row(states, at, row):
    """Store a row of a state panel, or as many other numbers, as `load_row` loads it."""
    store(states, at, row[0])
    store(states, at + LANES, row[1])


@inlined
def recall_values(before, at, p, token):
    """Return the product of the decayed state panel (K, R) at `at` and the token's key, R numbers in two vectors."""
    n_keys, decay = p.keys.shape[2], splat(load_item(p.decays, token.slot))
    even = odd = splat(0.0), splat(0.0)  # sums over every second row
    for k in range(0, n_keys, 2):
        row, key = at + k * PANEL_ROWS, token.slot * n_keys + k
        even = fma(mul(load_row(before, row), decay), splat(load_item(p.keys, key)), even)
        odd = fma(mul(load_row(before, row + PANEL_ROWS), decay), splat(load_item(p.keys, key + 1)), odd)
    return add(even, odd)


@inlined
def update_row(after, to, before, at, decay, key, delta):
    """Write one row of the new state, decay * old row + key * delta, to `after`, and return the row."""
    row = update_rows(load_row(before, at), splat(key), decay, delta)
    store_row(after, to, row)
    return row


@inlined
def update_state(after, to, before, at, p, token, delta):
    """Write the state panel decay * (panel at `at`) + key delta' to `to`; return its product with the token's query.

    The decay is applied again, which costs less than storing the decayed state. delta and the product are two vectors each.
    """
    n_keys, queries = p.keys.shape[2], (token.thread * p.scratch.shape[1] + token.t) * p.scratch.shape[2]
    decay = splat(load_item(p.decays, token.slot))
    even = odd = splat(0.0), splat(0.0)
    for k in range(0, n_keys, 2):
        row, key = k * PANEL_ROWS, token.slot * n_keys + k
        new = update_row(after, to + row, before, at + row, decay, load_item(p.keys, key), delta)
        even = fma(new, splat(load_item(p.scratch, queries + k)), even)
        row += PANEL_ROWS
        new = update_row(after, to + row, before, at + row, decay, load_item(p.keys, key + 1), delta)
        odd = fma(new, splat(load_item(p.scratch, queries + k + 1)), odd)
    return add(even, odd)


@jitable  # its helpers are inlined: a call copies a whole record of arrays, which took half of the time
def step(after, to, before, at, p, token, panel):
    """Update a state panel S by one token and write its output y: S = g S; d = (v - S' k) beta; S = S + k d'; y = S' q.

    The old panel (K, R) lies in `before` at `at`, the new one in `after` at `to`. d goes to the ring of deltas, y to scratch.
    """
    width, column = p.deltas.shape[2], panel * PANEL_ROWS
    values = load_row(p.x, token.t * p.x.shape[1] + 2 * p.n_key_heads * p.key_dim + token.head * p.head_dim + column)
    delta = mul(fma(recall_values(before, at, p, token), splat(-1.0), values), splat(token.beta))
    store_row(p.deltas, token.slot * width + column, delta)
    output_at = (token.thread * p.scratch.shape[1] + token.t + 1) * p.scratch.shape[2] - width + column
    store_row(p.scratch, output_at, update_state(after, to, before, at, p, token, delta))


@jitable
def gated_norm(run, thread, p, head, column):
    """Compute out[t] = weight * y[t] / sqrt(mean(y[t]^2) + eps) * silu(x[t, column:]) of one head, for all tokens.

    y is the head's output in scratch, which is overwritten.
    """
    width, n = p.deltas.shape[2], p.head_dim
    for t in range(run.n_tokens):
        at = (thread * p.scratch.shape[1] + t) * p.scratch.shape[2] + p.scratch.shape[2] - width
        p.scratch[thread, t, p.scratch.shape[2] - width + n :] = np.float32(0.0)
        scale = splat(compute_norm_scale(p.scratch, at, width, n, p.eps))
        for k in range(0, width, LANES):
            v = mul(load(p.weight, k), mul(load(p.scratch, at + k), scale))
            store(p.scratch, at + k, mul(v, silu(load(p.x, t * p.x.shape[1] + column + k))))
        for k in range(n):
            p.out[0, t, head * n + k] = p.scratch[thread, t, p.scratch.shape[2] - width + k]


@jitable
def prepare_inputs(run, thread, p, head, decay_column):
    """Compute the queries, keys and decays that `step` reads, for one head and all tokens of the pass.

    Queries and keys are L2-normed, and queries divided by sqrt(K). They go to scratch; keys and decays go to their rings.
    decay_column: Column of p.x where the heads' inputs of the decays begin.
    """
    n_keys, key_at, padded = p.key_dim, p.keys.shape[2], p.rates.size // 2  # key_at: in scratch, after the query
    key_head = head % p.n_key_heads if p.tiled_heads else head // (p.lengths.shape[0] // p.n_key_heads)
    for t in range(run.n_tokens):
        slot = (run.pos + t) % RING_SLOTS
        normalize_rows(p.scratch, thread, t, 0, p.x, key_head * n_keys, n_keys, np.float32(1.0) / sqrt(np.float32(n_keys)))
        normalize_rows(p.scratch, thread, t, key_at, p.x, (p.n_key_heads + key_head) * n_keys, n_keys, np.float32(1.0))
        for k in range(n_keys):
            p.keys[head, slot, k] = p.scratch[thread, t, key_at + k]
        p.decays[head, slot] = compute_decay(p.rates[head], softplus_scalar(p.x[t, decay_column + head] + p.rates[padded + head]))


@kernel
def delta_net(run: ForwardContext, thread: int, p: DeltaNetArgs) -> None:
    """Apply the gated delta rule (Yang et al. 2025, arXiv:2412.06464) token by token, with the gated norm: this chunk's heads.

    The tip's state advances over all tokens that cannot be rejected, up to the first whose logits are requested. The next pass
    first replays the draft tokens that were accepted. A sequence that is truncated to before the tip continues from the base.
    A head's lengths are written after its states: an interrupted pass leaves some heads ahead of others.
    """
    n_heads, width, n = p.lengths.shape[0], p.deltas.shape[2], p.head_dim
    n_panels, panel_items, padded = width // PANEL_ROWS, p.keys.shape[2] * PANEL_ROWS, p.rates.size // 2
    gates = round_up(2 * p.n_key_heads * p.key_dim + n_heads * n, PANEL_ROWS)
    betas = gates + round_up(n_heads * n, PANEL_ROWS)
    n_accepted, draft_at = run.pos + run.n_tokens - max(run.n_logits - 1, 0), thread * panel_items
    first, last = get_chunk_range(n_heads, run.chunk, run.n_chunks)
    for head in range(first, last):
        base, start, source = advance_base(run, thread, p, head)
        prepare_inputs(run, thread, p, head, betas + padded)
        for panel in range(n_panels):
            tip_at = (p.states.shape[1] + head * n_panels + panel) * panel_items
            panel_at = source + panel * panel_items
            if start < run.pos or panel_at != tip_at:
                scan(run, thread, p, Scan(head, panel, panel_at, tip_at, start, run.pos, run.pos))
            for t in range(run.n_tokens):
                slot, beta = head * RING_SLOTS + (run.pos + t) % RING_SLOTS, sigmoid_scalar(p.x[t, betas + head])
                token = TokenStep(thread, t, head, slot, beta)
                if run.pos + t < n_accepted:
                    step(p.states, tip_at, p.states, tip_at, p, token, panel)
                elif run.pos + t == n_accepted:
                    step(p.draft_state, draft_at, p.states, tip_at, p, token, panel)
                else:
                    step(p.draft_state, draft_at, p.draft_state, draft_at, p, token, panel)
        gated_norm(run, thread, p, head, gates + head * n)
        p.lengths[head, BASE], p.lengths[head, TIP] = base, n_accepted


# Mamba-2. Shapes: T tokens of this pass, H heads, P rows of a head, G groups of heads, N state dim, R panel rows. In the terms of
# the delta rule, B is the key, C the query and dt x the delta, which does not depend on the state.


class Mamba2Args(NamedTuple):
    """Arguments of the kernel `mamba2`.

    Attributes:
        out: Output (1, T, H P or more).
        x: (T, columns): x, B and C after the convolution, then in panels of their own gates z and time steps dt.
        states: (2, H ceil(P / R), N, R): panels of the base's state and of the tip's state.
        lengths: (H, 2): number of tokens in each head's base and tip.
        keys: Ring (1, KEY_RING_SLOTS, G N) of B, which `store_columns` fills.
        deltas, decays: Rings (H, RING_SLOTS, P padded) of dt x and (H, RING_SLOTS).
        scratch: (threads, T, P padded): outputs of a head.
        rates: Decay rates (H padded), then biases of dt, then factors of x in the output.
        head_dim: P without padding.
        scale: Factor of the output.
    """

    out: Floats3
    x: Floats2
    states: Floats4
    lengths: Ints2
    keys: Floats3
    deltas: Floats3
    decays: Floats2
    scratch: Floats3
    rates: Floats1
    head_dim: int
    scale: float


@kernel
def store_columns(run: ForwardContext, thread: int, x: Floats2, base: int, ring: Floats2) -> None:
    """Copy columns of x, from `base` on, to the ring (N, columns), for the rows that this chunk's share of the matmul wrote."""
    first, last = get_chunk_rows(run, x.shape[1], 1, base, ring.shape[1])
    for t in range(run.n_tokens):
        slot = (run.pos + t) % ring.shape[0]
        for k in range(first, last):
            ring[slot, k] = x[t, base + k]


@jitable
def prepare_scan(run, thread, p, head, dt_column):
    """Zero scratch, and write a head's decays e^(rate dt) and deltas dt x to the rings, where dt = softplus(x + bias)."""
    width, padded = p.deltas.shape[2], p.rates.size // 3
    for t in range(run.n_tokens):
        slot = (run.pos + t) % RING_SLOTS
        dt = softplus_scalar(p.x[t, dt_column + head] + p.rates[padded + head])
        p.decays[head, slot] = compute_decay(p.rates[head], dt)
        for k in range(0, width, LANES):
            delta = mul(load(p.x, t * p.x.shape[1] + head * p.head_dim + k), splat(dt))
            store(p.deltas, (head * RING_SLOTS + slot) * width + k, delta)
            store(p.scratch, (thread * p.scratch.shape[1] + t) * width + k, splat(0.0))


@jitable
def gate_outputs(run, thread, p, head, gate_column):
    """Compute out[t] = scale (y + factor x) silu(z) of one head, for all tokens; y lies in scratch, which is overwritten."""
    width, factor, scale = p.deltas.shape[2], splat(p.rates[p.rates.size // 3 * 2 + head]), splat(p.scale)
    for t in range(run.n_tokens):
        at, row = (thread * p.scratch.shape[1] + t) * width, t * p.x.shape[1] + head * p.head_dim
        for k in range(0, width, LANES):
            v = fma(factor, load(p.x, row + k), load(p.scratch, at + k))
            store(p.scratch, at + k, mul(mul(v, silu(load(p.x, row + gate_column + k))), scale))
        for k in range(p.head_dim):
            p.out[0, t, head * p.head_dim + k] = p.scratch[thread, t, k]


@kernel
def mamba2(run: ForwardContext, thread: int, p: Mamba2Args) -> None:
    """Run Mamba-2's recurrence (Dao and Gu 2024, arXiv:2405.21060, eq. 16) token by token, and its gate: this chunk's heads.

    Base and tip are those of `delta_net`. The tip first advances over the draft tokens of the last pass that were accepted, then
    over this pass's tokens that cannot be rejected. It starts from the base if the sequence was truncated to before the tip, or
    if this pass overwrites updates that the tip needs; the base advances before that.
    """
    n_heads, width, n_rows = p.lengths.shape[0], p.deltas.shape[2], p.states.shape[2]
    n_panels, panel_items, end = width // PANEL_ROWS, n_rows * PANEL_ROWS, run.pos + run.n_tokens
    gates = round_up(n_heads * p.head_dim + 2 * p.keys.shape[2], PANEL_ROWS)
    n_accepted = end - max(run.n_logits - 1, 0)
    first, last = get_chunk_range(n_heads, run.chunk, run.n_chunks)
    for head in range(first, last):
        base, start, source = advance_base(run, thread, p, head)
        prepare_scan(run, thread, p, head, gates + round_up(n_heads * p.head_dim, PANEL_ROWS))
        for panel in range(n_panels):
            tip_at = (p.states.shape[1] + head * n_panels + panel) * panel_items
            scan(run, thread, p, Scan(head, panel, source + panel * panel_items, tip_at, start, n_accepted, end))
        gate_outputs(run, thread, p, head, gates)
        p.lengths[head, BASE], p.lengths[head, TIP] = base, n_accepted
