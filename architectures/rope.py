"""Rotary position embedding (Su et al. 2021): the angles that a head's pairs turn by, position by position."""

import math
from decimal import Decimal, localcontext

import numpy as np

from ..kernels import fill_rotations
from ..machine.vectors import Float32, Float64
from .config import Config

DIGITS = 40  # of a power, of which a float64 keeps 17: decimal arithmetic is the same on every machine, a C library's pow is not


def positions_a_radian(config: Config) -> Float64:
    """How many positions each pair of a head takes to turn by one radian: theta^(2i/n) of n rows, scaled as the config says."""
    with localcontext() as context:
        context.prec = DIGITS
        theta, pairs = Decimal(config.rope_theta), range(0, config.n_turned, 2)
        positions = np.array([float(theta ** (Decimal(row) / config.n_turned)) for row in pairs])
    if config.rope_divisors:
        positions *= config.rope_divisors
    if (scaling := config.rope_scaling) is None:
        return positions
    # Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783) as transformers' modeling_rope_utils has it
    turns = scaling.original_seq_len / (2 * math.pi * positions)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    scaled: Float64 = positions / (kept + (1 - kept) / scaling.factor)
    return scaled


def longrope_scale(factor: float, original: int) -> float:
    """What turned rows are multiplied by where a model of so many positions reads `factor` times as many (arXiv:2402.13753)."""
    with localcontext() as context:
        context.prec = DIGITS
        return float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt()) if factor > 1 else 1.0


def fill_tables(config: Config, cos: Float32, sin: Float32, start: int = 0) -> None:
    """cos and signed sin (S, K + LANES) from position start on, periodic in K: a vector may begin in any row of a head."""
    fill_rotations(cos, sin, positions_a_radian(config), start, config.head_dim, config.rope_scale)
