"""Sampling compared with float64 oracles within rounding, and distributions with their false alarm probabilities."""

import math
from collections import Counter

import numpy as np
import pytest

from specdec.runtime.memory import zeros
from specdec.runtime.simd import LANES, round_up
from specdec.sampling import accept_or_resample, compute_probabilities, draw, draw_gumbel_top_k
from tests.tools import reference

BEST = np.empty(1, np.int64), np.empty(1)  # scratch


def draw_probabilities(logits, temperature, top_k, top_p):
    probs = zeros(1, round_up(len(logits), LANES))
    compute_probabilities(probs, logits, temperature, top_k, top_p, np.empty(len(logits), np.uint64))
    assert (probs[0, len(logits) :] == 0).all()
    return probs[0, : len(logits)].astype(np.float64)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 10_000])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_probabilities_equal_those_of_a_full_sort(temperature, top_k, top_p):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(105) * rng.uniform(0.1, 8)).astype(np.float32)
        got = draw_probabilities(logits, temperature, top_k, top_p)
        np.testing.assert_allclose(got, reference.probabilities(logits, temperature, top_k, top_p), rtol=2e-5, atol=1e-9)


def test_equal_probabilities_are_kept_by_rising_id():
    logits = np.zeros(100, np.float32)
    got = draw_probabilities(logits, 1.0, 7, 1.0)
    np.testing.assert_array_equal(np.flatnonzero(got), np.arange(7))
    got = draw_probabilities(logits, 1.0, 0, 0.305)
    np.testing.assert_array_equal(np.flatnonzero(got), np.arange(31))


def test_top_p_of_a_large_flat_vocabulary_is_right():
    logits = np.random.default_rng(0).standard_normal(32000).astype(np.float32) * np.float32(0.01)
    got = draw_probabilities(logits, 1.0, 0, 0.9)
    expected = reference.probabilities(logits, 1.0, 0, 0.9)
    # Rounding of the float32 sum of 28800 tokens may move the end of the set by a few of 32000 tokens.
    assert abs(np.count_nonzero(got) - np.count_nonzero(expected)) <= 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e46, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    probs = draw_probabilities(np.array([3.0, -80.0, 2.5, 3.0], np.float32), temperature, 0, 1.0)
    assert probs.sum() == pytest.approx(1, abs=1e-6)
    if temperature < 1:
        assert probs.tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("filters", [(0, 1.0), (3, 1.0), (0, 0.5), (2, 0.1)])
@pytest.mark.parametrize("bad", [[1, np.nan, 2, 0], [1, 2, np.inf, 0], [-np.inf] * 4, [np.nan] * 4, [np.nan, 5, 1, 1]])
def test_nan_logit_or_nonfinite_maximum_draws_no_token(temperature, filters, bad):
    probs = zeros(1, 16)
    logits, keys = np.array(bad, np.float32), np.empty(4, np.uint64)
    assert draw(probs, logits, temperature, *filters, 1, 0, 5, keys, np.empty(2, np.int64), np.empty(2))[0] == 0
    for token in range(4):
        compute_probabilities(probs, logits, temperature, *filters, keys)
        q = zeros(1, 16)
        q[0, token] = 1
        assert accept_or_resample(probs, q, 4, token, 1, (2, 0), 5, BEST) == -1


def test_logit_of_minus_infinity_has_probability_zero():
    for temperature in (0.0, 1.0):
        assert draw_probabilities(np.array([-np.inf, 1, -np.inf], np.float32), temperature, 0, 1.0).tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 100, 32000])
@pytest.mark.parametrize("top_p", [1e-9, 0.0005, 0.0103, 0.1007, 0.3051])
@pytest.mark.parametrize("temperature", [1.0, 1e6, 1e30])
def test_the_most_likely_token_is_always_in_the_set(n, top_p, temperature):
    """Use a flat distribution, in which no token has a probability of (1 - top_p) / (n - 1)."""
    logits = (1 + np.random.default_rng(n).integers(0, 2, n) / 10).astype(np.float32)
    got = draw_probabilities(logits, temperature, 0, top_p)
    expected = reference.probabilities(logits, temperature, 0, top_p)
    assert got[np.argmax(expected)] > 0
    assert got.sum() == pytest.approx(1, abs=1e-5)
    if n <= 100:
        np.testing.assert_allclose(got, expected, atol=1e-6)


def draw_first(row, n, seed, stream, position):
    tokens, scores = np.empty(2, np.int64), np.empty(2)
    draw_gumbel_top_k(row, n, seed, stream, position, tokens, scores)
    return int(tokens[0]) if scores[0] > -np.inf else -1


def draw_many(probs, n, seed=1, stream=0):
    row = zeros(1, 16)
    row[0, : len(probs)] = probs
    return np.array([draw_first(row, len(probs), seed, stream, position) for position in range(n)])


def test_gumbel_draws_follow_the_probabilities():
    """Chi-square over 200,000 draws with a fixed seed; false alarm below 1e-6 (4.8 sigmas)."""
    probs = [0.5, 0.25, 0.125, 0.1, 0.02, 0.005]
    reference.check_counts(Counter(draw_many([*probs, 0], 200_000).tolist()), dict(enumerate(probs)))


def test_draws_of_neighbouring_positions_seeds_and_streams_are_independent():
    """Agreement of two fair 8-sided draws is 1/8; 20,000 pairs are within 5 sigmas of it (false alarm 6e-7 each)."""
    fair = np.full(8, 0.125)
    base = draw_many(fair, 20_001)
    pairs = [(base[:-1], base[1:]), (base, draw_many(fair, 20_001, seed=2)), (base, draw_many(fair, 20_001, stream=1))]
    for a, b in pairs:
        assert abs((a == b).mean() - 1 / 8) < 5 * math.sqrt(7 / 64 / 20_000)


@pytest.mark.parametrize("vocab_size", [17, 63, 64, 65, 1024, 5000, 49152])
def test_skipped_tokens_cannot_be_drawn(vocab_size):
    """Probabilities equal a full sort's and draws equal those over all tokens, bit for bit: 10^5 draws of all sizes together."""
    n_rows, n_positions = (40, 500) if vocab_size <= 1024 else (10, 100) if vocab_size <= 5000 else (4, 25)
    for case in range(n_rows):
        rng = np.random.default_rng(case)
        logits = (rng.standard_normal(vocab_size) * rng.choice([0.1, 1, 3, 8])).astype(np.float32)
        logits[rng.integers(0, vocab_size, 5)] += np.float32(rng.choice([0, 10]))
        logits = np.round(logits) if case % 3 == 0 else logits
        temperature, top_k, top_p = rng.choice([0.7, 1.0, 1.3]), int(rng.choice([0, 0, 5, 300])), rng.choice([0.0, 0.5, 0.9, 0.9])
        row, keys = zeros(1, round_up(vocab_size, LANES)), np.empty(vocab_size, np.uint64)
        compute_probabilities(row, logits, temperature, 0, 0.0, keys)
        expected = reference.truncate_probs(row[0, :vocab_size].copy(), top_k, top_p)
        compute_probabilities(row, logits, temperature, top_k, top_p, keys)
        np.testing.assert_array_equal(row[0, :vocab_size], expected)
        winners = reference.draw_tokens(expected, case, case % 3, np.arange(n_positions))
        assert [draw_first(row, vocab_size, case, case % 3, position) for position in range(n_positions)] == winners


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 1000])
def test_greedy_takes_the_first_of_the_largest(n):
    rng, keys = np.random.default_rng(n), np.empty(n, np.uint64)
    for _ in range(50):
        logits = rng.integers(0, 4, n).astype(np.float32)
        logits[rng.random(n) < 0.3] = -np.inf
        logits[rng.integers(n)] = rng.integers(0, 9)
        row = zeros(1, round_up(n, LANES))
        tokens, scores = np.empty(2, np.int64), np.empty(2)
        assert draw(row, logits, 0.0, 0, 0.9, 1, 0, 5, keys, tokens, scores)[0] > 0 and tokens[0] == logits.argmax()
        assert row.sum() == 1


@pytest.mark.campaign
def test_accepted_or_resampled_tokens_follow_p_for_any_q():
    """Chi-square of 100,000 rejection samples for each of four q; false alarm below 1e-6 each."""
    p = [0.4, 0.3, 0.2, 0.1]
    for q in ([0.4, 0.3, 0.2, 0.1, 0.0], [0.05, 0.05, 0.1, 0.4, 0.4], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]):
        row_q = zeros(1, 16)
        row_q[0, :5] = q
        counts = Counter()
        for position in range(100_000):
            draft_token = draw_first(row_q, 5, 7, 1, position)
            row_p = zeros(1, 16)
            row_p[0, :4] = p
            counts[accept_or_resample(row_p, row_q, 5, draft_token, 7, (2, 0), position, BEST)] += 1
        reference.check_counts(counts, dict(enumerate(p)))


def test_impossible_token_is_rejected_if_rounding_leaves_no_residual():
    """A q of 1 - 1e-9 is 1 in float32."""
    p, q = zeros(1, 16), zeros(1, 16)
    p[0, 2] = q[0, 2] = 1
    q[0, 3] = 1e-9
    assert accept_or_resample(p, q, 4, 3, 1, (2, 0), 5, BEST) == 2
