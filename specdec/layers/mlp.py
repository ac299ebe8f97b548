"""MLP block with a gate by SiLU or GELU (Shazeer 2020, arXiv:2002.05202)."""

from specdec.layers.activations import geglu, swiglu
from specdec.layers.architecture import Buffers, FusedTensors, Shapes, Weights
from specdec.layers.block import LAYER_SCALE, Block, add_residual, get_layer_scale, make_bias_ops, norm_shapes, prepare_input
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Program

NORM = "rms_ffn"


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of an MLP block's tensors, by llama2.c's names; with biases and a layer scale if the config has them."""
    dim, hidden = config.dim, config.hidden_dim
    biases = {"b1": (hidden,), "b3": (hidden,), "b2": (dim,)} if config.mlp_bias else {}
    scale = {LAYER_SCALE: (1,)} if config.layer_scale else {}
    return norm_shapes(config, NORM) | {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)} | biases | scale


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the MLP block's program in layer i: x += w2 (act(w1 rmsnorm(x)) * w3 rmsnorm(x))."""
    w, (source, before) = weights.matrices, prepare_input(config, weights, b, f"{i}.{NORM}")
    gate = GATED_ACTIVATIONS[config.activation](b.hidden, b.up, 1)
    phase = [*before, w[f"{i}.up"].matmul(b.up, source, b.scratch, unit=2), *make_bias_ops(weights, b.up, f"{i}.b13", 2), gate]
    factor = get_layer_scale(config, weights, i, is_last=not config.per_layer_inputs)
    return [phase, *add_residual(config, weights, b, w[f"{i}.down"], b.hidden, f"{i}.b2", f"{i}.{NORM}", factor)]


GATED_ACTIVATIONS = {"silu": swiglu, "gelu": geglu}
FUSED = {
    "up": FusedTensors(("w1", "w3"), interleaved=True),
    "down": FusedTensors(("w2",)),
    "b13": FusedTensors(("b1", "b3"), interleaved=True),
}
MLP = Block(shapes, FUSED, program)
