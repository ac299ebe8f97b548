"""MLP block with a gate by SiLU or GELU (Shazeer 2020, arXiv:2002.05202), or without a gate."""

from specdec.layers.activations import geglu, relu2, swiglu, xielu
from specdec.layers.architecture import Buffers, FusedTensors, Shapes, Weights
from specdec.layers.block import (
    LAYER_SCALE,
    Block,
    add_residual,
    get_layer_scale,
    make_bias_ops,
    make_scale_ops,
    norm_shapes,
    prepare_input,
)
from specdec.model_config import ModelConfig
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import Float32, round_up

NORM = "rms_ffn"
XIELU, XIELU_NUMBERS = "xielu", ("alpha_p", "alpha_n", "beta", "eps")  # an activation with numbers of its own in each layer


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of an MLP block's tensors, by llama2.c's names; those of gate, biases and activation if it has them."""
    dim, hidden, gated = config.dim, config.hidden_dim, is_gated(config)
    weights = {"w1": (hidden, dim), "w2": (dim, hidden)} | ({"w3": (hidden, dim)} if gated else {})
    biases = {"b1": (hidden,), "b2": (dim,)} | ({"b3": (hidden,)} if gated else {})
    scale = {LAYER_SCALE: (1,)} if config.layer_scale else {}
    numbers = dict.fromkeys(XIELU_NUMBERS, (1,)) if config.activation == XIELU else {}
    return norm_shapes(config, NORM) | weights | numbers | (biases if config.mlp_bias else {}) | scale


def is_gated(config: ModelConfig) -> bool:
    """Return whether MLPs and experts multiply the activation by another matmul of the input."""
    return config.activation in GATED_ACTIVATIONS


def activate(config: ModelConfig, hidden: Float32, up: Float32, per_token: int = 1) -> Op:
    """Return the op of hidden[t] = act(w1 x) * (w3 x), or act(w1 x) without a gate, for each of T per_token rows of `up`."""
    return (GATED_ACTIVATIONS | ACTIVATIONS)[config.activation](hidden, up, per_token)


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the MLP block's program in layer i: x += w2 (act(w1 rmsnorm(x)) * w3 rmsnorm(x)), or without a gate."""
    w, (source, before) = weights.matrices, prepare_input(config, weights, b, f"{i}.{NORM}")
    unit = 1 + is_gated(config)
    phase = [*before, w[f"{i}.up"].matmul(b.up, source, b.scratch, unit=unit), *make_bias_ops(weights, b.up, f"{i}.b13", unit)]
    n_panels = round_up(config.hidden_dim, PANEL_ROWS) // PANEL_ROWS
    phase += make_scale_ops(b.up, config.mlp_scales * n_panels, (PANEL_ROWS, PANEL_ROWS) * n_panels, unit)
    if config.activation == XIELU:
        phase.append(xielu(b.hidden, b.up, weights.vectors[f"{i}.{XIELU}"], config.hidden_dim))
    else:
        phase.append(activate(config, b.hidden, b.up))
    factor = get_layer_scale(config, weights, i, is_last=not config.per_layer_inputs)
    return [phase, *add_residual(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", f"{i}.{NORM}", factor)]


GATED_ACTIVATIONS, ACTIVATIONS = {"silu": swiglu, "gelu": geglu}, {"relu2": relu2}
FUSED = {
    "up": FusedTensors(("w1", "w3"), interleaved=True),
    "down": FusedTensors(("w2",)),
    "b13": FusedTensors(("b1", "b3"), interleaved=True),
    XIELU: FusedTensors(XIELU_NUMBERS),
}
MLP = Block(shapes, FUSED, program)
