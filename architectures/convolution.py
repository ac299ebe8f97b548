"""A block of a short convolution, in the place of attention (LFM2: Liquid AI 2025, arXiv:2511.23404)."""

from ..kernels import MAX_TOKENS
from ..machine.programs import Program
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import round_up
from .attention import NORM
from .blocks import Block, Shapes, added, biased, norm_shapes, norm_vectors, taken
from .config import Config, ConvConfig
from .plan import Buffer, Buffers, Part, Room, Vector, Weights
from .states import N_STATES, NO_BIAS, gated_convolution, ring

INPUTS = ("conv_b", "conv_c", "conv_x")  # products: what the convolution sees is the first times the third


def conv_of(config: Config) -> ConvConfig:
    """The numbers of a layer's convolution."""
    assert isinstance(config.mixer, ConvConfig)
    return config.mixer


def shapes(config: Config) -> Shapes:
    """The products in front of a convolution and behind it, and its taps."""
    conv, dim = conv_of(config), config.dim
    tensors: Shapes = {"conv": (conv.n_taps, dim)}
    tensors |= dict.fromkeys((*INPUTS, "conv_out"), (dim, dim))
    return norm_shapes(config, NORM) | tensors | ({f"{name}_bias": (dim,) for name in tensors} if conv.bias else {})


def parts(config: Config, i: int) -> dict[str, Part]:
    """The products in front are one, strip by strip."""
    dim = config.dim
    return {
        f"{i}.in": Part(tuple((name, i) for name in INPUTS), (dim, dim, dim), dim, turns=3),
        f"{i}.wo": Part((("conv_out", i),), (dim,), dim),
    }


def vectors(config: Config, i: int) -> dict[str, Vector]:
    """Norm and taps, and the biases as their products lie."""
    conv, dim = conv_of(config), config.dim
    own = norm_vectors(config, i, NORM) | {f"{i}.conv": Vector((("conv", i),), (dim,), n_rows=conv.n_taps)}
    if conv.bias:
        own[f"{i}.bin"] = Vector(tuple((f"{name}_bias", i) for name in INPUTS), (dim, dim, dim), in_turns=True)
        own |= {f"{i}.conv_bias": Vector((("conv_bias", i),), (dim,)), f"{i}.bo": Vector((("conv_out_bias", i),), (dim,))}
    return own


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """projected (T, 3 D padded): products; inputs (L, N, D padded): a `ring` of each layer's; gated (1, T, D padded): what they
    hand on.
    """
    layers, padded = config.mixing(ConvConfig), round_up(config.dim, STRIP_ROWS)
    return {
        "projected": Buffer((MAX_TOKENS, len(INPUTS) * padded), whose="token"),
        "inputs": ring(len(layers), conv_of(config.of_layer(layers[0])).n_taps, padded),
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


CONVOLUTION = Block(shapes, parts, vectors, program, buffers, N_STATES)
