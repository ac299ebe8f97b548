"""MLP block with a gate by SiLU or GELU (Shazeer 2020, arXiv:2002.05202), or without a gate."""

from typing import ClassVar

from specdec.layers.activations import gated_relu2, geglu, gelu, relu2, swiglu, xielu
from specdec.layers.block import LAYER_SCALE, Block, make_scale_ops, norm_shapes
from specdec.layers.buffers import pad
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.model_config import ModelConfig
from specdec.runtime.op_program import Op, Program
from specdec.runtime.simd import PANEL_ROWS, Float32

XIELU = "xielu"  # an activation with numbers of its own in each layer
XIELU_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
GATED_ACTIVATIONS = {"silu": swiglu, "gelu": geglu, "gated_relu2": gated_relu2}
UNGATED_ACTIVATIONS = {"relu2": relu2, "ungated_gelu": gelu}
SUB_NORM = "ffn_sub_norm"


class MLP(Block):
    """MLP: x += w2 (act(w1 rmsnorm(x)) * w3 rmsnorm(x)), or without a gate."""

    norm_name = "rms_ffn"
    fused: ClassVar[FusedNames] = {
        "up": FusedTensors(("w1", "w3"), interleaved=True),
        "down": FusedTensors(("w2",)),
        "b13": FusedTensors(("b1", "b3"), interleaved=True),
        XIELU: FusedTensors(XIELU_NUMBERS),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by llama2.c's names; those of gate, biases and activation if the config has them."""
        dim, hidden = config.dim, config.hidden_dim
        tensors: Shapes = {"w1": (hidden, dim), "w2": (dim, hidden)}
        biases: Shapes = {"b1": (hidden,), "b2": (dim,)}
        if is_gated(config):
            tensors["w3"] = (hidden, dim)
            biases["b3"] = (hidden,)
        if config.activation == XIELU:
            tensors |= dict.fromkeys(XIELU_NUMBERS, (1,))
        if config.mlp_bias:
            tensors |= biases
        if config.layer_scale:
            tensors[LAYER_SCALE] = (1,)
        if config.sub_norms:
            tensors[SUB_NORM] = (hidden,)
        return norm_shapes(config, cls.norm_name) | tensors

    def ops(self) -> Program:
        """Return the block's program."""
        config, (source, before) = self.config, self.prepare_input()
        unit, n_panels = 1 + is_gated(config), pad(config.hidden_dim) // PANEL_ROWS
        up, hidden = self.make_rows("up"), self.new.rows(pad(config.hidden_dim), 1)
        phase = [*before, self.matrix("up").matmul(up, source, self.b.scratch, unit=unit), *self.make_bias_ops(up, "b13", unit)]
        phase += make_scale_ops(up, config.mlp_scales * n_panels, (PANEL_ROWS, PANEL_ROWS) * n_panels, unit)
        if config.activation == XIELU:
            phase.append(xielu(hidden, up, self.vector(XIELU), config.hidden_dim))
        else:
            phase.append(activate(config, hidden, up))
        if config.sub_norms:
            return [phase, *self.add_normed_residual("down", hidden, SUB_NORM, config.hidden_dim)]
        return [phase, *self.add_residual("down", hidden, "b2", self.get_layer_scale(not config.per_layer_inputs))]


def is_gated(config: ModelConfig) -> bool:
    """Return whether MLPs and experts multiply the activation by another matmul of the input."""
    return config.activation in GATED_ACTIVATIONS


def activate(config: ModelConfig, hidden: Float32, up: Float32, per_token: int = 1) -> Op:
    """Return the op of hidden[t] = act(w1 x) * (w3 x), or act(w1 x) without a gate, for each of T per_token rows of `up`."""
    return (GATED_ACTIVATIONS | UNGATED_ACTIVATIONS)[config.activation](hidden, up, per_token)
