"""LFM2 (Liquid AI 2025, arXiv:2511.23404): short convolutions in most layers, attention in the others; its tensors and its pass.

A tensor that only some layers have is called by the layer's number: "2.wq".
"""

from ..kernels import MAX_TOKENS
from ..machine.programs import Program
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import round_up
from . import llama
from .config import Config, ConvConfig
from .plan import Architecture, Buffer, Buffers, Layers, Part, Room, Vector, Weights
from .states import N_STATES, NO_BIAS, gated_convolution, ring

OF_ATTENTION = ("wq", "wk", "wv", "wo", "q_norm", "k_norm")
INPUTS = ("conv_b", "conv_c", "conv_x")  # products: what the convolution sees is the first times the third


def conv_of(config: Config) -> ConvConfig:
    """The numbers of the convolutions, which `Config.flaw` has asked for."""
    assert config.conv is not None
    return config.conv


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Llama's, of attention where there is one; elsewhere the products in front of a convolution and behind it, and its taps."""
    conv, dim, tensors = conv_of(config), config.dim, llama.shapes(config)
    attention = {name: tensors.pop(name)[1:] for name in OF_ATTENTION if name in tensors}
    convolution: dict[str, tuple[int, ...]] = dict.fromkeys((*INPUTS, "conv_out"), (dim, dim))
    convolution["conv"] = conv.n_taps, dim
    if conv.bias:
        convolution |= {f"{name}_bias": (dim,) for name in [*convolution]}
    return tensors | {
        f"{i}.{name}": shape
        for i in range(config.n_layers)
        for name, shape in (convolution if i in conv.layers else attention).items()
    }


def parts(config: Config) -> dict[str, Part]:
    """Llama's; the products in front of a convolution are one, strip by strip."""
    dim, matrices = config.dim, llama.parts(config)
    for i in conv_of(config).layers:
        del matrices[f"{i}.qkv"]
        matrices[f"{i}.in"] = Part(tuple((f"{i}.{name}", None) for name in INPUTS), (dim, dim, dim), dim, turns=3)
        matrices[f"{i}.wo"] = Part(((f"{i}.conv_out", None),), (dim,), dim)
    return {name: part._replace(tensors=_of_some(part.tensors)) for name, part in matrices.items()}


def vectors(config: Config) -> dict[str, Vector]:
    """Llama's, and those of convolutions, their biases as their products lie."""
    conv, dim, own = conv_of(config), config.dim, llama.vectors(config)
    for i in conv.layers:
        for name in ("q_norm", "k_norm"):
            own.pop(f"{i}.{name}", None)
        own[f"{i}.conv"] = Vector(((f"{i}.conv", None),), (dim,), n_rows=conv.n_taps)
        if conv.bias:
            own[f"{i}.bin"] = Vector(tuple((f"{i}.{name}_bias", None) for name in INPUTS), (dim, dim, dim), in_turns=True)
            own[f"{i}.conv_bias"] = Vector(((f"{i}.conv_bias", None),), (dim,))
            own[f"{i}.bo"] = Vector(((f"{i}.conv_out_bias", None),), (dim,))
    return {name: vector._replace(tensors=_of_some(vector.tensors)) for name, vector in own.items()}


def _of_some(tensors: tuple[tuple[str, int | None], ...]) -> tuple[tuple[str, int | None], ...]:
    """Where those of attention have their layer in their name."""
    return tuple((f"{layer}.{name}", None) if name in OF_ATTENTION else (name, layer) for name, layer in tensors)


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's, and of convolutions: projected (T, 3 D padded): products; inputs (L, N, D padded): a `ring` of each layer's;
    gated (1, T, D padded): what they hand on.
    """
    conv, padded = conv_of(config), round_up(config.dim, STRIP_ROWS)
    return llama.buffers(config, weights, room) | {
        "projected": Buffer((MAX_TOKENS, len(INPUTS) * padded), whose="token"),
        "inputs": ring(len(conv.layers), conv.n_taps, padded),
        "gated": Buffer((1, MAX_TOKENS, padded), whose="token"),
    }


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """As llama's; in the place of attention, in some layers: x += wo (c * conv(b * x)) of b, c, x = in rmsnorm(x)."""
    convolutions, w, v = conv_of(config).layers, weights.matrices, weights.vectors
    caches = [i for i in range(config.n_layers) if i not in convolutions]
    of_attention = Buffers(
        **vars(b) | {name: {i: getattr(b, name)[place] for place, i in enumerate(caches)} for name in ("keys", "values")}
    )

    def convolution(i: int) -> Program:
        inputs, weight, bias = b.inputs[convolutions.index(i)], v[f"{i}.conv"], v.get(f"{i}.conv_bias", NO_BIAS)
        return [
            [
                llama.norm(config, weights, b, f"{i}.rms_att"),
                w[f"{i}.in"].product(b.projected, b.normed, b.scratch, unit=len(INPUTS)),
                *llama.biased(weights, b.projected, f"{i}.bin", len(INPUTS)),
                gated_convolution(b.gated, b.projected, inputs, weight, bias),
            ],
            [w[f"{i}.wo"].product(b.x[0], b.gated, b.scratch, adding=True), *llama.biased(weights, b.x[0], f"{i}.bo")],
            *llama.mlp(config, weights, b, i),
        ]

    def layer(i: int) -> Program:
        if i in convolutions:
            return convolution(i)
        return llama.layer(config, weights, of_attention, i, b.normed, [llama.norm(config, weights, b, f"{i}.rms_att")])

    layers = [layer(i) for i in range(config.n_layers)]
    return Layers(llama.embed(config, weights, b), layers, llama.classify(config, weights, b))


LFM2 = Architecture(shapes, parts, vectors, buffers, program, llama.fill, n_states=N_STATES)
