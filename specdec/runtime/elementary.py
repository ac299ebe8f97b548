"""Elementary functions that give the same bits on every machine; those of C libraries differ in the last bit.

Each is a fixed sequence of operations that IEEE 754 rounds correctly, so they are the same everywhere: + - * / and sqrt,
conversions, and multiply-adds that are fused only where `fma` is called. Range reduction by Cody and Waite 1980, then Taylor
polynomials.
"""

import numpy as np
from numba import types

from specdec.runtime import simd
from specdec.runtime.code_cache import compiled, jitable
from specdec.runtime.simd import add, div, fma, make_polynomial, maximum, minimum, mul, rint, splat, zero_unless_positive

# log 2 and pi / 2 as sums; the first terms have so few bits that their products with an integer of 11, or 31, bits are exact
LOG2_HIGH, LOG2_LOW = 0.6931471803691238, 1.9082149292705877e-10
HALF_PI_HIGH, HALF_PI_MIDDLE, HALF_PI_LOW = 1.570796012878418, 3.139164164167596e-07, 6.223372171896613e-14
SQRT_HALF_BITS = np.float64(0.5**0.5).view(np.int64)
FRACTION_BITS = np.int64(52)
ROUNDING_BIAS = 1.5 * 2.0**52  # x + this - this is the integer nearest to x, and x + this has it in its lowest bits


exp_polynomial = make_polynomial(1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
expm1_polynomial = make_polynomial(1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5)
tanh_polynomial = make_polynomial(-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3)
log_polynomial = make_polynomial(*(1 / n for n in range(23, 2, -2)), numba_type=types.float64)
sin_polynomial = make_polynomial(
    1 / 355687428096000, -1 / 1307674368000, 1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6,
    numba_type=types.float64,
)  # fmt: skip
cos_polynomial = make_polynomial(
    1 / 20922789888000, -1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2,
    numba_type=types.float64
)  # fmt: skip


@jitable
def exp(x):
    """Return e^x for each lane of a vector, within 2 units in the last place; exactly 0 below -87, e^88 above 88, NaN of NaN.

    x = n log 2 + r, 2^n through the exponent field, e^r by its Taylor polynomial of degree 7.
    """
    clamped = minimum(splat(88.0), maximum(splat(-87.0), x))  # in this order a NaN stays one
    n = rint(mul(clamped, splat(1.4426950408889634)))
    r = fma(n, splat(-0.693145751953125), clamped)
    r = fma(n, splat(-1.4286068203094172e-06), r)
    return zero_unless_positive(mul(exp_polynomial(r), simd.exp2_of_integer(n)), add(x, splat(87.0)))


@jitable
def exp_scalar(x):
    """Return e^x of a float32 scalar, with the same bits as the vector function `exp`."""
    return simd.extract_lane(exp(splat(x)), 0)


@jitable
def expm1(x):
    """Return e^x - 1 for each lane of a vector, within 2 units in the last place; -1 below -87, e^88 above 88, NaN of NaN.

    As `exp`, but e^r - 1 = r + r^2 (1 / 2 + ...) keeps its precision near 0; then 2^n (e^r - 1) + (2^n - 1).
    """
    clamped = minimum(splat(88.0), maximum(splat(-87.0), x))
    n = rint(mul(clamped, splat(1.4426950408889634)))
    r = fma(n, splat(-0.693145751953125), clamped)
    r = fma(n, splat(-1.4286068203094172e-06), r)
    power = simd.exp2_of_integer(n)
    return fma(power, fma(mul(r, r), expm1_polynomial(r), r), add(power, splat(-1.0)))


@jitable
def sigmoid(x):
    """Return the logistic function 1 / (1 + e^-x) for each lane of a vector."""
    return div(splat(1.0), add(splat(1.0), exp(mul(x, splat(-1.0)))))


@jitable
def silu(x):
    """Return x / (1 + e^-x) for each lane of a vector (SiLU, Elfwing et al. 2018)."""
    return mul(x, sigmoid(x))


@jitable
def gelu_tanh(x):
    """Return GELU in its tanh approximation for each lane of a vector (Hendrycks and Gimpel 2016).

    x / 2 (1 + tanh u) = x / (1 + e^(-2u)) for u = sqrt(2 / pi) (x + 0.044715 x^3), without cancellation.
    """
    minus_2u = mul(x, fma(mul(x, x), splat(-0.044715 * 1.5957691216057308), splat(-1.5957691216057308)))
    return div(x, add(splat(1.0), exp(minus_2u)))


@jitable
def tanh(x):
    """Return the hyperbolic tangent of each lane of a vector, within 4 units in the last place.

    Uses its Taylor polynomial up to 1/4; beyond, 1 - 2 / (1 + e^2x), where little cancels.
    """
    small = minimum(splat(0.25), maximum(splat(-0.25), x))
    z = mul(small, small)
    near = fma(mul(tanh_polynomial(z), z), small, small)
    far = fma(splat(-2.0), div(splat(1.0), add(splat(1.0), exp(mul(x, splat(2.0))))), splat(1.0))
    return add(near, zero_unless_positive(fma(near, splat(-1.0), far), add(maximum(x, mul(x, splat(-1.0))), splat(-0.25))))


@compiled
def log(x):
    """Return the natural logarithm of a positive, normal float64, within 2 units in the last place; infinity of infinity.

    x = 2^n m with m from sqrt(1/2) to sqrt(2); log m = 2 atanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + ...) for s = (m - 1) / (m + 1).
    """
    if x == np.inf:
        return x
    bits = np.float64(x).view(np.int64)
    n = (bits - SQRT_HALF_BITS) >> FRACTION_BITS
    m = np.int64(bits - (n << FRACTION_BITS)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    return n * LOG2_HIGH + (2.0 * s + (2.0 * s * (z * log_polynomial(z)) + n * LOG2_LOW))


@jitable
def softplus_scalar(x):
    """Return the softplus log(1 + e^x) of a float32 scalar, computed as max(x, 0) + log(1 + e^-|x|)."""
    if not abs(x) < np.inf:
        return max(x, np.float32(0.0)) if x == x else x
    return max(x, np.float32(0.0)) + np.float32(log(1.0 + np.float64(exp_scalar(-abs(x)))))


@compiled
def sincos(x):
    """Return sin x and cos x of a float64 from 0 to 2^31, each within 2^-52.

    x = n pi / 2 + r with r from -pi / 4 to pi / 4; the products with n and the first two differences are exact.
    """
    shifted = x * 0.6366197723675814 + ROUNDING_BIAS
    n = shifted - ROUNDING_BIAS
    r = ((x - n * HALF_PI_HIGH) - n * HALF_PI_MIDDLE) - n * HALF_PI_LOW
    z = r * r
    sine, cosine = r + r * (z * sin_polynomial(z)), 1.0 + z * cos_polynomial(z)
    quarter = np.float64(shifted).view(np.int64)
    if quarter & 1:
        sine, cosine = cosine, -sine
    if quarter & 2:
        sine, cosine = -sine, -cosine
    return sine, cosine
