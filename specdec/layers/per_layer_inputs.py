"""Per-layer inputs: what each layer reads of a token next to the residual stream (Gemma 3n and 4: Gemma Team 2025, 2026).

A token's per-layer inputs are a row of a table, which stays in its file, plus a matmul of the token's embedding, for all layers
at once. Each layer multiplies its share by a gate, the GELU of a matmul of x.

Shapes: T tokens of this pass, L layers, D dim, P numbers per layer.
"""

import math

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, head_norm
from specdec.layers.activations import combine_per_layer_inputs, gate_per_layer_inputs
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.block import Block, add_residual, get_layer_scale
from specdec.model_config import ModelConfig, PerLayerInputsConfig, require_type
from specdec.quant.packed_matrix import count_panels
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Program
from specdec.runtime.simd import round_up

NORM, GATE, PROJECTION, TOKEN_TABLE = "inputs", "inputs_gate", "inputs_back", "input_rows"


def get_inputs_config(config: ModelConfig) -> PerLayerInputsConfig:
    """Return config.per_layer_inputs, which must be set."""
    return require_type(config.per_layer_inputs, PerLayerInputsConfig)


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of one layer's tensors: the gate (P, D), the projection back (D, P), and the norm behind it (D,)."""
    n, dim = get_inputs_config(config).dim, config.dim
    return {GATE: (n, dim), PROJECTION: (dim, n), "inputs_norm": (dim,)}


def global_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the tensors that all layers share.

    They are the table (rows, L P), the embedding's matrix (L P, D), and the norm (P,) of each layer's share of its output.
    """
    n, n_rows = get_inputs_config(config).dim, get_inputs_config(config).vocab_size
    width = config.n_layers * n
    return {TOKEN_TABLE: (n_rows, width), "inputs": (width, config.dim), "inputs_norm_in": (n,)}


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of per-layer inputs, by name.

    input_rows (T, L P): rows of the table.
    layer_inputs (T, L P padded): output of the embedding's matmul, then the layers' inputs.
    input_gates (T, P padded), gated_inputs (1, T, P padded): gates and gated inputs of one layer.
    """
    n, width = round_up(get_inputs_config(config).dim, PANEL_ROWS), config.n_layers * get_inputs_config(config).dim
    return {
        TOKEN_TABLE: BufferSpec((MAX_BATCH_TOKENS, width), scope="token"),
        "layer_inputs": BufferSpec((MAX_BATCH_TOKENS, round_up(width, PANEL_ROWS)), scope="token"),
        "input_gates": BufferSpec((MAX_BATCH_TOKENS, n), scope="token"),
        "gated_inputs": BufferSpec((1, MAX_BATCH_TOKENS, n), scope="token"),
    }


def embedding_program(config: ModelConfig, weights: Weights, b: Buffers) -> Program:
    """Return the program of inputs = (norm(in x / sqrt(D)) + sqrt(P) rows) / sqrt(2), for all layers at once.

    The norm is taken over each layer's share separately.
    """
    n, eps = get_inputs_config(config).dim, config.norm_eps * config.dim  # eps of the norm, because x is not divided by sqrt(D)
    unit = n // math.gcd(n, PANEL_ROWS)
    n_panels = count_panels(config.n_layers * n)
    unit = unit if n_panels % unit == 0 else n_panels
    row_scale, scale = float(np.sqrt(np.float32(n))), float(np.float32(0.5**0.5))
    return [
        [
            weights.matrices["inputs"].matmul(b.layer_inputs, b.x, b.scratch, unit=unit),
            head_norm(b.layer_inputs, unit, 0, config.n_layers, n, weights.vectors["inputs_norm_in"], eps),
            combine_per_layer_inputs(b.layer_inputs, b.input_rows, unit, row_scale, scale),
        ]
    ]


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the block's program in layer i: x = factor (x + norm(back (gelu(gate x) * inputs)))."""
    w, n = weights.matrices, get_inputs_config(config).dim
    gate = gate_per_layer_inputs(b.gated_inputs, b.input_gates, b.layer_inputs, i * n, n)
    phase = [w[f"{i}.{GATE}"].matmul(b.input_gates, b.x, b.scratch), gate]
    factor = get_layer_scale(config, weights, i)
    return [phase, *add_residual(config, weights, b, w[f"{i}.{PROJECTION}"], b.gated_inputs, "", f"{i}.{NORM}", factor)]


PER_LAYER_INPUTS = Block(shapes, {f"{NORM}_out": FusedTensors(("inputs_norm",))}, program, buffers)
