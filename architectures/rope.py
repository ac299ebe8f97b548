"""Rotary position embedding (Su et al. 2021): the angles that a head's pairs turn by, position by position."""

import math

import numpy as np
import numpy.typing as npt

from ..machine.vectors import LANES, Float32
from .config import Config

BLOCK_POSITIONS = 4096  # whose angles are in memory as float64 at a time


def positions_a_radian(config: Config) -> npt.NDArray[np.float64]:
    """How many positions (K / 2,) each pair of a head takes to turn by one radian: theta^(2i/K), scaled as the config says."""
    positions: npt.NDArray[np.float64] = config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_divisors:
        positions *= config.rope_divisors
    if (scaling := config.rope_scaling) is None:
        return positions
    # Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783) as transformers' modeling_rope_utils has it
    turns = scaling.original_seq_len / (2 * math.pi * positions)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    scaled: npt.NDArray[np.float64] = positions / (kept + (1 - kept) / scaling.factor)
    return scaled


def fill_tables(config: Config, cos: Float32, sin: Float32, start: int = 0) -> None:
    """cos and signed sin (S, K + LANES) from position start on, periodic in K: a vector may begin in any row of a head."""
    rows = np.arange(config.head_dim + LANES) % config.head_dim
    signs = np.where(rows % 2 == 0, -1, 1)
    for first in range(start, len(cos), BLOCK_POSITIONS):
        block = slice(first, min(first + BLOCK_POSITIONS, len(cos)))
        angles = np.arange(block.start, block.stop)[:, None] / positions_a_radian(config)
        cos[block] = np.cos(angles).astype(np.float32)[:, rows // 2]
        sin[block] = np.sin(angles).astype(np.float32)[:, rows // 2] * signs
