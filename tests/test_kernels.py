"""Operations: against exact arithmetic, and where numbers end."""

import subprocess
import sys
from fractions import Fraction

import numba
import numpy as np
import pytest

from specdec.kernels import exp
from specdec.machine.memory import lazy_zeros, zeros
from specdec.machine.vectors import LANES, load, store
from specdec.sampling import mix_bits
from specdec.weights import FP32
from specdec.weights.matrix import pack
from tests.checkpoints import ROOT
from tests.models import product, round_to_float32


@numba.njit
def vector_exp(out, x):
    for i in range(0, x.size, LANES):
        store(out, i, exp(load(x, i)))


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


def test_exp_of_nan_is_nan():
    out = np.zeros(16, np.float32)
    vector_exp(out, np.full(16, np.nan, np.float32))
    assert np.isnan(out).all()


def test_a_product_is_one_chain_of_fused_multiply_adds_in_ascending_k():
    """Against exact arithmetic rounded after every step: no sum of partial sums can give these bits."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 33)).astype(np.float32), rng.standard_normal((17, 33)).astype(np.float32)
    out = zeros(17, 64)
    product(pack([w], FP32), out, x)
    for t, r in ((0, 0), (3, 17), (8, 40), (16, 63)):
        acc = Fraction(0)
        for k in range(33):
            exact = Fraction(float(w[r, k])) * Fraction(float(x[t, k])) + acc
            acc = Fraction(float(round_to_float32(exact)))
        assert float(out[t, r]) == float(acc)


def test_where_nothing_can_be_cached_everything_still_compiles():
    """Numba, made to find no folder that it may write to."""
    code = """
from specdec.machine import cache
cache._folder.append("")
from specdec.sampling import mix_bits
print(mix_bits.stats.cache_path, mix_bits(1))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f" {mix_bits(1)}\n"


def test_a_cache_beyond_all_memory_is_a_memory_error():
    with pytest.raises(MemoryError):
        lazy_zeros(1 << 50)
