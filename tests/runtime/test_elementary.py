"""Elementary functions compared with exact arithmetic, and the fused multiply-add for CPUs without the instruction."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numba
import numpy as np
import pytest

from specdec.layers.rope import compute_positions_per_radian
from specdec.runtime.elementary import exp, expm1, log, sincos, softplus_scalar
from specdec.runtime.simd import LANES, Float32, fma, load, make_vector_op, portable_multiply_add, store
from tests.tools.configs import make_config
from tests.tools.random_models import round_to_float32

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651")

portable_fma = make_vector_op(3, portable_multiply_add)


@numba.njit
def vector_exp(out, x):
    for i in range(0, x.size, LANES):
        store(out, i, exp(load(x, i)))


@numba.njit
def call_softplus(x):
    return softplus_scalar(x)


@numba.njit
def vector_expm1(out, x):
    for i in range(0, x.size, LANES):
        store(out, i, expm1(load(x, i)))


@numba.njit
def multiply_add(out, portable, x, y, z):
    for i in range(0, x.size, LANES):
        store(out, i, fma(load(x, i), load(y, i), load(z, i)))
        store(portable, i, portable_fma(load(x, i), load(y, i), load(z, i)))


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-86.9, 87.9, 1 << 16, dtype=np.float32)
    out = np.empty_like(x)
    vector_exp(out, x)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_expm1_is_within_two_units_in_the_last_place() -> None:
    """Near 0, where e^x - 1 would cancel, at the edges of the reduced range, and where the result is almost -1."""
    small = np.logspace(-37, -1, 1 << 14)
    x = np.concatenate([small, -small, np.linspace(-3, 3, 1 << 15), np.linspace(-86.9, 87.9, 1 << 14)]).astype(np.float32)
    out = np.empty_like(x)
    vector_expm1(out, x)
    exact = np.expm1(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() <= 2
    vector_expm1(out, np.resize(np.array([0.0, -np.inf, -200.0, np.nan], np.float32), x.size))
    np.testing.assert_array_equal(out[:4], [0, -1, -1, np.nan])


def test_softplus_is_accurate_on_both_sides() -> None:
    numbers = np.concatenate([np.linspace(-80, 80, 500), [0.0, -1e-6, 1e-6]]).astype(np.float32)
    found = np.array([call_softplus(x) for x in numbers])
    np.testing.assert_allclose(found, np.logaddexp(0, numbers.astype(np.float64)), rtol=4e-7, atol=2e-16)


def test_exp_of_masked_scores_is_exactly_zero() -> None:
    x = np.array([-np.inf, -1e30, -200.0, -87.5] * 4, np.float32)
    out = np.ones_like(x)
    vector_exp(out, x)
    assert (out == 0).all()


def test_exp_of_nan_is_nan() -> None:
    out = np.zeros(16, np.float32)
    vector_exp(out, np.full(16, np.nan, np.float32))
    assert np.isnan(out).all()


def test_log_is_within_two_units_in_the_last_place() -> None:
    """Check the uniform numbers of draws, near 0, near 1 and between, and all exponents."""
    rng = np.random.default_rng(0)
    near_one = 1 - 2.0 ** -rng.uniform(1, 53, 500)
    numbers = [
        *rng.random(1000),
        *near_one,
        2.0**-53,
        1 - 2.0**-53,
        1.0,
        *(rng.random(500) * 2.0 ** rng.integers(-1000, 1000, 500)),
    ]
    with localcontext() as context:
        context.prec = 40
        for x in numbers:
            exact = Decimal(float(x)).ln()
            assert abs(Decimal(log(float(x))) - exact) <= 2 * Decimal(math.ulp(float(exact))), x
    assert log(math.inf) == math.inf


def exact_sine_and_cosine(x: float) -> tuple[Decimal, Decimal]:
    """Return sine and cosine by the Taylor series of x modulo pi / 2."""
    quarter, r = divmod(Decimal(x), PI / 2)
    sine, cosine, term = Decimal(0), Decimal(0), Decimal(1)
    for n in range(0, 60, 2):
        cosine, sine = cosine + term, sine + term * r / (n + 1)
        term *= -r * r / ((n + 1) * (n + 2))
    return [(sine, cosine), (cosine, -sine), (-sine, -cosine), (-cosine, sine)][int(quarter) % 4]


def test_sine_and_cosine_are_within_their_bound_up_to_two_billion_radians() -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 1 << 31, 300).astype(np.float64)
    near_zeros = np.rint(rng.random(300) * 2.0**30) * (math.pi / 2)
    angles = [0.0, *rng.random(300) * 10, *whole, *near_zeros, *rng.random(300) * 131072.0, 2.0**31 - 1, math.pi / 4, math.pi / 2]
    with localcontext() as context:
        context.prec = 80
        for x in map(float, angles):
            for got, exact in zip(sincos(x), exact_sine_and_cosine(x), strict=True):
                assert abs(Decimal(got) - exact) <= Decimal(2.0**-52), x


@pytest.mark.parametrize("theta", [1.0, 10000.0, 5e5, 1e6, 123456.789])
def test_rope_frequencies_are_correctly_rounded_powers(theta: float) -> None:
    config = make_config(128, 8, 1, 1, 1, 8, 8, rope_theta=theta)
    with localcontext() as context:
        context.prec = 60
        exact = [(Decimal(theta).ln() * row / 128).exp() for row in range(0, 128, 2)]
    assert compute_positions_per_radian(config).tolist() == [float(power) for power in exact]


def hard_cases() -> Float32:
    """Return x, y, z (3, n) of all sizes: cancellation, ties and near ties, subnormal results, and nonfinite numbers."""
    rng = np.random.default_rng(0)
    n = 1 << 12
    x, y = (rng.integers(0, 1 << 32, n, np.uint64).astype(np.uint32).view(np.float32) for _ in range(2))
    z = rng.integers(0, 1 << 32, n, np.uint64).astype(np.uint32).view(np.float32)
    a, b = (np.ldexp(rng.integers(1 << 23, 1 << 24, n).astype(np.float32), -23) for _ in range(2))
    cancelled = -(a * b)  # leaves the product's rounding error
    tie = np.ldexp(np.where(rng.random(n) < 0.5, -1, 1).astype(np.float32), rng.integers(-30, 30, n))
    small = np.ldexp(a, -rng.integers(60, 80, n))
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 1e-45], np.float32)
    grid = np.stack(np.meshgrid(special, special, special)).reshape(3, -1)
    cases = [
        (x, y, z),
        (a, b, cancelled),
        (a, b, tie),
        (a, np.ones_like(a), tie * np.float32(2.0**-24)),
        (small, small, np.zeros_like(z)),
        grid,
    ]
    return np.concatenate([np.stack([np.broadcast_to(array, case[0].shape) for array in case]) for case in cases], axis=1)


def test_portable_multiply_add_is_rounded_once() -> None:
    """Compared with exact arithmetic, and with the CPU's own instruction if it has one."""
    x, y, z = (np.ascontiguousarray(row) for row in hard_cases())
    out, portable = np.empty_like(x), np.empty_like(x)
    multiply_add(out, portable, x, y, z)
    same = (out.view(np.uint32) == portable.view(np.uint32)) | (np.isnan(out) & np.isnan(portable))
    assert same.all(), (x[~same], y[~same], z[~same])
    for i in range(0, x.size, 7):
        if np.isfinite([x[i], y[i], z[i], portable[i]]).all():
            exact = Fraction(float(x[i])) * Fraction(float(y[i])) + Fraction(float(z[i]))
            assert portable[i] == round_to_float32(exact), (x[i], y[i], z[i])
