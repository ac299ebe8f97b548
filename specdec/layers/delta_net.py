"""A block of a gated delta net, in the place of attention (Yang et al. 2025, arXiv:2412.06464; Qwen3.5: Qwen Team 2026)."""

import numpy as np

from specdec.config import Config, DeltaConfig, known_as
from specdec.kernels import MAX_TOKENS
from specdec.layers.attention import NORM
from specdec.layers.base import Buffer, Buffers, Joined, Room, Shapes, Weights
from specdec.layers.block import Block, added, norm_shapes, scratches, taken
from specdec.layers.recurrent import N_KEPT, NO_BIAS, convolve, delta_net, ring
from specdec.runtime.program import Program
from specdec.runtime.simd import round_up
from specdec.runtime.tile import STRIP_ROWS


def shapes(config: Config) -> Shapes:
    """qkv and z, b and a (projections), conv (taps, channels), rate (what the decay's logarithm is multiplied by, negative), dt
    (what is added to a) and the norm of heads."""
    d, dim = known_as(config.mixer, DeltaConfig), config.dim
    return norm_shapes(config, NORM) | {
        "delta_qkv": (d.n_mixed, dim), "delta_z": (d.n_values, dim), "delta_b": (d.n_value_heads, dim),
        "delta_a": (d.n_value_heads, dim), "delta_out": (dim, d.n_values), "conv": (d.n_taps, d.n_mixed),
        "rate": (d.n_value_heads,), "dt": (d.n_value_heads,), "delta_norm": (d.value_dim,),
    }  # fmt: skip


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Of L layers: projected (T, columns): products; inputs (L, N, channels) of convolutions; mixed_values (1, T, values padded):
    what they hand on; and of each what `DeltaNet` says.
    """
    layers = config.mixing(DeltaConfig)
    d, n = known_as(config.of_layer(layers[0]).mixer, DeltaConfig), len(layers)
    width = round_up(d.value_dim, STRIP_ROWS)
    columns = [matrix.whole_rows for name, matrix in weights.matrices.items() if name.endswith(".in")]
    strips = d.n_value_heads * (width // STRIP_ROWS)
    return {
        "mixed_values": Buffer((1, MAX_TOKENS, round_up(d.n_values, STRIP_ROWS)), whose="token"),
        "projected": Buffer((MAX_TOKENS, max(columns, default=0)), whose="token"),
        "inputs": ring(n, d.n_taps, round_up(d.n_mixed, STRIP_ROWS)),
        "states": Buffer((n, 2, strips, d.key_dim, STRIP_ROWS), whose="cache"),
        "lengths": Buffer((n, d.n_value_heads, 2), np.int64, "text"),
        "delta_keys": Buffer((n, d.n_value_heads, N_KEPT, d.key_dim), whose="cache"),
        "deltas": Buffer((n, d.n_value_heads, N_KEPT, width), whose="cache"),
        "decays": Buffer((n, d.n_value_heads, N_KEPT), whose="text"),
        "delta_scratch": Buffer((room.n_threads, MAX_TOKENS, 2 * d.key_dim + width)),
        "guess": Buffer((room.n_threads, d.key_dim, STRIP_ROWS)),
    }


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += out delta_net(conv(in rmsnorm(x)))."""
    d, w, v = known_as(config.mixer, DeltaConfig), weights.matrices, weights.vectors
    source, before = taken(config, weights, b, f"{i}.{NORM}")
    product = weights.product(f"{i}.in", b.projected, source, scratches(b))
    own = b.states, b.lengths, b.delta_keys, b.deltas, b.decays
    numbers = config.norm_eps, d.value_dim, d.n_key_heads, d.in_turns
    given = b.delta_scratch, b.guess, v[f"{i}.rates"], v[f"{i}.delta_norm"]
    return [
        [*before, *product, convolve(b.projected, 1, 0, b.inputs, v[f"{i}.conv"], NO_BIAS)],
        [delta_net(b.mixed_values, b.projected, *own, *given, *numbers)._replace(work=b.states.nbytes)],
        *added(config, weights, b, w[f"{i}.wo"], b.mixed_values, "", f"{i}.{NORM}"),
    ]


JOINED = {
    "in": Joined(("delta_qkv", "delta_z", "delta_b", "delta_a")), "wo": Joined(("delta_out",)),
    "conv": Joined(("conv",), is_table=True), "rates": Joined(("rate", "dt")),
}  # fmt: skip
DELTA = Block(shapes, JOINED, program, buffers)
