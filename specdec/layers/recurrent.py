"""Operations whose memory is a running state: what a token takes from the tokens before it, and no slot of a KV cache holds.

A convolution over tokens remembers its inputs in a ring: that of position p lies in row p mod N. A ring of MAX_TOKENS more rows
than a token looks back to holds, whatever a pass writes, the last inputs of every text that ended up to MAX_TOKENS ago. So going
back after a rejection costs nothing, and a pass that was broken off has spoiled nothing.

The state of a delta net is a matrix for each head, too large for one of every length: there are two, of all that stands and of a
shorter text, and a ring of what each token since has made of them. Going on from either gives the same bits.
"""

from typing import NamedTuple

import numpy as np

from specdec.kernels import MAX_TOKENS, norm_scale, own_rows, sum_of_squares
from specdec.layers.base import Buffer
from specdec.runtime.code_cache import compiled, inlined, inner
from specdec.runtime.elementary import exp, log, sigmoid, silu
from specdec.runtime.program import Floats1, Floats2, Floats3, Floats4, Ints2, Pass, operation
from specdec.runtime.simd import LANES, Float32, add, fma, item, lane, load, mul, round_up, splat, sqrt, store
from specdec.runtime.tile import STRIP_ROWS
from specdec.runtime.work_stealing import share

N_STATES = MAX_TOKENS + 1  # the lengths of a text that a ring can go on from: see `Architecture.n_states`
N_KEPT = MAX_TOKENS + 32  # places of a delta net's rings: its shorter text grows by 32 tokens at a time
BASE, TIP = 0, 1
UNIT_EPS = 1e-6  # of the norms of queries and keys, in every family
NO_BIAS: Float32 = np.zeros(0, np.float32)


def ring(n_layers: int, width: int, n_channels: int) -> Buffer:
    """The inputs (L, N, channels padded) that layers of convolutions of that width remember of a text."""
    return Buffer((n_layers, MAX_TOKENS + width - 1, n_channels), whose="text")


@inlined
def convolved(inputs, weight, bias, position, k):
    """bias + sum_j weight[j] inputs[position - width + 1 + j], of channels k on: one chain of multiply-adds, from the oldest on.

    inputs (N, channels): a ring; weight (width, channels); bias (channels), or nothing. Before a text there is nothing.
    """
    width = weight.shape[0]
    acc = load(bias, k) if bias.size > 0 else splat(0.0)
    for j in range(max(width - 1 - position, 0), width):
        row = (position - width + 1 + j) % inputs.shape[0]
        acc = fma(load(weight, j * weight.shape[1] + k), load(inputs, row * inputs.shape[1] + k), acc)
    return acc


class Convolution(NamedTuple):
    """What `convolve` takes: channels begin at row `base` of x (T, rows), a product of that unit; see `convolved`."""

    x: Floats2
    unit: int
    base: int
    inputs: Floats2
    weight: Floats2
    bias: Floats1


@operation
def convolve(run: Pass, thread: int, p: Convolution) -> None:
    """x[t] = silu(convolved x)[t], channel by channel: this part's rows of the product before."""
    x, unit, base, inputs, weight, bias = p
    n_channels = weight.shape[1]
    first, last = own_rows(run, x.shape[1], unit, base, n_channels)
    for t in range(run.n_tokens):
        position = run.pos + t
        row = position % inputs.shape[0] * n_channels
        for k in range(first, last, LANES):
            at = t * x.shape[1] + base + k
            store(inputs, row + k, load(x, at))
            v = convolved(inputs, weight, bias, position, k)
            store(x, at, mul(v, sigmoid(v)))


class GatedConvolution(NamedTuple):
    """What `gated_convolution` takes: out (1, T, channels); x (T, 3 channels) holds strips of b, c and x in turns."""

    out: Floats3
    x: Floats2
    inputs: Floats2
    weight: Floats2
    bias: Floats1


@operation
def gated_convolution(run: Pass, thread: int, p: GatedConvolution) -> None:
    """out[t] = c[t] * convolved(b x)[t], channel by channel: this part's strips of the product before, of unit 3."""
    out, x, inputs, weight, bias = p
    n_channels = weight.shape[1]
    first, last = share(n_channels // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        position = run.pos + t
        row = position % inputs.shape[0] * n_channels
        for k in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            strip, lane = divmod(k, STRIP_ROWS)
            at = t * x.shape[1] + 3 * strip * STRIP_ROWS + lane
            store(inputs, row + k, mul(load(x, at), load(x, at + 2 * STRIP_ROWS)))
            v = convolved(inputs, weight, bias, position, k)
            store(out, t * n_channels + k, mul(load(x, at + STRIP_ROWS), v))


# The gated delta rule; T tokens of this pass, N places of a ring, H heads of values, K rows of a head's keys, C of its values


@inner
def exp_of(x):
    """e^x of a float32."""
    return lane(exp(splat(x)), 0)


@compiled
def fill_rates(rates, logarithms):
    """rates = -e^logarithms, of float32."""
    for i in range(rates.size):
        rates[i] = -exp_of(logarithms[i])


@inner
def sigmoid_of(x):
    """1 / (1 + e^-x) of a float32."""
    return lane(sigmoid(splat(x)), 0)


@inner
def softplus_of(x):
    """log(1 + e^x) of a float32: what is beyond 0 of x, and log(1 + e^-|x|)."""
    if not abs(x) < np.inf:
        return max(x, np.float32(0.0)) if x == x else x
    return max(x, np.float32(0.0)) + np.float32(log(1.0 + np.float64(exp_of(-abs(x)))))


class DeltaNet(NamedTuple):
    """What `delta_net` takes.

    out (1, T, H C or more). x (T, columns): of queries, of keys and of values, then in strips of their own those of gates, of
    betas and of decays. Of each head states (2, H C / R, K, R), strip by strip, that of the base and that of the tip, and the
    lengths (H, 2) of the text that they are of; rings of keys (H, N, K), deltas (H, N, C) and decays (H, N).
    scratch (threads, T, words): a head's queries, keys and outputs; guess (threads, K, R): a strip of a state that guesses make.
    rates: of decays (H padded), then what is added to these (H padded). weight (C): of the norm of heads; head_dim: C without
    padding. n_key_heads: of which each stands for as many heads of values, in a row, or in turns.
    """

    out: Floats3
    x: Floats2
    states: Floats4
    lengths: Ints2
    keys: Floats3
    deltas: Floats3
    decays: Floats2
    scratch: Floats3
    guess: Floats3
    rates: Floats1
    weight: Floats1
    eps: float
    head_dim: int
    n_key_heads: int
    in_turns: int


@inner
def unit_rows(scratch, thread, t, to, x, column, n, scale):
    """scratch[t, to:] = scale x[t, column:] / |x[t, column:]|, n numbers."""
    at, start = (thread * scratch.shape[1] + t) * scratch.shape[2] + to, t * x.shape[1] + column
    whole, total = n // LANES * LANES, sum_of_squares(x, start, n)
    factor = scale / sqrt(total + np.float32(UNIT_EPS)) + np.float32(0.0) * total  # not finite where the squares are not
    for k in range(0, whole, LANES):
        store(scratch, at + k, mul(load(x, start + k), splat(factor)))
    for k in range(whole, n):
        scratch[thread, t, to + k] = x[t, column + k] * factor


@inner
def replay(states, to, start, p, head, strip, first, last):
    """The state (K, R) at `to` = that at `start`, over what positions first to last made of it: four rows at a time."""
    n_keys, width, begin, n = p.keys.shape[2], p.deltas.shape[2], first % N_KEPT, last - first
    in_front = min(n, N_KEPT - begin)  # of the ring's end
    row, first_key, first_decay = head * N_KEPT * width + strip * STRIP_ROWS, head * N_KEPT * n_keys, head * N_KEPT
    fours = n_keys // 4 * 4
    for k in range(0, fours, 4):
        at = start + k * STRIP_ROWS
        a0, b0 = load(states, at), load(states, at + LANES)
        a1, b1 = load(states, at + 2 * LANES), load(states, at + 3 * LANES)
        a2, b2 = load(states, at + 4 * LANES), load(states, at + 5 * LANES)
        a3, b3 = load(states, at + 6 * LANES), load(states, at + 7 * LANES)
        for i in range(n):
            slot = begin + i if i < in_front else i - in_front
            decay, left = splat(item(p.decays, first_decay + slot)), load(p.deltas, row + slot * width)
            right = load(p.deltas, row + slot * width + LANES)
            key = splat(item(p.keys, first_key + slot * n_keys + k))
            a0, b0 = fma(key, left, mul(a0, decay)), fma(key, right, mul(b0, decay))
            key = splat(item(p.keys, first_key + slot * n_keys + k + 1))
            a1, b1 = fma(key, left, mul(a1, decay)), fma(key, right, mul(b1, decay))
            key = splat(item(p.keys, first_key + slot * n_keys + k + 2))
            a2, b2 = fma(key, left, mul(a2, decay)), fma(key, right, mul(b2, decay))
            key = splat(item(p.keys, first_key + slot * n_keys + k + 3))
            a3, b3 = fma(key, left, mul(a3, decay)), fma(key, right, mul(b3, decay))
        at = to + k * STRIP_ROWS
        store(states, at, a0)
        store(states, at + LANES, b0)
        store(states, at + 2 * LANES, a1)
        store(states, at + 3 * LANES, b1)
        store(states, at + 4 * LANES, a2)
        store(states, at + 5 * LANES, b2)
        store(states, at + 6 * LANES, a3)
        store(states, at + 7 * LANES, b3)
    for at in range(fours * STRIP_ROWS, n_keys * STRIP_ROWS, LANES):
        k, lanes = at // STRIP_ROWS, at % STRIP_ROWS
        a = load(states, start + at)
        for i in range(n):
            slot = begin + i if i < in_front else i - in_front
            decay, key = splat(item(p.decays, first_decay + slot)), splat(item(p.keys, first_key + slot * n_keys + k))
            a = fma(key, load(p.deltas, row + slot * width + lanes), mul(a, decay))
        store(states, to + at, a)


class Token(NamedTuple):
    """A token of the pass in a head: its number, the ring's place of its position, and how much of a delta is taken."""

    thread: int
    t: int
    head: int
    slot: int
    beta: float


@inlined
def recalled(before, at, p, token):
    """The values (R) that a state (K, R) at `at`, decayed, has for the token's key: by rows of even numbers and of odd."""
    n_keys = p.keys.shape[2]
    decay, keys = splat(item(p.decays, token.head * N_KEPT + token.slot)), (token.head * N_KEPT + token.slot) * n_keys
    a = b = c = d = splat(0.0)
    for k in range(0, n_keys - 1, 2):
        here, key = at + k * STRIP_ROWS, splat(item(p.keys, keys + k))
        a, b = fma(mul(load(before, here), decay), key, a), fma(mul(load(before, here + LANES), decay), key, b)
        here, key = here + STRIP_ROWS, splat(item(p.keys, keys + k + 1))
        c, d = fma(mul(load(before, here), decay), key, c), fma(mul(load(before, here + LANES), decay), key, d)
    if n_keys % 2:
        here, key = at + (n_keys - 1) * STRIP_ROWS, splat(item(p.keys, keys + n_keys - 1))
        a, b = fma(mul(load(before, here), decay), key, a), fma(mul(load(before, here + LANES), decay), key, b)
    return add(a, c), add(b, d)


@inlined
def renewed_row(after, to, before, at, decay, key, left, right):
    """`renewed`, of a row: what it becomes."""
    s = fma(key, left, mul(load(before, at), decay))
    u = fma(key, right, mul(load(before, at + LANES), decay))
    store(after, to, s)
    store(after, to + LANES, u)
    return s, u


@inlined
def renewed(after, to, before, at, p, token, left, right):
    """The state at `to` = that at `at`, decayed, and the outer product of key and delta; returns what it has for the query.

    Decaying is computed again, which costs less than to store it.
    """
    n_keys, queries = p.keys.shape[2], (token.thread * p.scratch.shape[1] + token.t) * p.scratch.shape[2]
    decay, keys = splat(item(p.decays, token.head * N_KEPT + token.slot)), (token.head * N_KEPT + token.slot) * n_keys
    a = b = c = d = splat(0.0)
    for k in range(0, n_keys - 1, 2):
        row, key, query = k * STRIP_ROWS, splat(item(p.keys, keys + k)), splat(item(p.scratch, queries + k))
        s, u = renewed_row(after, to + row, before, at + row, decay, key, left, right)
        a, b = fma(s, query, a), fma(u, query, b)
        row, key, query = row + STRIP_ROWS, splat(item(p.keys, keys + k + 1)), splat(item(p.scratch, queries + k + 1))
        s, u = renewed_row(after, to + row, before, at + row, decay, key, left, right)
        c, d = fma(s, query, c), fma(u, query, d)
    if n_keys % 2:
        row, key = (n_keys - 1) * STRIP_ROWS, splat(item(p.keys, keys + n_keys - 1))
        query = splat(item(p.scratch, queries + n_keys - 1))
        s, u = renewed_row(after, to + row, before, at + row, decay, key, left, right)
        a, b = fma(s, query, a), fma(u, query, b)
    return add(a, c), add(b, d)


@inner  # and what it consists of is inlined: a call copies all of a record of arrays, which took half of its time
def step(after, to, before, at, p, token, strip):
    """One token, from a state (K, R) at `at` to one at `to`: S = g S; d = (v - S' k) beta; S = S + k d'; y = S' q."""
    width, beta, minus = p.deltas.shape[2], splat(token.beta), splat(-1.0)
    left, right = recalled(before, at, p, token)
    value = token.t * p.x.shape[1] + 2 * p.n_key_heads * p.keys.shape[2] + token.head * p.head_dim + strip * STRIP_ROWS
    left, right = mul(fma(left, minus, load(p.x, value)), beta), mul(fma(right, minus, load(p.x, value + LANES)), beta)
    place = (token.head * N_KEPT + token.slot) * width + strip * STRIP_ROWS
    store(p.deltas, place, left)
    store(p.deltas, place + LANES, right)
    left, right = renewed(after, to, before, at, p, token, left, right)
    y = (token.thread * p.scratch.shape[1] + token.t + 1) * p.scratch.shape[2] - width + strip * STRIP_ROWS
    store(p.scratch, y, left)
    store(p.scratch, y + LANES, right)


@inner
def gated_norm(run, thread, p, head, column):
    """out[t] = weight * y[t] / sqrt(mean(y[t]^2) + eps) * silu(x[t, column:]): a head's of all tokens."""
    width, n = p.deltas.shape[2], p.head_dim
    for t in range(run.n_tokens):
        y = (thread * p.scratch.shape[1] + t) * p.scratch.shape[2] + p.scratch.shape[2] - width
        p.scratch[thread, t, p.scratch.shape[2] - width + n :] = np.float32(0.0)
        scale = splat(norm_scale(p.scratch, y, width, n, p.eps))
        for k in range(0, width, LANES):
            v = mul(load(p.weight, k), mul(load(p.scratch, y + k), scale))
            store(p.scratch, y + k, mul(v, silu(load(p.x, t * p.x.shape[1] + column + k))))
        for k in range(n):
            p.out[0, t, head * n + k] = p.scratch[thread, t, p.scratch.shape[2] - width + k]


@inner
def catch_up(run, p, head):
    """Let the tip's state of a head be that of the text in front of the pass, and the base's move on where the ring ends.

    Returns the length of the text that the base's is of.
    """
    n_strips, strip_items = p.deltas.shape[2] // STRIP_ROWS, p.keys.shape[2] * STRIP_ROWS
    base, tip, end = p.lengths[head, BASE], p.lengths[head, TIP], run.pos + run.n_tokens
    moves = run.pos > 0 and end - base > N_KEPT
    for strip in range(n_strips):
        of_base = (head * n_strips + strip) * strip_items
        of_tip = of_base + p.states.shape[1] * strip_items
        if run.pos == 0:
            for i in range(0, strip_items, LANES):
                store(p.states, of_base + i, splat(0.0))
                store(p.states, of_tip + i, splat(0.0))
        elif tip > run.pos:
            replay(p.states, of_tip, of_base, p, head, strip, base, run.pos)
        elif tip < run.pos:
            replay(p.states, of_tip, of_tip, p, head, strip, tip, run.pos)
        if moves:  # before this pass fills the ring
            replay(p.states, of_base, of_base, p, head, strip, base, end - MAX_TOKENS)
    return 0 if run.pos == 0 else end - MAX_TOKENS if moves else base


@inner
def take_in(run, thread, p, head, decay_column):
    """Of a head the pass's queries and keys, normed, and its decays, to where `step` looks for them."""
    n_keys, padded = p.keys.shape[2], p.rates.size // 2
    key_head = head % p.n_key_heads if p.in_turns else head // (p.lengths.shape[0] // p.n_key_heads)
    for t in range(run.n_tokens):
        slot = (run.pos + t) % N_KEPT
        unit_rows(p.scratch, thread, t, 0, p.x, key_head * n_keys, n_keys, np.float32(1.0) / sqrt(np.float32(n_keys)))
        unit_rows(p.scratch, thread, t, n_keys, p.x, (p.n_key_heads + key_head) * n_keys, n_keys, np.float32(1.0))
        for k in range(n_keys):
            p.keys[head, slot, k] = p.scratch[thread, t, n_keys + k]
        p.decays[head, slot] = exp_of(p.rates[head] * softplus_of(p.x[t, decay_column + head] + p.rates[padded + head]))


@operation
def delta_net(run: Pass, thread: int, p: DeltaNet) -> None:
    """The gated delta rule (Yang et al. 2025, arXiv:2412.06464) token by token, and the gated norm of its outputs: this part's
    heads.

    The tip's state becomes that of all tokens but those that may be guesses, behind the first whose logits are asked for; a pass
    behind it first goes over those that stood. Where a text goes back before the tip, it goes on from the base. A head's lengths
    are written behind its states: a pass that is broken off leaves heads that have moved on, and others.
    """
    n_heads, width, n = p.lengths.shape[0], p.deltas.shape[2], p.head_dim
    n_strips, strip_items, padded = width // STRIP_ROWS, p.keys.shape[2] * STRIP_ROWS, p.rates.size // 2
    gates = round_up(2 * p.n_key_heads * p.keys.shape[2] + n_heads * n, STRIP_ROWS)
    betas = gates + round_up(n_heads * n, STRIP_ROWS)
    stands, guess = run.pos + run.n_tokens - max(run.n_logits - 1, 0), thread * strip_items
    first, last = share(n_heads, run.part, run.n_parts)
    for head in range(first, last):
        base = catch_up(run, p, head)
        take_in(run, thread, p, head, betas + padded)
        for strip in range(n_strips):
            tip = (p.states.shape[1] + head * n_strips + strip) * strip_items
            for t in range(run.n_tokens):
                token = Token(thread, t, head, (run.pos + t) % N_KEPT, sigmoid_of(p.x[t, betas + head]))
                if run.pos + t < stands:
                    step(p.states, tip, p.states, tip, p, token, strip)
                elif run.pos + t == stands:
                    step(p.guess, guess, p.states, tip, p, token, strip)
                else:
                    step(p.guess, guess, p.guess, guess, p, token, strip)
        gated_norm(run, thread, p, head, gates + head * n)
        p.lengths[head, BASE], p.lengths[head, TIP] = base, stands
