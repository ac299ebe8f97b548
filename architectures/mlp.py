"""A block of an MLP that is gated (Shazeer 2020, arXiv:2002.05202), by SiLU or by GELU."""

from ..machine.programs import Program
from .blocks import LAYER_SCALE, Block, Shapes, added, biased, factor_of, norm_shapes, norm_vectors, taken
from .config import Config
from .gates import geglu, swiglu
from .plan import Buffers, Part, Vector, Weights

NORM = "rms_ffn"


def shapes(config: Config) -> Shapes:
    """By llama2.c's names; biases where the config says so."""
    dim, hidden = config.dim, config.hidden_dim
    biases = {"b1": (hidden,), "b3": (hidden,), "b2": (dim,)} if config.mlp_bias else {}
    scale = {LAYER_SCALE: (1,)} if config.layer_scale else {}
    return norm_shapes(config, NORM) | {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)} | biases | scale


def parts(config: Config, i: int) -> dict[str, Part]:
    """w1 and w3 are one product, strip by strip."""
    dim, hidden = config.dim, config.hidden_dim
    return {
        f"{i}.up": Part((("w1", i), ("w3", i)), (hidden, hidden), dim, turns=2),
        f"{i}.down": Part((("w2", i),), (dim,), hidden),
    }


def vectors(config: Config, i: int) -> dict[str, Vector]:
    """The norms, and the biases as their products lie."""
    own, hidden = norm_vectors(config, i, NORM), config.hidden_dim
    if config.layer_scale:
        own[f"{i}.{LAYER_SCALE}"] = Vector(((LAYER_SCALE, i),), (1,))
    if config.mlp_bias:
        own[f"{i}.b13"] = Vector((("b1", i), ("b3", i)), (hidden, hidden), in_turns=True)
        own[f"{i}.b2"] = Vector((("b2", i),), (config.dim,))
    return own


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += w2 (act(w1 rmsnorm(x)) * w3 rmsnorm(x))."""
    w, (source, before) = weights.matrices, taken(config, weights, b, f"{i}.{NORM}")
    gate = GATES[config.activation](b.hidden, b.up, 1)
    first = [*before, w[f"{i}.up"].product(b.up, source, b.scratch, unit=2), *biased(weights, b.up, f"{i}.b13", 2), gate]
    factor = factor_of(config, weights, i, is_last=not config.inputs)
    return [first, *added(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", f"{i}.{NORM}", factor)]


GATES = {"silu": swiglu, "gelu": geglu}
MLP = Block(shapes, parts, vectors, program)
