"""Per-layer inputs: what each layer reads of a token next to the residual stream (Gemma 3n and 4: Gemma Team 2025, 2026).

A token's per-layer inputs are a row of a table, which stays in its file, plus a matmul of the token's embedding, for all layers
at once. Each layer multiplies its share by a gate, the GELU of a matmul of x.

Shapes: T tokens of this pass, L layers, D dim, P numbers per layer.
"""

from typing import ClassVar

import numpy as np

from specdec.kernels import head_norm
from specdec.layers.activations import combine_per_layer_inputs, gate_per_layer_inputs
from specdec.layers.block import Block, get_panels_per_unit
from specdec.layers.buffers import Allocator, Buffers, pad
from specdec.layers.weights import TOKEN_TABLE, FusedNames, FusedTensors, Shapes, Weights
from specdec.model_config import ModelConfig, PerLayerInputsConfig, require_type
from specdec.runtime.op_program import Program
from specdec.runtime.simd import Float32

GATE, PROJECTION = "inputs_gate", "inputs_back"


class PerLayerInputs(Block):
    """Per-layer inputs: x = factor (x + norm(back (gelu(gate x) * inputs)))."""

    norm_name = "inputs"
    fused: ClassVar[FusedNames] = {f"{norm_name}_out": FusedTensors(("inputs_norm",))}

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name: the gate (P, D), the projection back (D, P), and the norm behind it (D,)."""
        n, dim = get_inputs_config(config).dim, config.dim
        return {GATE: (n, dim), PROJECTION: (dim, n), "inputs_norm": (dim,)}

    def ops(self) -> Program:
        """Return the block's program."""
        n, b = get_inputs_config(self.config).dim, self.b
        gates, gated = self.new.rows(pad(n)), self.new.rows(pad(n), 1)
        gate = gate_per_layer_inputs(gated, gates, b.layer_inputs, self.i * n, n)
        phase = [self.matrix(GATE).matmul(gates, b.x, b.scratch), gate]
        return [phase, *self.add_residual(PROJECTION, gated, factor=self.get_layer_scale())]


def get_inputs_config(config: ModelConfig) -> PerLayerInputsConfig:
    """Return config.per_layer_inputs, which must be set."""
    return require_type(config.per_layer_inputs, PerLayerInputsConfig)


def global_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the tensors that all layers share.

    They are the table (rows, L P), the embedding's matrix (L P, D), and the norm (P,) of each layer's share of its output.
    """
    n, n_rows = get_inputs_config(config).dim, get_inputs_config(config).vocab_size
    width = config.n_layers * n
    return {TOKEN_TABLE: (n_rows, width), "inputs": (width, config.dim), "inputs_norm_in": (n,)}


def make_layer_inputs(config: ModelConfig, new: Allocator) -> tuple[Float32, Float32]:
    """Return the arrays of the tokens' rows of the table, and of the per-layer inputs."""
    width = config.n_layers * get_inputs_config(config).dim
    return new.rows(width), new.rows(pad(width))


def make_embedding_program(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program of inputs = (norm(in x / sqrt(D)) + sqrt(P) rows) / sqrt(2), for all layers at once.

    The norm is taken over each layer's share separately.
    """
    n, eps = get_inputs_config(config).dim, config.norm_eps * config.dim  # eps of the norm, because x is not divided by sqrt(D)
    unit = get_panels_per_unit(n, [config.n_layers * n])
    row_scale, scale = float(np.sqrt(np.float32(n))), float(np.float32(0.5**0.5))
    inputs = b.layer_inputs
    assert inputs is not None
    return [
        [
            weights.matrices["inputs"].matmul(inputs, b.x, b.scratch, unit=unit),
            head_norm(inputs, unit, 0, config.n_layers, n, weights.vectors["inputs_norm_in"], eps),
            combine_per_layer_inputs(inputs, b.token_rows, unit, row_scale, scale),
        ]
    ]
