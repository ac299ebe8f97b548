"""Mamba-2 blocks (Dao and Gu 2024, arXiv:2405.21060): one replaces attention, the other runs next to it (Falcon-H1).

Shapes: T tokens of this pass, L layers, N slots of a ring, H heads, P rows of a head, G groups of heads, D state dim.
"""

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, scale_columns
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.attention import ATTENTION, NORM
from specdec.layers.block import NO_BIAS, Block, add_residual, get_scratches, norm_shapes, prepare_input
from specdec.layers.recurrent_ops import (
    KEY_RING_SLOTS,
    RING_SLOTS,
    convolve,
    group_norm,
    make_ring_buffer,
    mamba2,
    store_columns,
)
from specdec.mixer_config import Mamba2Config
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Program
from specdec.runtime.simd import Float32, round_up


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a Mamba-2 block's tensors in one layer, by name.

    mamba_xbc, mamba_z, mamba_dt: projections. conv (kernel_size, channels), conv_bias (channels). rate: factor of the decay's
    logarithm, negative. dt: bias of dt. skip: factor of x in the output. mamba_norm: a row of norm weights for each group.
    """
    m, dim = require_type(config.mixer, Mamba2Config), config.dim
    tensors: Shapes = {
        "mamba_xbc": (m.conv_dim, dim), "mamba_z": (m.inner_dim, dim), "mamba_dt": (m.n_heads, dim),
        "mamba_out": (dim, m.inner_dim), "conv": (m.kernel_size, m.conv_dim), "rate": (m.n_heads,), "dt": (m.n_heads,),
        "skip": (m.n_heads,),
    }  # fmt: skip
    if m.has_norm:
        tensors["mamba_norm"] = (m.n_groups, m.inner_dim // m.n_groups)
    return norm_shapes(config, NORM) | tensors | ({"conv_bias": (m.conv_dim,)} if m.conv_bias else {})


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of Mamba-2 blocks, by name; `Mamba2Args` describes those not listed here.

    projected (T, columns): output of the matmuls. inputs (L, N, channels): rings of the convolutions' inputs.
    mixed_values (1, T, H P padded), normed_values (threads, T, H P padded): output of the layers, and after the norm if any.
    """
    layers = config.find_mixer_layers(Mamba2Config)
    m, n = require_type(config.layer_config(layers[0]).mixer, Mamba2Config), len(layers)
    width, inner_width = round_up(m.head_dim, PANEL_ROWS), round_up(m.inner_dim, PANEL_ROWS)
    columns = [matrix.n_total_rows for name, matrix in weights.matrices.items() if name.endswith(".in")]
    return {
        "mixed_values": BufferSpec((1, MAX_BATCH_TOKENS, inner_width), scope="token"),
        "normed_values": BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, inner_width), scope="token"),
        "projected": BufferSpec((MAX_BATCH_TOKENS, max(columns, default=0)), scope="token"),
        "inputs": make_ring_buffer(n, m.kernel_size, round_up(m.conv_dim, PANEL_ROWS)),
        "states": BufferSpec((n, 2, m.n_heads * (width // PANEL_ROWS), m.state_dim, PANEL_ROWS), scope="cache"),
        "lengths": BufferSpec((n, m.n_heads, 2), np.int64, "sequence"),
        "delta_keys": BufferSpec((n, KEY_RING_SLOTS, m.n_groups * m.state_dim), scope="cache"),
        "deltas": BufferSpec((n, m.n_heads, RING_SLOTS, width), scope="cache"),
        "decays": BufferSpec((n, m.n_heads, RING_SLOTS), scope="sequence"),
        "scan_scratch": BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, width)),
    }


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the Mamba-2 block's program in layer i: x += scale out norm(mamba2(conv(in rmsnorm(x))))."""
    m, w, v = require_type(config.mixer, Mamba2Config), weights.matrices, weights.vectors
    source, before = prepare_input(config, weights, b, f"{i}.{NORM}")
    matmul = weights.matmul(f"{i}.in", b.projected, source, get_scratches(b))
    scale_ops = [scale_columns(b.projected, make_projection_factors(m), 1)] if m.scales else []
    convolution = convolve(b.projected, 1, 0, b.inputs, v[f"{i}.conv"], v.get(f"{i}.conv_bias", NO_BIAS))
    state = b.states, b.lengths, b.delta_keys, b.deltas, b.decays
    scale = 1.0 if m.has_norm else m.output_scale
    scan = mamba2(b.mixed_values, b.projected, *state, b.scan_scratch, v[f"{i}.rates"], m.head_dim, scale)
    norm_ops, output = [], b.mixed_values
    if m.has_norm:
        weight = v[f"{i}.mamba_norm"] * np.float32(m.output_scale)
        norm_ops, output = [group_norm(b.normed_values, b.mixed_values, weight, m.inner_dim, config.norm_eps)], b.normed_values
    phase, *others = add_residual(config, weights, b, w[f"{i}.mamba_out"], output, "", f"{i}.{NORM}")
    return [
        [*before, *matmul, *scale_ops, convolution, store_columns(b.projected, 1, m.inner_dim, b.delta_keys)],
        [scan._replace(bytes_per_token=b.states.nbytes)],
        [*norm_ops, *phase],
        *others,
    ]


def make_projection_factors(m: Mamba2Config) -> Float32:
    """Return the factor of each column of the projections' output; `m.scales` must not be empty.

    The columns are those of x, B and C, then those of z and those of dt, each of these three parts padded to whole panels.
    """
    z, x, b, c, dt = m.scales
    n = m.n_groups * m.state_dim
    parts = (np.repeat((x, b, c), (m.inner_dim, n, n)), np.full(m.inner_dim, z), np.full(m.n_heads, dt))
    padded = [np.pad(part, (0, -part.size % PANEL_ROWS), constant_values=1) for part in parts]
    return np.concatenate(padded).astype(np.float32)


FUSED = {
    "in": FusedTensors(("mamba_xbc", "mamba_z", "mamba_dt")), "conv": FusedTensors(("conv",), is_table=True),
    "rates": FusedTensors(("rate", "dt", "skip")), "mamba_norm": FusedTensors(("mamba_norm",), is_table=True),
}  # fmt: skip
MAMBA2 = Block(shapes, FUSED, program, buffers)


# Mamba-2 next to attention: both read the same norm of x, and x gets the sum of their outputs


def parallel_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the tensors of attention and Mamba-2 in one layer, by name."""
    return ATTENTION.shapes(config) | shapes(config)


def parallel_program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the program of x += wo attention(rmsnorm(x)) + out mamba2(rmsnorm(x)) in layer i; both read x unchanged."""
    *phases, last = program(config, weights, b, i)
    return [*phases, *ATTENTION.program(config, weights, b, i), last]


PARALLEL_MAMBA2 = Block(parallel_shapes, {**ATTENTION.fused, **FUSED}, parallel_program, buffers)
