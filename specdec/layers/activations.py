"""Kernels of activations, gates and norms of groups, most on the panels, columns or rows of the current chunk only.

Shapes: T tokens of this pass, D dim, F hidden dim, E experts, G groups of a row.
"""

import numpy as np

from specdec.kernels import get_chunk_rows, norm_row
from specdec.runtime import simd
from specdec.runtime.code_cache import CompiledFunction, inlined
from specdec.runtime.elementary import expm1, gelu_tanh, sigmoid, silu, softplus_scalar, tanh
from specdec.runtime.op_program import Floats1, Floats2, Floats3, ForwardContext, Ints2, Kernel, kernel
from specdec.runtime.simd import LANES, PANEL_ROWS, add, fma, load, maximum, minimum, mul, splat, store
from specdec.runtime.work_stealing import get_chunk_range


@inlined
def square_relu(v):
    """Return max(v, 0)^2 of a vector."""
    positive = maximum(splat(0.0), v)
    return mul(positive, positive)


def _make_activation(name: str, activation: CompiledFunction, is_gated: bool) -> Kernel:
    """Return the kernel `name`: hidden[t] = activation(w1 x), times w3 x if is_gated, for each of T per_token rows.

    up (T per_token, F) holds w1 x; with a gate, up (T per_token, 2 F) holds panels of w1 x and w3 x, interleaved.
    """

    def activate(run: ForwardContext, thread: int, hidden: Floats3, up: Floats2, per_token: int) -> None:
        width = hidden.shape[2]
        first, last = get_chunk_range(width // PANEL_ROWS, run.chunk, run.n_chunks)
        for t in range(run.n_tokens * per_token):
            for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
                at = t * up.shape[1] + i + (i // PANEL_ROWS * PANEL_ROWS if is_gated else 0)
                activated = activation(load(up, at))
                if is_gated:
                    activated = mul(activated, load(up, at + PANEL_ROWS))
                store(hidden, t * width + i, activated)

    return Kernel(activate).register(name)


swiglu = _make_activation("swiglu", silu, is_gated=True)  # Shazeer 2020, arXiv:2002.05202
geglu = _make_activation("geglu", gelu_tanh, is_gated=True)  # Shazeer 2020
gelu = _make_activation("gelu", gelu_tanh, is_gated=False)
relu2 = _make_activation("relu2", square_relu, is_gated=False)  # So et al. 2021, arXiv:2109.08668
gated_relu2 = _make_activation("gated_relu2", square_relu, is_gated=True)


@kernel
def xielu(run: ForwardContext, thread: int, hidden: Floats3, up: Floats2, numbers: Floats1, n: int) -> None:
    """Compute xIELU, hidden[0, t] = ap u^2 + beta u for u = w1 x > 0, else an (e^min(u, eps) - 1 - u) + beta u, without a gate.

    ap = softplus(alpha_p) and an = beta + softplus(alpha_n) (Huang and Schlag 2024, arXiv:2411.13010). numbers has alpha_p,
    alpha_n, beta and eps, each first in a panel of its own. Padding after the n columns becomes 0, although xIELU of 0 is not.
    """
    width, positive, beta = hidden.shape[2], splat(softplus_scalar(numbers[0])), splat(numbers[2 * PANEL_ROWS])
    negative, eps = splat(numbers[2 * PANEL_ROWS] + softplus_scalar(numbers[PANEL_ROWS])), splat(numbers[3 * PANEL_ROWS])
    first, last = get_chunk_range(width // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            u = load(up, t * up.shape[1] + i)
            low = minimum(splat(0.0), u)  # in this order a NaN stays one
            below = mul(negative, fma(low, splat(-1.0), expm1(minimum(low, eps))))
            below = fma(simd.zero_unless_positive(below, u), splat(-1.0), below)
            above = simd.zero_unless_positive(mul(mul(positive, u), u), u)
            store(hidden, t * width + i, fma(beta, u, add(above, below)))
        for i in range(max(n, first * PANEL_ROWS), last * PANEL_ROWS):
            hidden[0, t, i] = 0.0


@kernel
def gate_heads(run: ForwardContext, thread: int, heads: Floats3, gates: Floats2, base: int, n: int) -> None:
    """Compute heads[0, t] *= sigmoid(gates[t, base : base + n]), the gate of attention output."""
    first, last = get_chunk_range(simd.ceil_div(n, LANES), run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for row in range(first * LANES, last * LANES, LANES):
            at = t * heads.shape[2] + row
            store(heads, at, mul(load(heads, at), sigmoid(load(gates, t * gates.shape[1] + base + row))))


@kernel
def gate_heads_by_softplus(
    run: ForwardContext, thread: int, heads: Floats3, gates: Floats2, base: int, n: int, gate_rows: int
) -> None:
    """Compute heads[0, t] *= softplus(gates[t, base : base + n]), where each gate belongs to gate_rows rows of heads."""
    first, last = get_chunk_range(n, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for gate in range(first, last):
            scale = softplus_scalar(gates[t, base + gate])
            for row in range(gate * gate_rows, (gate + 1) * gate_rows):
                heads[0, t, row] *= scale


@kernel
def gate_tokens(run: ForwardContext, thread: int, hidden: Floats3, gates: Floats2) -> None:
    """Compute hidden[0, t] *= sigmoid(gates[t, 0]): one gate for all numbers of a token."""
    first, last = get_chunk_range(hidden.shape[2] // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        scale = sigmoid(splat(gates[t, 0]))
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            at = t * hidden.shape[2] + i
            store(hidden, at, mul(load(hidden, at), scale))


@kernel
def clamped_swiglu(
    run: ForwardContext, thread: int, hidden: Floats3, up: Floats2, bias: Floats2, starts: Ints2, limit: float, alpha: float
) -> None:
    """Compute clamped SwiGLU, hidden[0, slot] = (u + 1) g sigmoid(alpha g) (gpt-oss: OpenAI 2025, arXiv:2508.10925).

    g = min(w1 x + b1, limit); u = w3 x + b3, clamped to -limit..limit. up (slots, 2 F) holds panels of w1 x and w3 x,
    interleaved; bias (E, 2 F) holds b1 and b3 likewise. starts (threads, E + 1): first slot of each expert.
    """
    width, upper, lower = hidden.shape[2], splat(limit), splat(-limit)
    first, last = get_chunk_range(width // PANEL_ROWS, run.chunk, run.n_chunks)
    for expert in range(starts.shape[1] - 1):
        for slot in range(starts[thread, expert], starts[thread, expert + 1]):
            for panel in range(first, last):
                for i in range(0, PANEL_ROWS, LANES):
                    column = 2 * panel * PANEL_ROWS + i
                    at, bias_at = slot * up.shape[1] + column, expert * bias.shape[1] + column
                    g = minimum(upper, add(load(up, at), load(bias, bias_at)))
                    u = maximum(lower, minimum(upper, add(load(up, at + PANEL_ROWS), load(bias, bias_at + PANEL_ROWS))))
                    gated = mul(mul(add(u, splat(1.0)), g), sigmoid(mul(splat(alpha), g)))
                    store(hidden, slot * width + panel * PANEL_ROWS + i, gated)


@kernel
def add_slot_bias(run: ForwardContext, thread: int, out: Floats2, bias: Floats2, starts: Ints2) -> None:
    """Compute out[slot] += bias[expert of the slot], the bias (E, D) of experts; starts as in `clamped_swiglu`."""
    first, last = get_chunk_range(out.shape[1] // PANEL_ROWS, run.chunk, run.n_chunks)
    for expert in range(starts.shape[1] - 1):
        for slot in range(starts[thread, expert], starts[thread, expert + 1]):
            for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
                at = slot * out.shape[1] + i
                store(out, at, add(load(out, at), load(bias, expert * bias.shape[1] + i)))


@kernel
def softcap(run: ForwardContext, thread: int, logits: Floats2, bound: float) -> None:
    """Compute logits[t] = bound tanh(logits[t] / bound) in place, for the n_logits tokens with logits."""
    first, last = get_chunk_range(logits.shape[1] // PANEL_ROWS, run.chunk, run.n_chunks)
    inverse = splat(np.float32(1.0) / bound)
    for t in range(run.n_logits):
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            at = t * logits.shape[1] + i
            store(logits, at, mul(splat(bound), tanh(mul(load(logits, at), inverse))))


@kernel
def combine_per_layer_inputs(
    run: ForwardContext, thread: int, inputs: Floats2, rows: Floats2, unit: int, row_scale: float, scale: float
) -> None:
    """Compute inputs[t] = scale (inputs[t] + row_scale rows[t]) for what this chunk of the preceding matmul wrote.

    unit: The matmul's number of panels per step; see `get_chunk_rows`.
    """
    first, last = get_chunk_rows(run, inputs.shape[1], unit, 0, rows.shape[1])
    for t in range(run.n_tokens):
        for k in range(first, last):
            inputs[t, k] = (inputs[t, k] + rows[t, k] * row_scale) * scale


@kernel
def gate_per_layer_inputs(
    run: ForwardContext, thread: int, out: Floats3, gates: Floats2, inputs: Floats2, base: int, n: int
) -> None:
    """Compute out[0, t] = gelu(gates[t]) * inputs[t, base : base + n], a layer's share of the per-layer inputs, gated."""
    first, last = get_chunk_range(gates.shape[1] // PANEL_ROWS, run.chunk, run.n_chunks)
    begin, end = first * PANEL_ROWS, min(last * PANEL_ROWS, n)
    whole = begin + max(end - begin, 0) // LANES * LANES
    for t in range(run.n_tokens):
        for k in range(begin, whole, LANES):
            gated = mul(gelu_tanh(load(gates, t * gates.shape[1] + k)), load(inputs, t * inputs.shape[1] + base + k))
            store(out, t * out.shape[2] + k, gated)
        for k in range(whole, end):
            out[0, t, k] = simd.extract_lane(gelu_tanh(splat(gates[t, k])), 0) * inputs[t, base + k]


@kernel
def group_norm(run: ForwardContext, thread: int, out: Floats3, x: Floats3, weight: Floats2, n: int, eps: float) -> None:
    """out[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps), where each of G parts of the n numbers of a token has its own mean.

    weight (G, n / G padded). Each thread fills its own copy of out (threads, T, ...), which saves a barrier.
    """
    if run.is_first_chunk == 0:
        return
    size = n // weight.shape[0]
    for t in range(run.n_tokens):
        for group in range(weight.shape[0]):
            row, target = t * x.shape[2] + group * size, (thread * out.shape[1] + t) * out.shape[2] + group * size
            norm_row(out, target, x, row, weight, group * weight.shape[1], size, eps)
