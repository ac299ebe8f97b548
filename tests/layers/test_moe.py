"""Mixture-of-experts kernels: routing against a sort, outputs against float64, and bits that do not depend on the batch."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from specdec.layers.activations import swiglu
from specdec.layers.block import NO_VECTOR
from specdec.layers.moe import SIGMOID, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, add_experts, route
from specdec.quant import BF16, FP16, FP32, INT4, INT8
from specdec.quant.gguf_repacking import WEIGHT_FORMATS as BLOCK_FORMATS
from specdec.quant.gguf_repacking import GGUFFormat
from specdec.quant.packed_matrix import ExpertRouting, pack_matrix
from specdec.runtime import op_program
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Executor
from specdec.runtime.simd import PANEL_ROWS, round_up
from tests.tools.block_tensors import RandomBlockTensor
from tests.tools.half_precision import to_half
from tests.tools.random_models import run_sequentially

T, THREADS = 64, 2
SCORINGS = [(SOFTMAX_OF_CHOSEN, False), (SOFTMAX_OF_ALL, False), (SIGMOID, False), (SIGMOID, True)]
SIZES = [(8, 2), (5, 5), (1, 1), (40, 8)]  # experts, and experts per token


class Router:
    """A router with its buffers."""

    def __init__(self, n_experts, n_chosen, scoring=SOFTMAX_OF_CHOSEN, is_normed=False, n_threads=1, bias=None):
        width = round_up(n_experts, PANEL_ROWS)
        self.scores, self.probs, self.bias = zeros(T, width), zeros(n_threads, width), zeros(width)
        if bias is not None:
            self.bias[:n_experts] = bias
        self.tokens, self.slots = (np.zeros((n_threads, T * n_chosen), np.int64) for _ in range(2))
        self.starts, self.weights = np.zeros((n_threads, n_experts + 1), np.int64), zeros(n_threads, T * n_chosen)
        self.n_experts, self.n_chosen, self.n_threads = n_experts, n_chosen, n_threads
        arrays = self.scores, self.bias, self.probs, self.tokens, self.starts, self.slots, self.weights
        self.op = route(*arrays, n_chosen, scoring, is_normed, 1e-6 if scoring == SIGMOID else 0.0, 1.5, NO_VECTOR, 1, 1)

    def choose(self, scores):
        """Return the experts of each thread and token by rank (threads, T, k), and their weights."""
        self.scores[: len(scores), : self.n_experts] = scores
        for thread in range(self.n_threads):  # the other threads do not run
            with mock.patch.object(op_program, "run_on_threads", run_sequentially((thread,))):
                Executor([[self.op]])(len(scores), 0, 0, self.n_threads)
        n = len(scores) * self.n_chosen
        experts = np.empty((self.n_threads, n), np.int64)
        for thread, (starts, slots, tokens) in enumerate(zip(self.starts, self.slots[:, :n], self.tokens, strict=True)):
            assert sorted(slots) == [*range(n)] and starts[0] == 0 and starts[-1] == n and (np.diff(starts) >= 0).all()
            assert (tokens[slots] == np.arange(n) // self.n_chosen).all()
            for first, last in pairwise(starts):
                assert (np.diff(tokens[first:last]) > 0).all()  # in ascending order, none twice
            experts[thread] = np.searchsorted(starts, slots, "right") - 1
        shape = self.n_threads, len(scores), self.n_chosen
        return experts.reshape(shape), self.weights[:, :n].reshape(shape)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("scoring", "is_normed"), SCORINGS)
def test_router_chooses_largest_scores_and_computes_weights(sizes, scoring, is_normed):
    scores = np.round(2 * random(T, sizes[0])) / 2  # with ties, where the lower expert comes first
    bias = random(sizes[0], seed=1) if scoring == SIGMOID else None
    experts, weights = Router(*sizes, scoring, is_normed, THREADS, bias).choose(scores)
    wide = scores.astype(np.float64)
    probs = 1 / (1 + np.exp(-wide)) if scoring == SIGMOID else np.exp(wide)
    order = np.argsort(-(probs + (0 if bias is None else bias)), axis=1, kind="stable")[:, : sizes[1]]
    if scoring != SIGMOID:  # biased sigmoids may be equal after rounding
        assert (experts == order).all()
    chosen = np.take_along_axis(probs, experts[0], 1)
    divisor = {
        SOFTMAX_OF_CHOSEN: chosen.sum(1),
        SOFTMAX_OF_ALL: probs.sum(1),
        SIGMOID: chosen.sum(1) + 1e-6 if is_normed else 1.0,
    }[scoring]
    np.testing.assert_allclose(weights[0], 1.5 * chosen / np.reshape(divisor, (-1, 1)), rtol=1e-5)
    assert (weights == weights[0]).all() and (experts == experts[0]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize(("scoring", "is_normed"), SCORINGS)
def test_router_chooses_valid_distinct_experts_for_any_scores(value, scoring, is_normed):
    for scores in (np.full((T, 8), value), np.where(random(T, 8) > 0, value, random(T, 8))):
        experts, weights = Router(8, 3, scoring, is_normed).choose(scores)
        assert (np.sort(experts) < 8).all() and (np.diff(np.sort(experts)) > 0).all()
        bad = np.isnan(scores).any(1)
        assert np.isnan(weights[0][bad]).all()  # even if that expert was not chosen


class Mixture:
    """A mixture of experts in a weight format."""

    def __init__(self, weight_format, n_experts=6, n_chosen=3, n_threads=1):
        dim, hidden = (512, 256) if isinstance(weight_format, GGUFFormat) else (96, 40)
        self.router, self.dim, self.n_threads = Router(n_experts, n_chosen, n_threads=n_threads), dim, n_threads
        self.w1, self.w3 = (make_matrices(weight_format, n_experts, hidden, dim, seed=i) for i in (1, 2))
        self.w2 = make_matrices(weight_format, n_experts, dim, hidden, seed=3)
        pairs = [matrix for pair in zip(self.w1, self.w3, strict=True) for matrix in pair]
        self.up, self.down = pack_matrix(pairs, weight_format, 2), pack_matrix(self.w2, weight_format)
        slots, width = T * n_chosen, round_up(hidden, PANEL_ROWS)
        columns = max(self.up.scratch_words, self.down.scratch_words, dim)
        self.scratch, self.gathered = zeros(n_threads, slots, columns), zeros(n_threads, T, columns)
        self.x, self.normed = zeros(1, T, round_up(dim, PANEL_ROWS)), zeros(1, T, round_up(dim, PANEL_ROWS))
        r = self.router
        self.n_read = np.zeros(1, np.int64)
        self.ups, self.hidden = zeros(slots, 2 * width), zeros(1, slots, width)
        self.branch, routing = zeros(slots, round_up(dim, PANEL_ROWS)), ExpertRouting(r.tokens, r.starts)
        gathered = self.gathered[:, :, : self.up.scratch_words if self.up.scratch_words > 1 else self.normed.shape[2]].copy()
        scratch = [self.scratch[:, :, : matrix.scratch_words].copy() for matrix in (self.up, self.down)]
        up = self.up.expert_matmul(self.ups, self.normed, scratch[0], gathered, routing, unit=2)
        self.program = [
            [r.op, up, swiglu(self.hidden, self.ups, n_chosen)],
            [
                r.op,
                self.down.expert_matmul(self.branch, self.hidden, scratch[1], gathered, routing, per_token=n_chosen),
                add_experts(self.x[0], self.branch, r.slots, r.weights, r.starts, self.n_read, n_chosen, 1),
            ],
        ]  # fmt: skip

    def __call__(self, x, scores):
        self.x[:], self.branch[:] = 0, np.nan
        self.normed[0, : len(x), : self.dim] = x
        self.router.scores[: len(x), : scores.shape[1]] = scores
        Executor(self.program)(len(x), 0, 0, self.n_threads)
        return self.x[0, : len(x), : self.dim].copy()


def make_matrices(weight_format, n_experts, rows, n, seed):
    """Return a matrix for each expert, as files of this format store it."""
    if isinstance(weight_format, GGUFFormat):
        return [RandomBlockTensor(weight_format.name, rows, n, n_experts * seed + i) for i in range(n_experts)]
    return [*to_half(random(n_experts, rows, n, seed=seed), weight_format.name)]


WEIGHT_FORMATS_BY_NAME = {
    weight_format.name: weight_format for weight_format in (FP32, BF16, FP16, INT8, INT4, *BLOCK_FORMATS.values())
}


def unpack(weight_format, matrices):
    """Return the weights (E, rows, n) after packing."""
    unpacked = [pack_matrix([each], weight_format)[: each.shape[0]] for each in matrices]
    return np.stack(unpacked).astype(np.float64)


@pytest.mark.parametrize("n_chosen", [1, 3, 6])
@pytest.mark.parametrize("name", WEIGHT_FORMATS_BY_NAME)
def test_output_is_weighted_sum_of_experts(name, n_chosen):
    """With one, some and all experts per token; with one, slots differ from tokens, too."""
    weight_format = WEIGHT_FORMATS_BY_NAME[name]
    mixture = Mixture(weight_format, n_chosen=n_chosen)
    x, scores = random(T, mixture.dim, seed=5), random(T, 6, seed=6)
    got = mixture(x, scores)
    experts, weights = mixture.router.choose(scores)
    w1, w3, w2 = (unpack(weight_format, each) for each in (mixture.w1, mixture.w3, mixture.w2))
    expected = np.zeros((T, mixture.dim))
    for t in range(T):
        for expert, weight in zip(experts[0, t], weights[0, t], strict=True):
            gate = w1[expert] @ x[t]
            expected[t] += weight * (w2[expert] @ (gate / (1 + np.exp(-np.maximum(gate, -700))) * (w3[expert] @ x[t])))
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < (1e-5 if weight_format in (FP32, BF16, FP16) else 0.03)  # activations are rounded to bytes, too


@pytest.mark.parametrize("name", WEIGHT_FORMATS_BY_NAME)
def test_token_output_does_not_depend_on_batch_or_threads(name):
    """The batch holds tokens with the same experts and with others."""
    x, scores = random(T, Mixture(WEIGHT_FORMATS_BY_NAME[name]).dim, seed=5), random(T, 6, seed=6)
    scores[20:40] = scores[20]
    whole = Mixture(WEIGHT_FORMATS_BY_NAME[name])(x, scores)
    assert np.array_equal(Mixture(WEIGHT_FORMATS_BY_NAME[name], n_threads=THREADS)(x, scores), whole)
    few = Mixture(WEIGHT_FORMATS_BY_NAME[name])
    few(x[20:40], scores[20:40])
    assert few.n_read[0] == 3
    for t in (0, 21, 63):
        assert np.array_equal(few(x[t : t + 1], scores[t : t + 1]), whole[t : t + 1])
    for first, last in ((0, 7), (15, 32), (20, 40)):
        assert np.array_equal(few(x[first:last], scores[first:last]), whole[first:last])
