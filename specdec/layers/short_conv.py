"""Short convolution block, which replaces attention (LFM2: Liquid AI 2025, arXiv:2511.23404).

Shapes: T tokens of this pass, L layers, N slots of a ring, D dim.
"""

from specdec.kernels import MAX_BATCH_TOKENS
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.attention import NORM
from specdec.layers.block import NO_BIAS, Block, add_residual, make_bias_ops, norm_shapes, prepare_input
from specdec.layers.recurrent_ops import gated_convolution, make_ring_buffer
from specdec.mixer_config import ShortConvConfig
from specdec.model_config import ModelConfig, require_type
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Program
from specdec.runtime.simd import round_up

PROJECTIONS = ("conv_b", "conv_c", "conv_x")  # matmuls; the convolution's input is the first times the third


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a short convolution block's tensors, by name: matmuls, convolution weights, a norm and any biases."""
    conv, dim = require_type(config.mixer, ShortConvConfig), config.dim
    tensors: Shapes = {"conv": (conv.kernel_size, dim)}
    tensors |= dict.fromkeys((*PROJECTIONS, "conv_out"), (dim, dim))
    return norm_shapes(config, NORM) | tensors | ({f"{name}_bias": (dim,) for name in tensors} if conv.bias else {})


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of short convolution blocks, by name.

    projected (T, 3 D padded): output of the matmuls.
    inputs (L, N, D padded): a ring of each layer's inputs (`make_ring_buffer`).
    gated (1, T, D padded): output of the convolutions.
    """
    layers, padded = config.find_mixer_layers(ShortConvConfig), round_up(config.dim, PANEL_ROWS)
    return {
        "projected": BufferSpec((MAX_BATCH_TOKENS, len(PROJECTIONS) * padded), scope="token"),
        "inputs": make_ring_buffer(
            len(layers), require_type(config.layer_config(layers[0]).mixer, ShortConvConfig).kernel_size, padded
        ),
        "gated": BufferSpec((1, MAX_BATCH_TOKENS, padded), scope="token"),
    }


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the block's program in layer i: x += out (c * conv(b * y)), where b, c, y = in rmsnorm(x)."""
    w, v, (source, before) = weights.matrices, weights.vectors, prepare_input(config, weights, b, f"{i}.{NORM}")
    bias = v.get(f"{i}.conv_bias", NO_BIAS)
    phase = [
        *before,
        w[f"{i}.in"].matmul(b.projected, source, b.scratch, unit=len(PROJECTIONS)),
        *make_bias_ops(weights, b.projected, f"{i}.bin", len(PROJECTIONS)),
        gated_convolution(b.gated, b.projected, b.inputs, v[f"{i}.conv"], bias),
    ]
    return [phase, *add_residual(config, weights, b, w[f"{i}.wo"], b.gated, f"{i}.bo", f"{i}.{NORM}")]


FUSED = {
    "in": FusedTensors(PROJECTIONS, interleaved=True), "wo": FusedTensors(("conv_out",)),
    "conv": FusedTensors(("conv",), is_table=True),
    "bin": FusedTensors(tuple(f"{name}_bias" for name in PROJECTIONS), interleaved=True), "bo": FusedTensors(("conv_out_bias",)),
}  # fmt: skip
SHORT_CONV = Block(shapes, FUSED, program, buffers)
