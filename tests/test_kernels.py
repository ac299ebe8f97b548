"""The forward pass and the sampling kernels: against float64 oracles within rounding, and bit for bit where bits are promised."""

import copy
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numba
import numpy as np
import pytest

from specdec import kernels
from specdec.checkpoint import load_checkpoint
from specdec.files import DEFAULT_DRAFT, DEFAULT_TARGET
from specdec.kernels import Config, Transformer
from specdec.packing import pack_weights
from tests import reference
from tests.checkpoints import ROOT, SHARED, random_tensors

# dim, hidden, layers, heads, kv heads, vocab, seq_len: GQA, odd sizes, head_dim 8 and 12, more than one panel of positions
CONFIGS = {
    "gqa": Config(64, 172, 2, 8, 4, 512, 96),
    "odd": Config(40, 50, 3, 5, 1, 105, 80),
    "head_dim_12": Config(36, 33, 2, 3, 3, 105, 80),
    "head_dim_48": Config(96, 128, 2, 2, 2, 64, 80, shared_classifier=False),
}
THREADS = [n for n in (1, 2) if n <= numba.config.NUMBA_NUM_THREADS]


def model(config: Config, n_threads: int = 1, seed: int = 0, n_positions: int | None = None) -> Transformer:
    return Transformer(config, pack_weights(config, random_tensors(config, seed)), n_threads, n_positions)


def tokens_for(config: Config, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, n).tolist()


def run_in_blocks(transformer: Transformer, tokens: list[int], block: int) -> np.ndarray:
    """All logits, `block` tokens a forward."""
    transformer.forward([], 0)
    ends = [min(i + block, len(tokens)) for i in range(0, len(tokens), block)]
    return np.concatenate([transformer.forward(tokens[:end], (end - 1) % block + 1).copy() for end in ends])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_oracle(name):
    config = CONFIGS[name]
    tokens = tokens_for(config, 40)
    expected = reference.forward(config, random_tensors(config, 0), tokens)
    got = run_in_blocks(model(config), tokens, 7)
    # float32 sums of a few hundred products of order 1: rounding of order 1e-6, and a wrong formula is off by order 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_the_batch_or_the_threads_bit_for_bit(name):
    config = CONFIGS[name]
    tokens = tokens_for(config, 70)
    alone = run_in_blocks(model(config), tokens, 1)
    for n_threads in THREADS:
        transformer = model(config, n_threads)
        for block in [*range(1, 18), 64]:
            np.testing.assert_array_equal(run_in_blocks(transformer, tokens, block).view(np.int32), alone.view(np.int32))


def test_real_logits_do_not_depend_on_the_batch_or_the_threads_bit_for_bit():
    for path in (DEFAULT_TARGET, DEFAULT_DRAFT, *sorted(SHARED.glob("models/stories*.bin"))):
        checkpoint = load_checkpoint(path)
        weights = pack_weights(checkpoint.config, checkpoint.tensors)
        tokens = tokens_for(checkpoint.config, 130)
        alone = run_in_blocks(Transformer(checkpoint.config, weights, 1, n_positions=130), tokens, 1)
        for n_threads in THREADS:
            transformer = Transformer(checkpoint.config, weights, n_threads, n_positions=130)
            for block in [*range(2, 18), 64]:
                np.testing.assert_array_equal(run_in_blocks(transformer, tokens, block).view(np.int32), alone.view(np.int32))


def test_separate_regions_give_the_same_bits_as_one_region_with_barriers():
    config = CONFIGS["gqa"]
    tokens = tokens_for(config, 50)
    one, many = model(config, max(THREADS)), model(config, max(THREADS))
    many._one_region = False
    np.testing.assert_array_equal(run_in_blocks(one, tokens, 9), run_in_blocks(many, tokens, 9))


def test_a_long_prompt_goes_in_blocks_and_keeps_its_last_logits():
    config = Config(64, 172, 2, 8, 4, 512, 300)
    tokens = tokens_for(config, 200)
    transformer = model(config)
    alone = run_in_blocks(transformer, tokens, 1)
    for n_logits in (0, 1, 5, 64):
        transformer.forward([], 0)
        logits = transformer.forward(tokens, n_logits)
        np.testing.assert_array_equal(logits, alone[len(tokens) - n_logits :])
        assert transformer.n_held == len(tokens)


def test_another_text_leaves_no_trace():
    config = CONFIGS["gqa"]
    tokens = tokens_for(config, 30)
    transformer = model(config)
    expected = run_in_blocks(transformer, tokens, 30)[-5:]
    transformer.forward(tokens[:25] + tokens_for(config, 20, seed=9))
    np.testing.assert_array_equal(transformer.forward(tokens, 5), expected)


@pytest.mark.parametrize("window", [1, 5, 16, 23])
def test_beyond_its_seq_len_a_model_sees_a_sliding_window(window):
    config = Config(64, 172, 2, 8, 4, 512, window)
    tokens = tokens_for(config, 60)
    expected = reference.forward(config, random_tensors(config, 0), tokens, window)
    alone = run_in_blocks(model(config, n_positions=64), tokens, 1)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    for block in (2, 7, 8, 9, 17, 60):
        np.testing.assert_array_equal(run_in_blocks(model(config, n_positions=64), tokens, block), alone)


@pytest.mark.parametrize(
    ("tokens", "n_logits"), [([1] * 3, 4), ([512], 1), ([-1], 1), ([1] * 97, 1), ([1] * 70, 65), ([1], -1), ([], 1)]
)
def test_a_forward_that_cannot_be_run_is_refused(tokens, n_logits):
    with pytest.raises(ValueError, match=r"token|n_logits"):
        model(CONFIGS["gqa"]).forward(tokens, n_logits)


def test_what_is_no_token_is_refused():
    for tokens in ([1.0], ["1"], [None], 5, None, np.zeros((2, 2)), object()):
        with pytest.raises(TypeError, match=r"^tokens are .*; expected whole numbers$"):
            model(CONFIGS["gqa"]).forward(tokens)
    for n in (1.0, "1", None, [1]):
        with pytest.raises(TypeError, match="n_logits"):
            model(CONFIGS["gqa"]).forward([1, 2, 3], n)


@pytest.mark.parametrize("n", [0, -1, 10**9])
def test_a_model_has_the_threads_it_was_made_for_and_no_more(n):
    with pytest.raises(ValueError, match="n_threads"):
        model(CONFIGS["gqa"], n)
    alone = model(CONFIGS["gqa"], 1)
    with pytest.raises(ValueError, match="n_threads"):
        alone.n_threads = 2
    with pytest.raises(TypeError, match="n_threads"):
        alone.n_threads = 1.0


@pytest.mark.parametrize("n", [0, -5])
def test_a_model_has_at_least_one_position(n):
    with pytest.raises(ValueError, match="n_positions"):
        model(CONFIGS["gqa"], n_positions=n)


def test_weights_of_another_shape_are_refused():
    weights = {name: pack_weights(config, random_tensors(config, 0)) for name, config in CONFIGS.items()}
    for name, config in CONFIGS.items():
        for other in CONFIGS:
            if other != name:
                with pytest.raises(ValueError, match="shape"):
                    Transformer(config, weights[other])


@pytest.mark.parametrize("flaw", [{"n_kv_heads": 3}, {"n_heads": 64, "n_kv_heads": 64}, {"seq_len": 0}])
def test_a_config_that_is_no_models_is_refused(flaw):
    config = replace(CONFIGS["gqa"], **flaw)
    with pytest.raises(ValueError, match=next(iter(flaw)) + "|head_dim"):
        Transformer(config, pack_weights(config, random_tensors(config, 0)))


def test_a_model_that_was_pickled_or_copied_gives_the_same_bits():
    """Arrays lose their place at a cache line on the way, which a tile's loads need."""
    tokens = tokens_for(CONFIGS["gqa"], 20)
    first = model(CONFIGS["gqa"])
    expected = first.forward(tokens, 20).copy()
    for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        np.testing.assert_array_equal(twin.forward(tokens, 20), expected)
        assert (twin.weights.embedding is twin.weights.wcls) == first.config.shared_classifier


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_that_outgrows_its_buffers_keeps_its_logits(name):
    """256 positions are there from the start; the second model is given room for all of them in one block."""
    config = replace(CONFIGS[name], seq_len=1000)
    tokens = tokens_for(config, 700)
    grown, at_once = model(config), model(config)
    for end in (1, 200, 255, 256, 257, 300, 600, 700):
        logits = grown.forward(tokens[:end], 1).copy()
    np.testing.assert_array_equal(at_once.forward(tokens, 1), logits)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["new_state", "new_plan"])
def test_a_growth_that_fails_leaves_a_model_that_works(monkeypatch, where, error):
    config = replace(CONFIGS["gqa"], seq_len=1000)
    tokens = tokens_for(config, 300)
    expected = model(config).forward(tokens, 40)
    grown = model(config)
    grown.forward(tokens[:250])

    def fails(*_):
        raise error

    with monkeypatch.context() as context:
        context.setattr(kernels, where, fails)
        with pytest.raises(error):
            grown.forward(tokens, 40)
    np.testing.assert_array_equal(grown.forward(tokens, 40), expected)


FORKED = """
import os, signal, sys, threading, time
from specdec.kernels import Config, Transformer
from specdec.packing import pack_weights
from tests.checkpoints import random_tensors

config = Config(64, 172, 2, 8, 4, 512, 96)
weights = pack_weights(config, random_tensors(config, 0))
model, busy = Transformer(config, weights, 1), Transformer(config, weights, 1)
mine, other = list(range(5, 70)), list(range(99, 170))
expected, others = (Transformer(config, weights, 1).forward(tokens).tobytes() for tokens in (mine, other))
model.forward(mine)

def work():
    with busy.lock:
        time.sleep(60)

threading.Thread(target=work, daemon=True).start()
while busy.lock.acquire(blocking=False):
    busy.lock.release()
child = os.fork()
if child == 0:  # writes its own text into its own cache, and waits for no thread that is gone
    signal.alarm(20)
    os._exit(0 if (model.forward(other).tobytes(), busy.forward(other).tobytes()) == (others, others) else 1)
print(os.waitpid(child, 0)[1], model.forward(mine).tobytes() == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_a_cache_and_locks_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0 True\n", done.stderr


# What a pass that is not finite leaves behind

POISONED = {
    "dim 8": Config(8, 24, 2, 2, 1, 40, 64),
    "dim 36": Config(36, 33, 2, 3, 3, 105, 80),
    "dim 40": Config(40, 50, 3, 5, 1, 105, 80),
    "dim 32": Config(32, 64, 2, 4, 4, 40, 64),
}
POISON = 7  # the token whose values overflow


def poisoned_model(config: Config, int8: bool, where: str) -> Transformer:
    """All weights finite; a pass over POISON, the only token with something in column 1, is not."""
    tensors = random_tensors(config, 0)
    tensors["tok_emb"][:, 1] = tensors["wo"][:, 1] = tensors["w2"][:, 1] = 0
    tensors["tok_emb"][POISON, 1] = 1e20 if where == "norm" else 1
    if where == "hidden":
        tensors["rms_ffn"][:, 1] = tensors["w1"][:, :, 1] = tensors["w3"][:, :, 1] = 1e19
    if where == "keys":
        tensors["rms_att"][:, 1] = tensors["wq"][:, :, 1] = tensors["wk"][:, :, 1] = 1e19
    return Transformer(config, pack_weights(config, tensors, int8), 1)


@pytest.mark.parametrize("where", ["norm", "hidden", "keys"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", POISONED)
def test_logits_depend_on_the_tokens_before_them_and_on_nothing_else_not_on_poison_either(name, int8, where):
    config = POISONED[name]
    text = [token for token in tokens_for(config, 30) if token != POISON]
    expected = poisoned_model(config, int8, where).forward(text, len(text)).copy()
    assert np.isfinite(expected).all()
    transformer = poisoned_model(config, int8, where)
    assert not np.isfinite(transformer.forward([*text[:5], POISON], 1)).any()
    np.testing.assert_array_equal(transformer.forward(text, len(text)), expected)  # after a text with it
    logits = transformer.forward([*text[:12], POISON, POISON, *text[12:14]], 5)  # as a proposal beside others
    np.testing.assert_array_equal(logits[0], expected[11])
    assert not np.isfinite(logits[1:]).any()
    np.testing.assert_array_equal(transformer.forward(text, len(text) - 12), expected[12:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_have_no_finite_scale(bad):
    x = kernels.zeros(3, 96)
    x[:] = 1.0
    x[1, 40] = bad
    codes = kernels.zeros(3, 3 * (kernels.GROUP_HEAD + 8))
    kernels.quantize(codes, x, 96, 32, 3)
    scales = codes.reshape(3, 3, -1)[:, :, 0]
    assert np.isnan(scales[1, 1])
    assert np.isfinite(np.delete(scales.reshape(-1), 4)).all()


@numba.njit
def vector_exp(out, x):
    for i in range(0, x.size, kernels.LANES):
        kernels.store(out, i, kernels.exp(kernels.load(x, i)))


def test_exp_is_within_two_units_in_the_last_place():
    x = np.linspace(-86.9, 87.9, 1 << 16, dtype=np.float32)
    out = np.empty_like(x)
    vector_exp(out, x)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_exp_of_what_is_masked_is_exactly_zero():
    x = np.array([-np.inf, -1e30, -200.0, -87.5] * 4, np.float32)
    out = np.ones_like(x)
    vector_exp(out, x)
    assert (out == 0).all()


def draw_probabilities(logits, temperature, top_k, top_p):
    probs = kernels.zeros(1, kernels.round_up(len(logits), kernels.LANES))
    kernels.probabilities(probs, logits, temperature, top_k, top_p, np.empty(len(logits), np.uint64))
    assert (probs[0, len(logits) :] == 0).all()
    return probs[0, : len(logits)].astype(np.float64)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 10_000])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_probabilities_are_those_of_a_full_sort(temperature, top_k, top_p):
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


def test_top_p_of_a_large_flat_vocabulary_needs_no_sort_to_be_right():
    logits = np.random.default_rng(0).standard_normal(32000).astype(np.float32) * np.float32(0.01)
    got = draw_probabilities(logits, 1.0, 0, 0.9)
    expected = reference.probabilities(logits, 1.0, 0, 0.9)
    # the float32 masses of 28800 tokens may move the end of the set by a few tokens of 32000
    assert abs(np.count_nonzero(got) - np.count_nonzero(expected)) <= 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 1e46, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    probs = draw_probabilities(np.array([3.0, -80.0, 2.5, 3.0], np.float32), temperature, 0, 1.0)
    assert probs.sum() == pytest.approx(1, abs=1e-6)
    if temperature < 1:
        assert probs.tolist() == [0.5, 0, 0, 0.5]


def test_exp_of_nan_is_nan():
    out = np.zeros(16, np.float32)
    vector_exp(out, np.full(16, np.nan, np.float32))
    assert np.isnan(out).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("filters", [(0, 1.0), (3, 1.0), (0, 0.5), (2, 0.1)])
@pytest.mark.parametrize("bad", [[1, np.nan, 2, 0], [1, 2, np.inf, 0], [-np.inf] * 4, [np.nan] * 4, [np.nan, 5, 1, 1]])
def test_a_logit_that_is_nan_or_a_largest_that_is_not_finite_leaves_no_token_to_draw(temperature, filters, bad):
    probs = kernels.zeros(1, 16)
    logits, keys = np.array(bad, np.float32), np.empty(4, np.uint64)
    assert kernels.draw(probs, logits, temperature, *filters, 1, 0, 5, keys) == -1
    for token in range(4):
        kernels.probabilities(probs, logits, temperature, *filters, keys)
        q = kernels.zeros(1, 16)
        q[0, token] = 1
        assert kernels.keep_or_redraw(probs, q, 4, token, 1, 2, 0, 5) == -1


def test_a_logit_of_minus_infinity_is_a_token_that_cannot_be():
    for temperature in (0.0, 1.0):
        assert draw_probabilities(np.array([-np.inf, 1, -np.inf], np.float32), temperature, 0, 1.0).tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 100, 32000])
@pytest.mark.parametrize("top_p", [1e-9, 0.0005, 0.0103, 0.1007, 0.3051])
@pytest.mark.parametrize("temperature", [1.0, 1e6, 1e30])
def test_the_most_likely_token_is_always_in_the_set(n, top_p, temperature):
    """Where the distribution is flat, no token weighs (1 - top_p) / (n - 1)."""
    logits = (1 + np.random.default_rng(n).integers(0, 2, n) / 10).astype(np.float32)
    got = draw_probabilities(logits, temperature, 0, top_p)
    expected = reference.probabilities(logits, temperature, 0, top_p)
    assert got[np.argmax(expected)] > 0
    assert got.sum() == pytest.approx(1, abs=1e-5)
    if n <= 100:
        np.testing.assert_allclose(got, expected, atol=1e-6)


def races(probs, n, seed=1, stream=0):
    row = kernels.zeros(1, 16)
    row[0, : len(probs)] = probs
    return np.array([kernels.race(row, len(probs), seed, stream, position) for position in range(n)])


def test_the_race_draws_tokens_by_their_probability():
    """Chi-square over 200,000 draws; false alarm below 1e-6 (4.8 sigmas), for a seed that is fixed."""
    probs = np.array([0.5, 0.25, 0.125, 0.1, 0.02, 0.005, 0.0])
    counts = np.bincount(races(probs, 200_000), minlength=7)
    assert counts[6] == 0
    expected = 200_000 * probs[:6]
    chi = ((counts[:6] - expected) ** 2 / expected).sum()
    assert chi < reference.chi_square_limit(5, 4.8)


def test_draws_of_neighbouring_positions_seeds_and_streams_are_independent():
    """Agreement of two fair 8-sided draws is 1/8; 20,000 pairs are within 5 sigmas of it (false alarm 6e-7 each)."""
    fair = np.full(8, 0.125)
    base = races(fair, 20_001)
    pairs = [(base[:-1], base[1:]), (base, races(fair, 20_001, seed=2)), (base, races(fair, 20_001, stream=1))]
    for a, b in pairs:
        assert abs((a == b).mean() - 1 / 8) < 5 * math.sqrt(7 / 64 / 20_000)


def test_kept_or_redrawn_tokens_follow_p_whatever_q_is():
    """Chi-square of 100,000 rejection samples for each of four q; false alarm below 1e-6 each."""
    p = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    for q in ([0.4, 0.3, 0.2, 0.1, 0.0], [0.05, 0.05, 0.1, 0.4, 0.4], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]):
        row_q = kernels.zeros(1, 16)
        row_q[0, :5] = q
        counts = np.zeros(5)
        for position in range(100_000):
            proposal = kernels.race(row_q, 5, 7, 1, position)
            row_p = kernels.zeros(1, 16)
            row_p[0, :5] = p
            counts[kernels.keep_or_redraw(row_p, row_q, 5, proposal, 7, 2, 0, position)] += 1
        assert counts[4] == 0
        expected = 100_000 * p[:4]
        assert ((counts[:4] - expected) ** 2 / expected).sum() < reference.chi_square_limit(3, 4.8)


def test_a_token_that_cannot_be_is_not_kept_where_rounding_leaves_no_residual():
    """A q of 1 - 1e-9 is 1 in float32."""
    p, q = kernels.zeros(1, 16), kernels.zeros(1, 16)
    p[0, 2] = q[0, 2] = 1
    q[0, 3] = 1e-9
    assert kernels.keep_or_redraw(p, q, 4, 3, 1, 2, 0, 5) == 2


def test_a_product_is_one_chain_of_fused_multiply_adds_in_ascending_k():
    """Against exact arithmetic rounded after every step: no sum of partial sums can give these bits."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 33)).astype(np.float32), rng.standard_normal((17, 33)).astype(np.float32)
    panels = kernels.zeros(2, 33, kernels.PANEL_ROWS)
    kernels.pack_matrix(panels, w)
    out = kernels.zeros(17, 64)
    kernels.multiply(kernels.multiplier(False, False), out, panels, x, 17, 0, 2, 0)
    for t, r in ((0, 0), (3, 17), (8, 40), (16, 63)):
        acc = Fraction(0)
        for k in range(33):
            exact = Fraction(float(w[r, k])) * Fraction(float(x[t, k])) + acc
            acc = Fraction(float(round_to_float32(exact)))
        assert float(out[t, r]) == float(acc)


def round_to_float32(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction: float64 first, corrected where that rounds to a tie."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda c: abs(Fraction(float(c)) - exact))


def test_where_nothing_can_be_cached_everything_still_compiles():
    """Numba, made to find no folder that it may write to."""
    code = """
from specdec.machine import cache
cache._folder.append("")
from specdec import kernels
print(kernels.mix_bits.stats.cache_path, kernels.mix_bits(1))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f" {kernels.mix_bits(1)}\n"


def test_a_cache_beyond_all_memory_is_a_memory_error():
    with pytest.raises(MemoryError):
        kernels.lazy_zeros(1 << 50)
