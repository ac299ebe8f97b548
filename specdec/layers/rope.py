"""Rotary position embedding (Su et al. 2021): the angles by which a head's pairs are rotated, position by position.

Shapes: S cached positions, K head dim.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext

import numpy as np

from specdec.kernels import fill_rope_tables
from specdec.layers.buffers import Allocator, RopeTables
from specdec.model_config import Llama3RopeScaling, ModelConfig, YarnRopeScaling
from specdec.runtime.elementary import log
from specdec.runtime.simd import LANES, Float32, Float64

TreeNode = tuple[int, int]  # its token, and the index of its parent, or -1
# Decimal arithmetic is the same on every machine; pow of a C library is not. A float64 keeps 17 of these digits.
DECIMAL_CONTEXT = Context(prec=40)


def compute_positions_per_radian(config: ModelConfig) -> Float64:
    """Return how many positions each pair of rows takes to rotate by one radian: theta^(2i/n), with RoPE scaling applied."""
    with localcontext(DECIMAL_CONTEXT):
        theta, pairs = Decimal(config.rope.theta), range(0, config.rotary_dim, 2)
        positions = np.array([float(theta ** (Decimal(row) / config.rotary_dim)) for row in pairs])
    if config.rope.freq_factors:
        positions *= config.rope.freq_factors
    if (scaling := config.rope.scaling) is None:
        return positions
    ramp = (
        _compute_yarn_ramp(scaling, config) if isinstance(scaling, YarnRopeScaling) else _compute_llama3_ramp(scaling, positions)
    )
    scaled: Float64 = positions / (ramp + (1 - ramp) / scaling.factor)
    return scaled


def _compute_llama3_ramp(scaling: Llama3RopeScaling, positions: Float64) -> Float64:
    """Return the unscaled share, 0 to 1, of each pair's angle (Llama 3.1: arXiv:2407.21783), as in transformers."""
    rotations = scaling.original_seq_len / (2 * math.pi * positions)
    ramp: Float64 = np.clip((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return ramp


def _compute_yarn_ramp(scaling: YarnRopeScaling, config: ModelConfig) -> Float64:
    """Return the unscaled share, 0 to 1, of each pair's angle (YaRN), as in transformers' modeling_rope_utils."""
    with localcontext(DECIMAL_CONTEXT):
        log_theta, n_radians = Decimal(config.rope.theta).ln(), Decimal(2 * math.pi)
        first, last = (
            float(config.rotary_dim * (Decimal(scaling.original_seq_len) / (Decimal(n) * n_radians)).ln() / (2 * log_theta))
            for n in (scaling.beta_fast, scaling.beta_slow)  # rotations within the original context
        )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    ramp: Float64 = 1 - np.clip((np.arange(config.rotary_dim // 2) - first) / (last - first or 0.001), 0, 1)
    return ramp


def get_yarn_attention_factor(factor: float, share: float = 1.0) -> float:
    """Return YaRN's factor of the rotated rows, 1 + share ln(factor) / 10, for a context that is `factor` times as long.

    Source: arXiv:2309.00071, section 3.4. For a factor of 1 or less the result is 1.
    """
    with localcontext(DECIMAL_CONTEXT):
        return float(Decimal(share) * Decimal(factor).ln() / 10 + 1) if factor > 1 else 1.0


def get_longrope_attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's factor of the rotated rows for a context of `factor` times `original` positions (arXiv:2402.13753)."""
    with localcontext(DECIMAL_CONTEXT):
        return float((1 + Decimal(factor).ln() / Decimal(original).ln()).sqrt()) if factor > 1 else 1.0


def make_rope_tables(config: ModelConfig, n_positions: int, new: Allocator, are_scaled: bool = False) -> RopeTables:
    """Return RoPE tables of at least n_positions positions, which all sequences share.

    are_scaled: Multiply the rows by 1 + query_scale log(1 + position // query_span) of the config, for queries.
    """
    key = config.rope, config.head_dim, config.rope_table_dim, are_scaled
    old = new.shared.ropes.get(key)
    if old and len(old.cos) >= n_positions:
        return old
    shape = n_positions, config.rope_table_dim + LANES
    tables = RopeTables(new.make(shape), new.make(shape))
    if not new.is_plan:
        fill_cos_sin(config, *tables)
        if are_scaled:
            scales = [1 + config.rope.query_scale * log(1.0 + i // config.rope.query_span) for i in range(n_positions)]
            for table in tables:
                table *= np.array(scales, np.float32)[:, None]
    new.shared.executors.clear()  # they use the shorter tables
    new.shared.ropes[key] = tables
    return tables


def fill_cos_sin(config: ModelConfig, cos: Float32, sin: Float32) -> None:
    """Fill the RoPE tables cos and signed sin (S, K + LANES) in place.

    The tables are periodic in K, because a vector may begin at any row of a head.
    """
    fill_rope_tables(cos, sin, compute_positions_per_radian(config), config.rope_table_dim, config.rope.attention_factor)


def compute_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of a token tree, given the nodes' parents; a node without a parent (-1) has depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


def compute_lengths(tokens: list[int], nodes: list[TreeNode], n_logits: int) -> list[int]:
    """Return the sequence length at each of the last n_logits of tokens and tree nodes, counting the token or node itself."""
    n, depths = len(tokens), compute_depths([parent for _, parent in nodes])
    return [*range(n - n_logits + 1, n + 1), *(n + depth for depth in depths)][-n_logits:]
