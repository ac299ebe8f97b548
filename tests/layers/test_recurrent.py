"""Operations whose memory is a running state: against exact arithmetic, whatever the batch, the threads and what ran before."""

from fractions import Fraction

import numpy as np
import pytest

from specdec.layers.recurrent import N_STATES, NO_BIAS, convolve, gated_convolution, ring
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner
from specdec.runtime.tile import STRIP_ROWS
from tests.tools.random_models import THREADS, round_to_float32

BASE = 2 * STRIP_ROWS  # of channels in the rows of `convolve`


class Model:
    """A convolution of a width over strips of channels, gated or not, and the ring of one text."""

    def __init__(self, width, n_strips, gated, bias):
        self.n_channels, self.gated = n_strips * STRIP_ROWS, gated
        self.weight, self.bias = random(width, self.n_channels, seed=1), random(self.n_channels, seed=2) if bias else NO_BIAS
        self.inputs = zeros(*ring(1, width, self.n_channels).shape)[0]
        self.inputs[:] = np.nan  # what another text left

    def forward(self, x, pos, n_threads=1):
        """Of tokens x (T, 3 channels), gated, or (T, base + channels), that begin at that position."""
        x, out = x.copy(), zeros(1, len(x), self.n_channels)
        if self.gated:
            row = gated_convolution(out, x, self.inputs, self.weight, self.bias)
        else:
            row = convolve(x, 1, BASE, self.inputs, self.weight, self.bias)
        Runner([[row]])(len(x), pos, 0, n_threads)
        return out[0] if self.gated else x[:, BASE:]

    def tokens(self, n, seed=3):
        return random(n, 3 * self.n_channels if self.gated else BASE + self.n_channels, seed=seed)

    def inputs_of(self, x):
        """What is convolved, and by what the outcome is multiplied, of tokens x, in float32."""
        if not self.gated:
            return x[:, BASE:], np.ones_like(x[:, BASE:])
        b, c, x = x.reshape(len(x), -1, 3, STRIP_ROWS).transpose(2, 0, 1, 3).reshape(3, len(x), -1)
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
def test_a_convolution_is_that_of_all_tokens_before(sizes):
    model = Model(*sizes)
    x = model.tokens(90)
    got = np.concatenate([model.forward(x[:64], 0), model.forward(x[64:], 64)])
    inputs, factor = (array.astype(np.float64) for array in model.inputs_of(x))
    padded = np.concatenate([np.zeros((len(model.weight) - 1, model.n_channels)), inputs])
    expected = sum(weight * padded[j : j + len(x)] for j, weight in enumerate(model.weight.astype(np.float64)))
    if model.bias.size:
        expected = expected + model.bias
    expected = factor * expected if model.gated else expected / (1 + np.exp(-expected))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_is_one_chain_of_fused_multiply_adds_from_the_oldest_token_on(bias):
    """Against exact arithmetic rounded after every step: no other order gives these bits."""
    model = Model(5, 1, True, bias)
    x = model.tokens(7)
    got, (inputs, factor) = model.forward(x, 0), model.inputs_of(x)
    for t in range(len(x)):
        for k in range(model.n_channels):
            acc = model.bias[k] if bias else np.float32(0)
            for j in range(max(4 - t, 0), 5):
                acc = round_to_float32(
                    Fraction(float(model.weight[j, k])) * Fraction(float(inputs[t - 4 + j, k])) + Fraction(float(acc))
                )
            assert got[t, k] == factor[t, k] * acc


@pytest.mark.parametrize("sizes", MODELS)
def test_a_text_goes_back_by_as_many_tokens_as_a_pass_may_have_and_gives_the_same_bits(sizes):
    """Whatever the batch, the threads, and the tokens that ran in place of the text's own."""
    model, rng = Model(*sizes), np.random.default_rng(0)
    x = model.tokens(400)
    alone = np.concatenate([model.forward(x[i : i + 1], i) for i in range(len(x))])
    model.inputs[:] = np.nan
    pos = longest = 0
    while pos < len(x):
        n_threads = int(rng.choice(THREADS))
        other = model.tokens(int(rng.integers(1, N_STATES)), seed=int(rng.integers(1000)))
        model.forward(other, pos, n_threads)  # a proposal, or a pass that was broken off
        longest = max(longest, pos + len(other))
        pos = max(longest + 1 - N_STATES, pos - int(rng.integers(0, 9)), 0)
        n = min(int(rng.integers(1, N_STATES)), len(x) - pos)
        np.testing.assert_array_equal(model.forward(x[pos : pos + n], pos, n_threads), alone[pos : pos + n])
        pos += n
        longest = max(longest, pos)


def test_what_is_not_finite_stays_so_as_long_as_it_is_seen():
    model = Model(3, 1, True, False)
    x = model.tokens(8)
    x[2, 2 * STRIP_ROWS], x[4, 5] = np.nan, np.inf
    out = model.forward(x, 0)
    assert np.argwhere(~np.isfinite(out)).tolist() == [[2, 0], [3, 0], [4, 0], [4, 5], [5, 5], [6, 5]]
