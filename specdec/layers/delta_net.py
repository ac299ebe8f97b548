"""Gated delta net block, which replaces attention (Yang et al. 2025, arXiv:2412.06464; Qwen3.5: Qwen Team 2026).

Shapes: T tokens of this pass, L layers, N slots of a ring.
"""

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.attention import NORM
from specdec.layers.block import NO_BIAS, Block, add_residual, get_scratches, norm_shapes, prepare_input
from specdec.layers.recurrent_ops import RING_SLOTS, convolve, delta_net, make_ring_buffer
from specdec.mixer_config import DeltaNetConfig
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Program
from specdec.runtime.simd import round_up


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a delta net block's tensors in one layer, by name.

    delta_qkv, delta_z, delta_b, delta_a: projections. conv (kernel_size, channels). rate: factor of the decay's logarithm,
    negative. dt: bias of a. delta_norm: weights of the norm of heads.
    """
    d, dim = require_type(config.mixer, DeltaNetConfig), config.dim
    return norm_shapes(config, NORM) | {
        "delta_qkv": (d.conv_dim, dim), "delta_z": (d.total_value_dim, dim), "delta_b": (d.n_value_heads, dim),
        "delta_a": (d.n_value_heads, dim), "delta_out": (dim, d.total_value_dim), "conv": (d.kernel_size, d.conv_dim),
        "rate": (d.n_value_heads,), "dt": (d.n_value_heads,), "delta_norm": (d.value_head_dim,),
    }  # fmt: skip


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of delta net blocks, by name; `DeltaNetArgs` describes those not listed here.

    projected (T, columns): output of the matmuls. inputs (L, N, channels): rings of the convolutions' inputs.
    mixed_values (1, T, values padded): output of the layers.
    """
    layers = config.find_mixer_layers(DeltaNetConfig)
    d, n = require_type(config.layer_config(layers[0]).mixer, DeltaNetConfig), len(layers)
    width = round_up(d.value_head_dim, PANEL_ROWS)
    columns = [matrix.n_total_rows for name, matrix in weights.matrices.items() if name.endswith(".in")]
    n_panels = d.n_value_heads * (width // PANEL_ROWS)
    return {
        "mixed_values": BufferSpec((1, MAX_BATCH_TOKENS, round_up(d.total_value_dim, PANEL_ROWS)), scope="token"),
        "projected": BufferSpec((MAX_BATCH_TOKENS, max(columns, default=0)), scope="token"),
        "inputs": make_ring_buffer(n, d.kernel_size, round_up(d.conv_dim, PANEL_ROWS)),
        "states": BufferSpec((n, 2, n_panels, d.key_head_dim, PANEL_ROWS), scope="cache"),
        "lengths": BufferSpec((n, d.n_value_heads, 2), np.int64, "sequence"),
        "delta_keys": BufferSpec((n, d.n_value_heads, RING_SLOTS, d.key_head_dim), scope="cache"),
        "deltas": BufferSpec((n, d.n_value_heads, RING_SLOTS, width), scope="cache"),
        "decays": BufferSpec((n, d.n_value_heads, RING_SLOTS), scope="sequence"),
        "delta_scratch": BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, 2 * d.key_head_dim + width)),
        "draft_state": BufferSpec((sizes.n_threads, d.key_head_dim, PANEL_ROWS)),
    }


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the delta net block's program in layer i: x += out delta_net(conv(in rmsnorm(x)))."""
    d, w, v = require_type(config.mixer, DeltaNetConfig), weights.matrices, weights.vectors
    source, before = prepare_input(config, weights, b, f"{i}.{NORM}")
    matmul = weights.matmul(f"{i}.in", b.projected, source, get_scratches(b))
    state = b.states, b.lengths, b.delta_keys, b.deltas, b.decays
    options = config.norm_eps, d.value_head_dim, d.n_key_heads, d.tiled_heads
    scratch = b.delta_scratch, b.draft_state, v[f"{i}.rates"], v[f"{i}.delta_norm"]
    return [
        [*before, *matmul, convolve(b.projected, 1, 0, b.inputs, v[f"{i}.conv"], NO_BIAS)],
        [delta_net(b.mixed_values, b.projected, *state, *scratch, *options)._replace(bytes_per_token=b.states.nbytes)],
        *add_residual(config, weights, b, w[f"{i}.wo"], b.mixed_values, "", f"{i}.{NORM}"),
    ]


FUSED = {
    "in": FusedTensors(("delta_qkv", "delta_z", "delta_b", "delta_a")), "wo": FusedTensors(("delta_out",)),
    "conv": FusedTensors(("conv",), is_table=True), "rates": FusedTensors(("rate", "dt")),
}  # fmt: skip
DELTA_NET = Block(shapes, FUSED, program, buffers)
