"""Rotary position embedding (Su et al. 2021): the angles that a head's pairs turn by, position by position."""

import math
from decimal import Decimal, localcontext

import numpy as np

from ..kernels import fill_rotations
from ..machine.vectors import Float32, Float64
from .config import Config

DIGITS = 40  # of a power, of which a float64 keeps 17: decimal arithmetic is the same on every machine, a C library's pow is not


def positions_a_radian(config: Config) -> Float64:
    """How many positions (K / 2,) each pair of a head takes to turn by one radian: theta^(2i/K), scaled as the config says."""
    with localcontext() as context:
        context.prec = DIGITS
        theta, pairs = Decimal(config.rope_theta), range(0, config.head_dim, 2)
        positions = np.array([float(theta ** (Decimal(row) / config.head_dim)) for row in pairs])
    if config.rope_divisors:
        positions *= config.rope_divisors
    if (scaling := config.rope_scaling) is None:
        return positions
    # Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783) as transformers' modeling_rope_utils has it
    turns = scaling.original_seq_len / (2 * math.pi * positions)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    scaled: Float64 = positions / (kept + (1 - kept) / scaling.factor)
    return scaled


def fill_tables(config: Config, cos: Float32, sin: Float32, start: int = 0) -> None:
    """cos and signed sin (S, K + LANES) from position start on, periodic in K: a vector may begin in any row of a head."""
    fill_rotations(cos, sin, positions_a_radian(config), start)
