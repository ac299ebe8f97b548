"""Kernels with a recurrent state, against exact arithmetic, for any batch, threads and earlier passes."""

from fractions import Fraction

import numpy as np
import pytest

from specdec.layers.block import N_REWINDABLE_STATES, NO_VECTOR
from specdec.layers.buffers import Allocator
from specdec.layers.recurrent_ops import convolve, gated_convolution, make_ring
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import PANEL_ROWS
from tests.tools.random_models import THREAD_COUNTS, round_to_float32

N_OTHERS = 2 * PANEL_ROWS  # columns behind the channels in the rows of `convolve`


class Model:
    """A convolution over panels of channels, gated or not, with the ring of one sequence."""

    def __init__(self, width, n_panels, gated, bias):
        self.n_channels, self.gated = n_panels * PANEL_ROWS, gated
        self.weight, self.bias = random(width, self.n_channels, seed=1), random(self.n_channels, seed=2) if bias else NO_VECTOR
        self.inputs = make_ring(Allocator(), width, self.n_channels)
        self.inputs[:] = np.nan  # left by another sequence

    def forward(self, x, pos, n_threads=1):
        """Run tokens x (T, 3 channels) if gated, else (T, channels and others), from position pos on."""
        x, out = x.copy(), zeros(1, len(x), self.n_channels)
        if self.gated:
            op = gated_convolution(out, x, self.inputs, self.weight, self.bias)
        else:
            op = convolve(x, self.inputs, self.weight, self.bias)
        Executor([[op]])(len(x), pos, 0, n_threads)
        return out[0] if self.gated else x[:, : self.n_channels]

    def tokens(self, n, seed=3):
        return random(n, 3 * self.n_channels if self.gated else self.n_channels + N_OTHERS, seed=seed)

    def get_inputs(self, x):
        """Return the convolution's inputs and the factor of its output, in float32."""
        if not self.gated:
            return x[:, : self.n_channels], np.ones_like(x[:, : self.n_channels])
        b, c, x = x.reshape(len(x), -1, 3, PANEL_ROWS).transpose(2, 0, 1, 3).reshape(3, len(x), -1)
        return b * x, c


def random(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


MODELS = [
    (3, 2, True, False),
    (3, 3, True, True),
    (4, 3, False, False),
    (4, 2, False, True),
    (1, 1, True, False),
    (7, 1, False, True),
]


@pytest.mark.parametrize("sizes", MODELS)
def test_convolution_matches_numpy(sizes):
    model = Model(*sizes)
    x = model.tokens(90)
    got = np.concatenate([model.forward(x[:64], 0), model.forward(x[64:], 64)])
    inputs, factor = (array.astype(np.float64) for array in model.get_inputs(x))
    padded = np.concatenate([np.zeros((len(model.weight) - 1, model.n_channels)), inputs])
    expected = sum(weight * padded[j : j + len(x)] for j, weight in enumerate(model.weight.astype(np.float64)))
    if model.bias.size:
        expected = expected + model.bias
    expected = factor * expected if model.gated else expected / (1 + np.exp(-expected))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_is_one_fma_chain_from_oldest_token(bias):
    """Compare with exact arithmetic rounded after every step: no other order gives these bits."""
    model = Model(5, 1, True, bias)
    x = model.tokens(7)
    got, (inputs, factor) = model.forward(x, 0), model.get_inputs(x)
    for t in range(len(x)):
        for k in range(model.n_channels):
            acc = model.bias[k] if bias else np.float32(0)
            for j in range(max(4 - t, 0), 5):
                acc = round_to_float32(
                    Fraction(float(model.weight[j, k])) * Fraction(float(inputs[t - 4 + j, k])) + Fraction(float(acc))
                )
            assert got[t, k] == factor[t, k] * acc


@pytest.mark.parametrize("sizes", MODELS)
def test_rewind_by_a_full_pass_keeps_bits(sizes):
    """Vary the batch, the threads, and the tokens that ran in place of the sequence's own."""
    model, rng = Model(*sizes), np.random.default_rng(0)
    x = model.tokens(400)
    alone = np.concatenate([model.forward(x[i : i + 1], i) for i in range(len(x))])
    model.inputs[:] = np.nan
    pos = longest = 0
    while pos < len(x):
        n_threads = int(rng.choice(THREAD_COUNTS))
        other = model.tokens(int(rng.integers(1, N_REWINDABLE_STATES)), seed=int(rng.integers(1000)))
        model.forward(other, pos, n_threads)  # a proposal, or an interrupted pass
        longest = max(longest, pos + len(other))
        pos = max(longest + 1 - N_REWINDABLE_STATES, pos - int(rng.integers(0, 9)), 0)
        n = min(int(rng.integers(1, N_REWINDABLE_STATES)), len(x) - pos)
        np.testing.assert_array_equal(model.forward(x[pos : pos + n], pos, n_threads), alone[pos : pos + n])
        pos += n
        longest = max(longest, pos)


def test_non_finite_input_propagates_within_kernel_size():
    model = Model(3, 1, True, False)
    x = model.tokens(8)
    x[2, 2 * PANEL_ROWS], x[4, 5] = np.nan, np.inf
    out = model.forward(x, 0)
    assert np.argwhere(~np.isfinite(out)).tolist() == [[2, 0], [3, 0], [4, 0], [4, 5], [5, 5], [6, 5]]
