"""What each layer takes of a token beside the residual stream (Gemma 3n and 4: Gemma Team 2025, 2026): tensors, program.

Of a token it is a row of a table, which stays where it lies, and a product of the embedding, for all layers at once; each layer
gates its share by a product of x.
"""

import math

import numpy as np

from specdec.config import Config, InputsConfig, known_as
from specdec.kernels import MAX_TOKENS, head_norm
from specdec.layers.activations import gate_inputs, mix_inputs
from specdec.layers.base import Buffer, Buffers, Joined, Room, Shapes, Weights
from specdec.layers.block import Block, added, factor_of
from specdec.quant.matrix import n_strips
from specdec.runtime.program import Program
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS

NORM, GATE, BACK, ROWS = "inputs", "inputs_gate", "inputs_back", "input_rows"


def inputs_of(config: Config) -> InputsConfig:
    """Their numbers."""
    return known_as(config.inputs, InputsConfig)


def shapes(config: Config) -> Shapes:
    """Of one layer: the gate's product (P, D), what brings its outcome back (D, P), and the norm behind that."""
    n, dim = inputs_of(config).dim, config.dim
    return {GATE: (n, dim), BACK: (dim, n), "inputs_norm": (dim,)}


def outer_shapes(config: Config) -> Shapes:
    """Of all layers at once: the table (rows, L P), the embedding's product (L P, D), and the norm of each layer's share (P,)."""
    n, n_rows = inputs_of(config).dim, inputs_of(config).n_rows
    width = config.n_layers * n
    return {ROWS: (n_rows, width), "inputs": (width, config.dim), "inputs_norm_in": (n,)}


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """input_rows (T, L P): what a pass's tokens have in the table; layer_inputs (T, L P padded): the embedding's product, then
    what layers take; input_gates (T, P padded), gated_inputs (1, T, P padded): a layer's.
    """
    n, width = round_up(inputs_of(config).dim, STRIP_ROWS), config.n_layers * inputs_of(config).dim
    return {
        ROWS: Buffer((MAX_TOKENS, width), whose="token"),
        "layer_inputs": Buffer((MAX_TOKENS, round_up(width, STRIP_ROWS)), whose="token"),
        "input_gates": Buffer((MAX_TOKENS, n), whose="token"),
        "gated_inputs": Buffer((1, MAX_TOKENS, n), whose="token"),
    }


def first_program(config: Config, weights: Weights, b: Buffers) -> Program:
    """inputs = (norm(in x / sqrt(D)) + sqrt(P) rows) / sqrt(2) of x, the embedding; each layer's share is normed by itself."""
    n, eps = inputs_of(config).dim, config.norm_eps * config.dim  # a norm's eps, of what is not divided
    unit = n // math.gcd(n, STRIP_ROWS)
    strips = n_strips(config.n_layers * n)
    unit = unit if strips % unit == 0 else strips
    of_rows, of_all = float(np.sqrt(np.float32(n))), float(np.float32(0.5**0.5))
    return [
        [
            weights.matrices["inputs"].product(b.layer_inputs, b.x, b.scratch, unit=unit),
            head_norm(b.layer_inputs, unit, 0, config.n_layers, n, weights.vectors["inputs_norm_in"], eps),
            mix_inputs(b.layer_inputs, b.input_rows, unit, of_rows, of_all),
        ]
    ]


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x = factor (x + norm(back (gelu(gate x) * inputs)))."""
    w, n = weights.matrices, inputs_of(config).dim
    gated = gate_inputs(b.gated_inputs, b.input_gates, b.layer_inputs, i * n, n)
    first = [w[f"{i}.{GATE}"].product(b.input_gates, b.x, b.scratch), gated]
    factor = factor_of(config, weights, i)
    return [first, *added(config, weights, b, w[f"{i}.{BACK}"], b.gated_inputs, "", f"{i}.{NORM}", factor)]


INPUTS = Block(shapes, {f"{NORM}_out": Joined(("inputs_norm",))}, program, buffers)
