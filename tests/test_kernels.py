"""Kernels compared with exact arithmetic, and their behaviour for numbers that are not finite."""

import itertools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from specdec.bench.peak_arithmetic import make_chains_kernel
from specdec.kernels import add_norm, head_norm, layer_norm
from specdec.layers.activations import geglu, gelu, softcap, swiglu, xielu
from specdec.quant import FP32
from specdec.quant.dot4 import DOT4_BY_NAME, keep_words
from specdec.quant.int8 import DOT4_NAME
from specdec.quant.matmul import add_product
from specdec.quant.packed_matrix import pack_matrix
from specdec.runtime.memory import LazyMemory, zeros
from specdec.runtime.op_program import Executor, Op
from specdec.runtime.simd import FP32_STORAGE, INT32_STORAGE, REGISTER_LANES, round_up
from specdec.sampling import mix_bits
from tests.tools import reference
from tests.tools.checkpoint_files import ROOT
from tests.tools.random_models import THREAD_COUNTS, round_to_float32, run_product


def run(op: Op, n_tokens: int, n_threads: int = 1) -> None:
    Executor([[op]])(n_tokens, 0, n_tokens, n_threads)


def test_gelu_is_accurate_near_zero_and_far_from_it():
    """Compared with float64, to the last bits, where 1 + tanh would cancel."""
    x = np.concatenate([np.linspace(-12, 12, 4096), np.logspace(-30, 20, 2048), -np.logspace(-30, 0.7, 2048)]).astype(np.float32)
    x, out = x.reshape(8, -1), zeros(1, 8, 1024)
    run(gelu(out, np.ascontiguousarray(x), 1), 8)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = wide / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    # e^v of v rounded to float32 has an error of |v| units
    assert (np.abs(out[0] - exact) <= 2e-7 * (3 + np.abs(wide) ** 3) * np.abs(exact) + 1e-36).all()
    np.testing.assert_allclose(exact[:4], reference.gelu(wide[:4]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_threads", THREAD_COUNTS)
def test_gated_activations_multiply_the_up_projection(n_threads):
    x = (
        np.random.default_rng(0).standard_normal((3, 4, 32)).astype(np.float32) * 3
    )  # two panels of gates and two of up projections
    gates, ups = (x[:, i::2].reshape(3, 64).astype(np.float64) for i in range(2))
    for kernel, expected in ((geglu, reference.gelu(gates)), (swiglu, gates / (1 + np.exp(-gates)))):
        out = zeros(1, 3, 64)
        run(kernel(out, x.reshape(3, 128), 1), 3, n_threads)
        np.testing.assert_allclose(out[0], expected * ups, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("eps", [-1e-6, -0.3, 0.0, 0.3])
@pytest.mark.parametrize("n", [31, 64, 75])
def test_xielu_equals_its_definition_and_leaves_the_padding_at_zero(n, eps):
    """Also at 0, where it is not 0, near it, and for what is not finite."""
    width, numbers, x = round_up(n, 32), zeros(128), zeros(3, round_up(n, 32))
    numbers[::32] = 0.3, -0.7, 0.4, eps
    x[:, :n] = np.random.default_rng(0).standard_normal((3, n)) * np.array([[4.0], [1e-3], [1e-6]])
    x[0, :5] = 0, -0.0, np.nan, np.inf, -80
    tensors = dict(zip(("alpha_p", "alpha_n", "beta", "eps"), numbers[::32, None].astype(np.float64), strict=True))
    with np.errstate(invalid="ignore"):
        expected = reference.xielu(tensors, 0)(x[:, :n].astype(np.float64))
    for n_threads in THREAD_COUNTS:
        out = np.full((1, 3, width), np.nan, np.float32)
        run(xielu(out, x, numbers, n), 3, n_threads)
        found, finite = out[0, :, :n], np.isfinite(expected)
        np.testing.assert_array_equal(found[~finite], expected[~finite])
        bound = 1e-6 * np.abs(expected[finite]) + 1e-7 * np.abs(x[:, :n][finite])
        assert (np.abs(found[finite] - expected[finite]) <= bound).all()
        assert (out[0, :, n:] == 0).all()


@pytest.mark.parametrize("dim", [31, 64, 100])
def test_add_norm_does_not_depend_on_threads(dim):
    rng, width = np.random.default_rng(0), round_up(dim, 32)
    x, branch, weight = zeros(3, width), zeros(1, 3, width), zeros(width)
    for array in (x.T, branch[0].T, weight):
        array[:dim] = rng.standard_normal(array[:dim].shape)
    expected = x[:, :dim] + reference.rms_norm(branch[0, :, :dim].astype(np.float64), weight[:dim], 1e-6)
    for n_threads, factor in itertools.product(THREAD_COUNTS, (1.0, 0.75)):
        out = x.copy()
        run(add_norm(out, branch, weight, dim, 1e-6, factor, True), 3, n_threads)
        np.testing.assert_allclose(out[:, :dim], factor * expected, rtol=0, atol=2e-6)
        assert (out[:, dim:] == 0).all()


@pytest.mark.parametrize("dim", [31, 64, 100])
def test_parallel_branches_are_normed_added_and_normed_again(dim):
    rng, width = np.random.default_rng(0), round_up(dim, 32)
    x, a, b, weights = zeros(3, width), zeros(1, 3, width), zeros(1, 3, width), zeros(3, width)
    for array in (x.T, a[0].T, b[0].T, weights.T):
        array[:dim] = rng.standard_normal(array[:dim].shape)
    normed = [
        reference.rms_norm(branch[0, :, :dim].astype(np.float64), w[:dim], 1e-6)
        for branch, w in zip((a, b), weights, strict=False)
    ]
    expected = 0.75 * (x[:, :dim] + reference.rms_norm(sum(normed), weights[2, :dim], 1e-6))
    for n_threads in THREAD_COUNTS:
        out, branch_sum = x.copy(), zeros(1, 3, width)
        run(add_norm(branch_sum[0], a, weights[0], dim, 1e-6, 1.0, False), 3, n_threads)
        run(add_norm(branch_sum[0], b, weights[1], dim, 1e-6, 1.0, True), 3, n_threads)
        run(add_norm(out, branch_sum, weights[2], dim, 1e-6, 0.75, True), 3, n_threads)
        np.testing.assert_allclose(out[:, :dim], expected, rtol=0, atol=4e-6)
        assert (out[:, dim:] == 0).all()


@pytest.mark.parametrize("n_threads", THREAD_COUNTS)
def test_softcap_limits_logits_and_keeps_nonfinite_ones(n_threads):
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.standard_normal((2, 120)) * scale for scale in (1e-4, 1.0, 8.0, 300.0)], 1).astype(np.float32)
    logits[0, :4] = np.nan, np.inf, -np.inf, 0.0
    expected, out = 7.0 * np.tanh(logits.astype(np.float64) / 7.0), zeros(2, 480)
    out[:] = logits
    run(softcap(out, 7.0), 2, n_threads)
    np.testing.assert_allclose(out, expected, rtol=5e-7, atol=0)


def test_gelu_keeps_nonfinite_values():
    x, out = zeros(1, 32), zeros(1, 1, 32)
    x[0, :3] = np.nan, np.inf, -np.inf
    run(gelu(out, x, 1), 1)
    assert not np.isfinite(out[0, 0, :3]).any() and (out[0, 0, 3:] == 0).all()


@pytest.mark.parametrize("mean", [0.0, 300.0])
@pytest.mark.parametrize("dim", [31, 32, 33, 100])
def test_layer_norm_ignores_the_mean_and_the_padding(dim, mean):
    rng = np.random.default_rng(0)
    width = round_up(dim, 32)
    x, out, weight, bias = zeros(1, 3, width), zeros(1, 3, width), zeros(width), zeros(width)
    for array in (x[0].T, weight, bias):
        array[:dim] = rng.standard_normal(array[:dim].shape)
    x[0, :, :dim] += mean
    out[:] = np.nan  # left by an earlier pass
    run(layer_norm(out, x, weight, bias, dim, 1e-5, False), 3)
    expected = reference.layer_norm(x[0, :, :dim].astype(np.float64), weight[:dim].astype(np.float64), bias[:dim])
    np.testing.assert_allclose(out[0, :, :dim], expected, rtol=0, atol=2e-6 * (1 + mean))
    assert (out[0, :, dim:] == 0).all()


@pytest.mark.parametrize(("head_dim", "n_heads", "unit"), [(8, 9, 1), (32, 3, 1), (128, 3, 4), (80, 4, 5), (12, 7, 6)])
def test_every_head_is_normed_exactly_once(head_dim, n_heads, unit):
    base, weight = 32 * unit, zeros(round_up(head_dim, 32))
    x = np.random.default_rng(0).standard_normal((5, base + round_up(n_heads * head_dim, 32 * unit))).astype(np.float32)
    weight[:head_dim] = np.random.default_rng(1).standard_normal(head_dim)
    expected = x.astype(np.float64)
    heads = expected[:, base : base + n_heads * head_dim].reshape(5, n_heads, head_dim)
    heads[:] = reference.rms_norm(heads, weight[:head_dim].astype(np.float64), 1e-6)
    for n_threads in THREAD_COUNTS:
        out = x.copy()
        run(head_norm(out, unit, base, n_heads, head_dim, weight, 1e-6), 5, n_threads)
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6)


def test_matmul_is_one_chain_of_fused_multiply_adds_in_ascending_k():
    """Compared with exact arithmetic rounded after every step: no sum of partial sums has these bits."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 33)).astype(np.float32), rng.standard_normal((17, 33)).astype(np.float32)
    out = zeros(17, 64)
    run_product(pack_matrix([w], FP32), out, x)
    for t, r in ((0, 0), (3, 17), (8, 40), (16, 63)):
        acc = Fraction(0)
        for k in range(33):
            exact = Fraction(float(w[r, k])) * Fraction(float(x[t, k])) + acc
            acc = Fraction(float(round_to_float32(exact)))
        assert float(out[t, r]) == float(acc)


def test_everything_compiles_without_a_cache_folder():
    """With a cache that finds no writable folder."""
    code = """
from specdec.runtime import code_cache as cache
cache._cache_dir.append("")
from specdec.sampling import mix_bits
print(mix_bits.stats.cache_path, mix_bits(1))
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == f" {mix_bits(1)}\n"


def test_kv_cache_larger_than_memory_raises_memory_error():
    with pytest.raises(MemoryError):
        LazyMemory().zeros((1 << 50,))


@pytest.mark.parametrize("n_steps", [1, 2, 7])
def test_peak_arithmetic_runs_every_step_of_every_chain(n_steps: int) -> None:
    n_tokens, rows = 5, REGISTER_LANES
    words = np.full((1, n_tokens * rows), -2.0, np.float32)
    run(make_chains_kernel(keep_words, add_product, FP32_STORAGE, rows, REGISTER_LANES, n_tokens)(words, n_steps), 1)
    assert (words == -2.0 * (-1.0) ** n_steps).all()
    dot = DOT4_BY_NAME[DOT4_NAME]
    words = np.full((1, n_tokens * dot.lanes), np.array(0x01010101, np.int32).view(np.float32), np.float32)
    run(make_chains_kernel(dot.prepare, dot.dot4, INT32_STORAGE, dot.lanes, dot.lanes, n_tokens)(words, 1), 1)
    assert (words.view(np.int32) == 0x01010101 + 4 - (4 * 128 if dot.is_signed else 0)).all()
