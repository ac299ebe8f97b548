"""A block of an MLP that is gated (Shazeer 2020, arXiv:2002.05202), by SiLU or by GELU."""

from specdec.config import Config
from specdec.layers.activations import geglu, swiglu
from specdec.layers.base import Buffers, Joined, Shapes, Weights
from specdec.layers.block import LAYER_SCALE, Block, added, biased, factor_of, norm_shapes, taken
from specdec.runtime.program import Program

NORM = "rms_ffn"


def shapes(config: Config) -> Shapes:
    """By llama2.c's names; biases where the config says so."""
    dim, hidden = config.dim, config.hidden_dim
    biases = {"b1": (hidden,), "b3": (hidden,), "b2": (dim,)} if config.mlp_bias else {}
    scale = {LAYER_SCALE: (1,)} if config.layer_scale else {}
    return norm_shapes(config, NORM) | {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)} | biases | scale


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += w2 (act(w1 rmsnorm(x)) * w3 rmsnorm(x))."""
    w, (source, before) = weights.matrices, taken(config, weights, b, f"{i}.{NORM}")
    gate = GATES[config.activation](b.hidden, b.up, 1)
    first = [*before, w[f"{i}.up"].product(b.up, source, b.scratch, unit=2), *biased(weights, b.up, f"{i}.b13", 2), gate]
    factor = factor_of(config, weights, i, is_last=not config.inputs)
    return [first, *added(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", f"{i}.{NORM}", factor)]


GATES = {"silu": swiglu, "gelu": geglu}
JOINED = {"up": Joined(("w1", "w3"), in_turns=True), "down": Joined(("w2",)), "b13": Joined(("b1", "b3"), in_turns=True)}
MLP = Block(shapes, JOINED, program)
