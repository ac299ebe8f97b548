"""Operations whose memory is a running state: what a token takes from the tokens before it, and no slot of a KV cache holds.

A convolution over tokens remembers its inputs in a ring: that of position p lies in row p mod N. A ring of MAX_TOKENS more rows
than a token looks back to holds, whatever a pass writes, the last inputs of every text that ended up to MAX_TOKENS ago. So going
back after a rejection costs nothing, and a pass that was broken off has spoiled nothing.
"""

from typing import NamedTuple

import numpy as np

from ..kernels import MAX_TOKENS, own_rows
from ..machine.cache import inlined
from ..machine.elementary import sigmoid
from ..machine.programs import Floats1, Floats2, Floats3, Pass, operation
from ..machine.threads import share
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import LANES, Float32, fma, load, mul, splat, store
from .plan import Buffer

N_STATES = MAX_TOKENS + 1  # the lengths of a text that a ring can go on from: see `Architecture.n_states`
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
    """x[t] = silu(convolved x)[t], channel by channel: this thread's rows of the product before."""
    x, unit, base, inputs, weight, bias = p
    n_channels = weight.shape[1]
    first, last = own_rows(x.shape[1], unit, thread, run.n_threads, base, n_channels)
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
    """out[t] = c[t] * convolved(b x)[t], channel by channel: this thread's strips of the product before, of unit 3."""
    out, x, inputs, weight, bias = p
    n_channels = weight.shape[1]
    first, last = share(n_channels // STRIP_ROWS, thread, run.n_threads)
    for t in range(run.n_tokens):
        position = run.pos + t
        row = position % inputs.shape[0] * n_channels
        for k in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            strip, lane = divmod(k, STRIP_ROWS)
            at = t * x.shape[1] + 3 * strip * STRIP_ROWS + lane
            store(inputs, row + k, mul(load(x, at), load(x, at + 2 * STRIP_ROWS)))
            v = convolved(inputs, weight, bias, position, k)
            store(out, t * n_channels + k, mul(load(x, at + STRIP_ROWS), v))
