"""Rotary position embedding (Su et al. 2021): the angles that a head's pairs turn by, position by position."""

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext

import numpy as np

from specdec.config import Config, RopeScaling, YarnScaling
from specdec.kernels import fill_rotations
from specdec.runtime.elementary import log
from specdec.runtime.simd import Float32, Float64

Node = tuple[int, int]  # of a tree: its token, and the index of its parent, or -1
# Digits of a power, of which a float64 keeps 17: decimal arithmetic is the same on every machine, a C library's pow is not
EXACT = Context(prec=40)


def positions_a_radian(config: Config) -> Float64:
    """How many positions each pair of a head takes to turn by one radian: theta^(2i/n) of n rows, scaled as the config says."""
    with localcontext(EXACT):
        theta, pairs = Decimal(config.rope.theta), range(0, config.n_turned, 2)
        positions = np.array([float(theta ** (Decimal(row) / config.n_turned)) for row in pairs])
    if config.rope.divisors:
        positions *= config.rope.divisors
    if (scaling := config.rope.scaling) is None:
        return positions
    kept = _kept_by_pair(scaling, config) if isinstance(scaling, YarnScaling) else _kept_by_turns(scaling, positions)
    scaled: Float64 = positions / (kept + (1 - kept) / scaling.factor)
    return scaled


def _kept_by_turns(scaling: RopeScaling, positions: Float64) -> Float64:
    """Which part of each pair's angle is not divided: of Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783) as in transformers."""
    turns = scaling.original_seq_len / (2 * math.pi * positions)
    kept: Float64 = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return kept


def _kept_by_pair(scaling: YarnScaling, config: Config) -> Float64:
    """The same of yarn, as transformers' modeling_rope_utils has it."""
    with localcontext(EXACT):
        theta = Decimal(config.rope.theta).ln()
        first, last = (
            float(
                config.n_turned * (Decimal(scaling.original_seq_len) / (Decimal(turns) * Decimal(2 * math.pi))).ln() / (2 * theta)
            )
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
    if scaling.in_whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.n_turned - 1)
    kept: Float64 = 1 - np.clip((np.arange(config.n_turned // 2) - first) / (last - first or 0.001), 0, 1)
    return kept


def yarn_scale(factor: float, share: float = 1.0) -> float:
    """What turned rows are multiplied by where a model reads `factor` times as far (arXiv:2309.00071, 3.4); of that, a share."""
    with localcontext(EXACT):
        return float(Decimal(share) * Decimal(factor).ln() / 10 + 1) if factor > 1 else 1.0


def longrope_scale(factor: float, original: int) -> float:
    """What turned rows are multiplied by where a model of so many positions reads `factor` times as many (arXiv:2402.13753)."""
    with localcontext(EXACT):
        return float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt()) if factor > 1 else 1.0


def fill_tables(config: Config, cos: Float32, sin: Float32, start: int = 0) -> None:
    """cos and signed sin (S, K + LANES) from position start on, periodic in K: a vector may begin in any row of a head."""
    fill_rotations(cos, sin, positions_a_radian(config), start, config.head_dim, config.rope.scale)


def fill_query_tables(config: Config, query_cos: Float32, query_sin: Float32, cos: Float32, sin: Float32, start: int) -> None:
    """Of queries: the tables of keys, scaled by position."""
    scales = [1 + config.rope.query_scale * log(1.0 + position // config.rope.query_span) for position in range(start, len(cos))]
    by_position = np.array(scales, np.float32)[:, None]
    query_cos[start:], query_sin[start:] = cos[start:] * by_position, sin[start:] * by_position


def depths(parents: Sequence[int]) -> list[int]:
    """Of a tree's nodes behind a text, by the indexes of their parents, or -1."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 1)
    return found


def lengths(tokens: list[int], nodes: list[Node], n_logits: int) -> list[int]:
    """How long the texts are that the last n_logits of tokens and nodes end."""
    n, n_of_nodes = len(tokens), min(n_logits, len(nodes))
    behind = depths([parent for _, parent in nodes])[len(nodes) - n_of_nodes :]
    return [*range(n - n_logits + n_of_nodes + 1, n + 1), *(n + depth for depth in behind)]
