"""What gates and activates: operations. Knows no architecture.

Shapes: T tokens of this pass, F rows of an MLP's first matrix.
"""

from typing import NamedTuple

import numpy as np

from specdec.kernels import norm_scale, own_rows
from specdec.runtime.code_cache import inlined
from specdec.runtime.elementary import gelu_tanh, sigmoid, silu, tanh
from specdec.runtime.program import Floats1, Floats2, Floats3, Ints2, Pass, operation
from specdec.runtime.simd import LANES, add, ceil_div, fma, lane, load, maximum, minimum, mul, splat, store
from specdec.runtime.tile import STRIP_ROWS
from specdec.runtime.work_stealing import share


@inlined
def gate(run, thread, hidden, up, per_token, activation):
    """hidden[t] = activation(w1 x) * (w3 x): this part's strips of up (T per_token, 2 F), those of both in turns."""
    width = hidden.shape[2]
    first, last = share(width // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens * per_token):
        for strip in range(first, last):
            for i in range(0, STRIP_ROWS, LANES):
                at = t * up.shape[1] + 2 * strip * STRIP_ROWS + i
                gated = mul(activation(load(up, at)), load(up, at + STRIP_ROWS))
                store(hidden, t * width + strip * STRIP_ROWS + i, gated)


@operation
def swiglu(run: Pass, thread: int, hidden: Floats3, up: Floats2, per_token: int) -> None:
    """hidden[t] = silu(w1 x) * (w3 x)  (Shazeer 2020)."""
    gate(run, thread, hidden, up, per_token, silu)


@operation
def geglu(run: Pass, thread: int, hidden: Floats3, up: Floats2, per_token: int) -> None:
    """hidden[t] = gelu(w1 x) * (w3 x)  (Shazeer 2020)."""
    gate(run, thread, hidden, up, per_token, gelu_tanh)


@operation
def gelu(run: Pass, thread: int, hidden: Floats3, up: Floats2) -> None:
    """hidden[t] = gelu(up[t]): this part's strips of up (T, F)."""
    width = hidden.shape[2]
    first, last = share(width // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        for i in range(t * width + first * STRIP_ROWS, t * width + last * STRIP_ROWS, LANES):
            store(hidden, i, gelu_tanh(load(up, i)))


@operation
def gate_rows(run: Pass, thread: int, heads: Floats3, gates: Floats2, base: int, n: int) -> None:
    """heads[t] *= sigmoid of n columns of gates[t] from `base` on: this part's vectors of them."""
    first, last = share(ceil_div(n, LANES), run.part, run.n_parts)
    for t in range(run.n_tokens):
        for row in range(first * LANES, last * LANES, LANES):
            at = t * heads.shape[2] + row
            store(heads, at, mul(load(heads, at), sigmoid(load(gates, t * gates.shape[1] + base + row))))


@operation
def gate_tokens(run: Pass, thread: int, hidden: Floats3, gates: Floats2) -> None:
    """hidden[0, t] *= sigmoid(gates[t, 0]): this part's columns."""
    first, last = share(hidden.shape[2] // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        scale = sigmoid(splat(gates[t, 0]))
        for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            at = t * hidden.shape[2] + i
            store(hidden, at, mul(load(hidden, at), scale))


@operation
def clamped_swiglu(
    run: Pass, thread: int, hidden: Floats3, up: Floats2, bias: Floats2, starts: Ints2, limit: float, alpha: float
) -> None:
    """hidden[slot] = (u + 1) g sigmoid(alpha g) of g = min(w1 x + b1, limit) and u = w3 x + b3 between -limit and limit (gpt-oss:
    OpenAI 2025, arXiv:2508.10925): this part's strips of up (slots, 2 F), those of both in turns, as those of bias (E, 2 F).

    starts (threads, E + 1): at which slot an expert's begin.
    """
    width, most, least = hidden.shape[2], splat(limit), splat(-limit)
    first, last = share(width // STRIP_ROWS, run.part, run.n_parts)
    for expert in range(starts.shape[1] - 1):
        for slot in range(starts[thread, expert], starts[thread, expert + 1]):
            for strip in range(first, last):
                for i in range(0, STRIP_ROWS, LANES):
                    place = 2 * strip * STRIP_ROWS + i
                    at, own = slot * up.shape[1] + place, expert * bias.shape[1] + place
                    g = minimum(most, add(load(up, at), load(bias, own)))
                    u = maximum(least, minimum(most, add(load(up, at + STRIP_ROWS), load(bias, own + STRIP_ROWS))))
                    gated = mul(mul(add(u, splat(1.0)), g), sigmoid(mul(splat(alpha), g)))
                    store(hidden, slot * width + strip * STRIP_ROWS + i, gated)


@operation
def add_slot_bias(run: Pass, thread: int, out: Floats2, bias: Floats2, starts: Ints2) -> None:
    """out[slot] += bias[its expert]: this part's strips of the product before; starts: as of `clamped_swiglu`."""
    first, last = share(out.shape[1] // STRIP_ROWS, run.part, run.n_parts)
    for expert in range(starts.shape[1] - 1):
        for slot in range(starts[thread, expert], starts[thread, expert + 1]):
            for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
                at = slot * out.shape[1] + i
                store(out, at, add(load(out, at), load(bias, expert * bias.shape[1] + i)))


@operation
def cap(run: Pass, thread: int, logits: Floats2, most: float) -> None:
    """logits[t] = most tanh(logits[t] / most), of the tokens that have some: this part's strips of the product before."""
    first, last = share(logits.shape[1] // STRIP_ROWS, run.part, run.n_parts)
    inverse = splat(np.float32(1.0) / most)
    for t in range(run.n_logits):
        for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            at = t * logits.shape[1] + i
            store(logits, at, mul(splat(most), tanh(mul(load(logits, at), inverse))))


@operation
def mix_inputs(run: Pass, thread: int, inputs: Floats2, rows: Floats2, unit: int, of_rows: float, of_all: float) -> None:
    """inputs[t] = of_all (inputs[t] + of_rows rows[t]): this part's rows of the product before, of that unit."""
    first, last = own_rows(run, inputs.shape[1], unit, 0, rows.shape[1])
    for t in range(run.n_tokens):
        for k in range(first, last):
            inputs[t, k] = (inputs[t, k] + rows[t, k] * of_rows) * of_all


@operation
def gate_inputs(run: Pass, thread: int, out: Floats3, gates: Floats2, inputs: Floats2, base: int, n: int) -> None:
    """out[0, t] = gelu(gates[t]) * n columns of inputs[t] from `base` on: this part's strips of the product before."""
    first, last = share(gates.shape[1] // STRIP_ROWS, run.part, run.n_parts)
    begin, end = first * STRIP_ROWS, min(last * STRIP_ROWS, n)
    whole = begin + max(end - begin, 0) // LANES * LANES
    for t in range(run.n_tokens):
        for k in range(begin, whole, LANES):
            gated = mul(gelu_tanh(load(gates, t * gates.shape[1] + k)), load(inputs, t * inputs.shape[1] + base + k))
            store(out, t * out.shape[2] + k, gated)
        for k in range(whole, end):
            out[0, t, k] = lane(gelu_tanh(splat(gates[t, k])), 0) * inputs[t, base + k]


class BothNorms(NamedTuple):
    """What `add_both` takes: x (T, D padded); a, b (1, T, D padded), which all have written; out (threads, T, D padded)."""

    x: Floats2
    a: Floats3
    b: Floats3
    out: Floats3
    weight_a: Floats1
    weight_b: Floats1
    weight: Floats1
    dim: int
    eps: float
    factor: float


@operation
def add_both(run: Pass, thread: int, p: BothNorms) -> None:
    """x[t] = factor (x[t] + rms_norm(rms_norm(a[t]) + rms_norm(b[t]))): this part's strips; out is each thread's own sum."""
    width = p.x.shape[1]
    if run.begins != 0:
        for t in range(run.n_tokens):
            row, target = t * width, (thread * p.out.shape[1] + t) * width
            of_a, of_b = splat(norm_scale(p.a, row, width, p.dim, p.eps)), splat(norm_scale(p.b, row, width, p.dim, p.eps))
            for i in range(0, width, LANES):
                first = mul(load(p.weight_a, i), mul(load(p.a, row + i), of_a))
                store(p.out, target + i, fma(load(p.weight_b, i), mul(load(p.b, row + i), of_b), first))
    first, last = share(width // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        row, source = t * width, (thread * p.out.shape[1] + t) * width
        scale = splat(norm_scale(p.out, source, width, p.dim, p.eps))
        for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            normed = fma(load(p.weight, i), mul(load(p.out, source + i), scale), load(p.x, row + i))
            store(p.x, row + i, mul(splat(p.factor), normed))
