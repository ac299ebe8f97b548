"""Mixtures of experts: routing against sorting, products against float64, and the same bits whatever else is in the pass."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from specdec.layers.activations import swiglu
from specdec.layers.moe_ops import OF_ALL, OF_CHOSEN, SIGMOID, add_experts, route
from specdec.layers.recurrent import NO_BIAS
from specdec.quant import BF16, FP16, FP32, INT4, INT8
from specdec.quant.gguf_blocks import KINDS as BLOCK_KINDS
from specdec.quant.matrix import ALL, Choice, pack
from specdec.runtime import program
from specdec.runtime.memory import zeros
from specdec.runtime.program import Runner
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS
from tests.quant.test_grouped import Given
from tests.tools.random_models import in_turn

T, THREADS = 64, 2
WAYS = [(OF_CHOSEN, False), (OF_ALL, False), (SIGMOID, False), (SIGMOID, True)]
SIZES = [(8, 2), (5, 5), (1, 1), (40, 8)]  # experts, of which a token takes


class Router:
    """A router's buffers, and what it makes of scores."""

    def __init__(self, n_experts, n_chosen, way=OF_CHOSEN, is_normed=False, n_threads=1, bias=None):
        width = round_up(n_experts, STRIP_ROWS)
        self.scores, self.odds, self.bias = zeros(T, width), zeros(n_threads, width), zeros(width)
        if bias is not None:
            self.bias[:n_experts] = bias
        self.tokens, self.places = (np.zeros((n_threads, T * n_chosen), np.int64) for _ in range(2))
        self.starts, self.weights = np.zeros((n_threads, n_experts + 1), np.int64), zeros(n_threads, T * n_chosen)
        self.n_experts, self.n_chosen, self.n_threads = n_experts, n_chosen, n_threads
        arrays = self.scores, self.bias, self.odds, self.tokens, self.starts, self.places, self.weights
        self.row = route(*arrays, n_chosen, way, is_normed, 1e-6 if way == SIGMOID else 0.0, 1.5, NO_BIAS)

    def choose(self, scores):
        """Of each thread and token the experts (threads, T, k) by rank, and their weights."""
        self.scores[: len(scores), : self.n_experts] = scores
        for thread in range(self.n_threads):  # none of the others comes
            with mock.patch.object(program, "run_on_threads", in_turn((thread,))):
                Runner([[self.row]])(len(scores), 0, 0, self.n_threads)
        n = len(scores) * self.n_chosen
        experts = np.empty((self.n_threads, n), np.int64)
        for thread, (starts, places, tokens) in enumerate(zip(self.starts, self.places[:, :n], self.tokens, strict=True)):
            assert sorted(places) == [*range(n)] and starts[0] == 0 and starts[-1] == n and (np.diff(starts) >= 0).all()
            assert (tokens[places] == np.arange(n) // self.n_chosen).all()
            for first, last in pairwise(starts):
                assert (np.diff(tokens[first:last]) > 0).all()  # in ascending order, none twice
            experts[thread] = np.searchsorted(starts, places, "right") - 1
        shape = self.n_threads, len(scores), self.n_chosen
        return experts.reshape(shape), self.weights[:, :n].reshape(shape)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("way", "is_normed"), WAYS)
def test_a_router_chooses_the_largest_and_weighs_them(sizes, way, is_normed):
    scores = np.round(2 * random(T, sizes[0])) / 2  # ties: the lower one first
    bias = random(sizes[0], seed=1) if way == SIGMOID else None
    experts, weights = Router(*sizes, way, is_normed, THREADS, bias).choose(scores)
    wide = scores.astype(np.float64)
    odds = 1 / (1 + np.exp(-wide)) if way == SIGMOID else np.exp(wide)
    order = np.argsort(-(odds + (0 if bias is None else bias)), axis=1, kind="stable")[:, : sizes[1]]
    if way != SIGMOID:  # whose biased odds are not told apart by rounding
        assert (experts == order).all()
    chosen = np.take_along_axis(odds, experts[0], 1)
    divisor = {OF_CHOSEN: chosen.sum(1), OF_ALL: odds.sum(1), SIGMOID: chosen.sum(1) + 1e-6 if is_normed else 1.0}[way]
    np.testing.assert_allclose(weights[0], 1.5 * chosen / np.reshape(divisor, (-1, 1)), rtol=1e-5)
    assert (weights == weights[0]).all() and (experts == experts[0]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize(("way", "is_normed"), WAYS)
def test_a_router_of_any_numbers_chooses_experts_that_are_there_each_once(value, way, is_normed):
    for scores in (np.full((T, 8), value), np.where(random(T, 8) > 0, value, random(T, 8))):
        experts, weights = Router(8, 3, way, is_normed).choose(scores)
        assert (np.sort(experts) < 8).all() and (np.diff(np.sort(experts)) > 0).all()
        bad = np.isnan(scores).any(1)
        assert np.isnan(weights[0][bad]).all()  # one that was not chosen, too


class Mixture:
    """k of E experts of a kind of weights, dim columns and so many hidden ones, and what they make of tokens."""

    def __init__(self, kind, n_experts=6, n_chosen=3, n_threads=1):
        dim, hidden = (512, 256) if kind.of_blocks else (96, 40)
        self.router, self.dim, self.n_threads = Router(n_experts, n_chosen, n_threads=n_threads), dim, n_threads
        self.w1, self.w3 = (given(kind, n_experts, hidden, dim, seed=i) for i in (1, 2))
        self.w2 = given(kind, n_experts, dim, hidden, seed=3)
        pairs = [matrix for pair in zip(self.w1, self.w3, strict=True) for matrix in pair]
        self.up, self.down = pack(pairs, kind, 2), pack(self.w2, kind)
        slots, width = T * n_chosen, round_up(hidden, STRIP_ROWS)
        columns = max(self.up.scratch_words, self.down.scratch_words, dim)
        self.scratch, self.gathered = zeros(n_threads, slots, columns), zeros(n_threads, T, columns)
        self.x, self.normed = zeros(1, T, round_up(dim, STRIP_ROWS)), zeros(1, T, round_up(dim, STRIP_ROWS))
        r = self.router
        self.n_read = np.zeros(1, np.int64)
        self.ups, self.hidden = zeros(slots, 2 * width), zeros(1, slots, width)
        self.branch, choice = zeros(slots, round_up(dim, STRIP_ROWS)), Choice(r.tokens, r.starts)
        room = self.gathered[:, :, : self.up.scratch_words if self.up.scratch_words > 1 else self.normed.shape[2]].copy()
        scratch = [self.scratch[:, :, : matrix.scratch_words].copy() for matrix in (self.up, self.down)]
        up = self.up.experts(self.ups, self.normed, scratch[0], room, choice, unit=2)
        self.program = [
            [r.row, up, swiglu(self.hidden, self.ups, n_chosen)],
            [
                r.row,
                self.down.experts(self.branch, self.hidden, scratch[1], room, choice, per_token=n_chosen),
                add_experts(self.x[0], self.branch, r.places, r.weights, r.starts, self.n_read, n_chosen, 1),
            ],
        ]  # fmt: skip

    def __call__(self, x, scores):
        self.x[:], self.branch[:] = 0, np.nan
        self.normed[0, : len(x), : self.dim] = x
        self.router.scores[: len(x), : scores.shape[1]] = scores
        Runner(self.program)(len(x), 0, 0, self.n_threads)
        return self.x[0, : len(x), : self.dim].copy()


def given(kind, n_experts, rows, n, seed):
    """Of each expert a matrix, as a file of that kind has it."""
    if kind.of_blocks:
        return [Given(kind.name, rows, n, n_experts * seed + i) for i in range(n_experts)]
    weights = random(n_experts, rows, n, seed=seed)
    if kind is BF16:
        return [*(weights.view(np.uint32) >> 16).astype(np.uint16)]
    return [*(weights.astype(np.float16) if kind is FP16 else weights)]


KINDS = {kind.name: kind for kind in (FP32, BF16, FP16, INT8, INT4, *BLOCK_KINDS.values())}


def numbers(kind, matrices):
    """What weights are when they have become that kind: (E, rows, n)."""
    packed = [(pack([each], kind), each.shape[0]) for each in matrices]
    return np.stack([kind.rows(m.strips, m.n, m.group, ALL)[:rows, : m.n] for m, rows in packed]).astype(np.float64)


@pytest.mark.parametrize("n_chosen", [1, 3, 6])
@pytest.mark.parametrize("name", KINDS)
def test_experts_are_their_weighted_sum(name, n_chosen):
    """Of one, of some and of all; where each token has one, slots are no tokens either."""
    kind = KINDS[name]
    mixture = Mixture(kind, n_chosen=n_chosen)
    x, scores = random(T, mixture.dim, seed=5), random(T, 6, seed=6)
    got = mixture(x, scores)
    experts, weights = mixture.router.choose(scores)
    w1, w3, w2 = (numbers(kind, each) for each in (mixture.w1, mixture.w3, mixture.w2))
    expected = np.zeros((T, mixture.dim))
    for t in range(T):
        for expert, weight in zip(experts[0, t], weights[0, t], strict=True):
            gate = w1[expert] @ x[t]
            expected[t] += weight * (w2[expert] @ (gate / (1 + np.exp(-np.maximum(gate, -700))) * (w3[expert] @ x[t])))
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < (1e-5 if kind in (FP32, BF16, FP16) else 0.03)  # rows are rounded to bytes, too


@pytest.mark.parametrize("name", KINDS)
def test_a_token_has_the_same_bits_alone_and_beside_others_on_any_threads(name):
    """Beside those that choose the same experts, others, and all."""
    x, scores = random(T, Mixture(KINDS[name]).dim, seed=5), random(T, 6, seed=6)
    scores[20:40] = scores[20]
    whole = Mixture(KINDS[name])(x, scores)
    assert np.array_equal(Mixture(KINDS[name], n_threads=THREADS)(x, scores), whole)
    few = Mixture(KINDS[name])
    few(x[20:40], scores[20:40])
    assert few.n_read[0] == 3
    for t in (0, 21, 63):
        assert np.array_equal(few(x[t : t + 1], scores[t : t + 1]), whole[t : t + 1])
    for first, last in ((0, 7), (15, 32), (20, 40)):
        assert np.array_equal(few(x[first:last], scores[first:last]), whole[first:last])
