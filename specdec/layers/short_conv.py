"""A block of a short convolution, in the place of attention (LFM2: Liquid AI 2025, arXiv:2511.23404)."""

from specdec.config import Config, ConvConfig, known_as
from specdec.kernels import MAX_TOKENS
from specdec.layers.attention import NORM
from specdec.layers.base import Buffer, Buffers, Joined, Room, Shapes, Weights
from specdec.layers.block import Block, added, biased, norm_shapes, taken
from specdec.layers.recurrent import NO_BIAS, gated_convolution, ring
from specdec.runtime.program import Program
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

INPUTS = ("conv_b", "conv_c", "conv_x")  # products: what the convolution sees is the first times the third


def shapes(config: Config) -> Shapes:
    """The products in front of a convolution and behind it, and its taps."""
    conv, dim = known_as(config.mixer, ConvConfig), config.dim
    tensors: Shapes = {"conv": (conv.n_taps, dim)}
    tensors |= dict.fromkeys((*INPUTS, "conv_out"), (dim, dim))
    return norm_shapes(config, NORM) | tensors | ({f"{name}_bias": (dim,) for name in tensors} if conv.bias else {})


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """projected (T, 3 D padded): products; inputs (L, N, D padded): a `ring` of each layer's; gated (1, T, D padded): what they
    hand on.
    """
    layers, padded = config.mixing(ConvConfig), round_up(config.dim, STRIP_ROWS)
    return {
        "projected": Buffer((MAX_TOKENS, len(INPUTS) * padded), whose="token"),
        "inputs": ring(len(layers), known_as(config.of_layer(layers[0]).mixer, ConvConfig).n_taps, padded),
        "gated": Buffer((1, MAX_TOKENS, padded), whose="token"),
    }


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += out (c * conv(b * x)) of b, c, x = in rmsnorm(x)."""
    w, v, (source, before) = weights.matrices, weights.vectors, taken(config, weights, b, f"{i}.{NORM}")
    bias = v.get(f"{i}.conv_bias", NO_BIAS)
    first = [
        *before,
        w[f"{i}.in"].product(b.projected, source, b.scratch, unit=len(INPUTS)),
        *biased(weights, b.projected, f"{i}.bin", len(INPUTS)),
        gated_convolution(b.gated, b.projected, b.inputs, v[f"{i}.conv"], bias),
    ]
    return [first, *added(config, weights, b, w[f"{i}.wo"], b.gated, f"{i}.bo", f"{i}.{NORM}")]


JOINED = {
    "in": Joined(INPUTS, in_turns=True), "wo": Joined(("conv_out",)), "conv": Joined(("conv",), is_table=True),
    "bin": Joined(tuple(f"{name}_bias" for name in INPUTS), in_turns=True), "bo": Joined(("conv_out_bias",)),
}  # fmt: skip
CONVOLUTION = Block(shapes, JOINED, program, buffers)
