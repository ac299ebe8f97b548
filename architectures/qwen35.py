"""Qwen3.5 (Qwen Team 2026): a gated delta net in most layers, in the others attention that is gated; its tensors and its pass.

A tensor that only some layers have is called by the layer's number: "3.wq".
"""

import numpy as np

from ..kernels import MAX_TOKENS
from ..machine.programs import Program
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import round_up
from . import llama
from .config import Config, DeltaConfig
from .plan import Architecture, Buffer, Buffers, Layers, Part, Room, Vector, Weights
from .states import N_KEPT, N_STATES, NO_BIAS, convolve, delta_net, ring

OF_ATTENTION = ("wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm")


def delta_of(config: Config) -> DeltaConfig:
    """The numbers of the delta net, which `Config.flaw` has asked for."""
    assert config.delta is not None
    return config.delta


def attention_layers(config: Config) -> list[int]:
    """Those that have a KV cache."""
    return [i for i in range(config.n_layers) if i not in delta_of(config).layers]


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Llama's of attention, in the layers that have it; of the others qkv and z, b and a (projections), conv (taps, channels),
    rate (what the decay's logarithm is multiplied by, negative), dt (what is added to a) and the norm of heads."""
    d, tensors = delta_of(config), llama.shapes(config)
    attention = {name: tensors.pop(name)[1:] for name in OF_ATTENTION if name in tensors}
    delta = {
        "delta_qkv": (d.n_mixed, config.dim), "delta_z": (d.n_values, config.dim), "delta_b": (d.n_value_heads, config.dim),
        "delta_a": (d.n_value_heads, config.dim), "delta_out": (config.dim, d.n_values), "conv": (d.n_taps, d.n_mixed),
        "rate": (d.n_value_heads,), "dt": (d.n_value_heads,), "delta_norm": (d.value_dim,),
    }  # fmt: skip
    return tensors | {
        f"{i}.{name}": shape for i in range(config.n_layers) for name, shape in (delta if i in d.layers else attention).items()
    }


def parts(config: Config) -> dict[str, Part]:
    """Llama's; all products of a delta net's input are one."""
    d, matrices = delta_of(config), llama.parts(config)
    for i in d.layers:
        del matrices[f"{i}.qkv"]
        inputs = {"delta_qkv": d.n_mixed, "delta_z": d.n_values, "delta_b": d.n_value_heads, "delta_a": d.n_value_heads}
        matrices[f"{i}.in"] = Part(tuple((f"{i}.{name}", None) for name in inputs), (*inputs.values(),), config.dim)
        matrices[f"{i}.wo"] = Part(((f"{i}.delta_out", None),), (config.dim,), d.n_values)
    return {name: part._replace(tensors=_of_some(part.tensors)) for name, part in matrices.items()}


def vectors(config: Config) -> dict[str, Vector]:
    """Llama's, and what the convolution, decays and norms of delta nets take."""
    d, own = delta_of(config), llama.vectors(config)
    for i in d.layers:
        for name in ("q_norm", "k_norm"):
            own.pop(f"{i}.{name}", None)
        own[f"{i}.conv"] = Vector(((f"{i}.conv", None),), (d.n_mixed,), n_rows=d.n_taps)
        own[f"{i}.rates"] = Vector(((f"{i}.rate", None), (f"{i}.dt", None)), (d.n_value_heads, d.n_value_heads))
        own[f"{i}.delta_norm"] = Vector(((f"{i}.delta_norm", None),), (d.value_dim,))
    return {name: vector._replace(tensors=_of_some(vector.tensors)) for name, vector in own.items()}


def _of_some(tensors: tuple[tuple[str, int | None], ...]) -> tuple[tuple[str, int | None], ...]:
    """Where those of attention have their layer in their name."""
    return tuple((f"{layer}.{name}", None) if name in OF_ATTENTION else (name, layer) for name, layer in tensors)


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's, and of L layers with delta nets: projected (T, columns): products; inputs (L, N, channels) of convolutions; and of
    each what `DeltaNet` says.
    """
    d, ours = delta_of(config), llama.buffers(config, weights, room)
    n, width, values = len(d.layers), round_up(d.value_dim, STRIP_ROWS), round_up(d.n_values, STRIP_ROWS)
    columns = [matrix.n_rows for name, matrix in weights.matrices.items() if name.endswith(".in")]
    strips = d.n_value_heads * (width // STRIP_ROWS)
    return ours | {
        "heads": ours["heads"]._replace(shape=(1, MAX_TOKENS, max(ours["heads"].shape[2], values))),
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


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """As llama's; in the place of attention, where a delta net is: x += wo delta_net(conv(in rmsnorm(x)))."""
    d, w, v = delta_of(config), weights.matrices, weights.vectors
    caches = attention_layers(config)
    of_attention = Buffers(
        **vars(b) | {name: {i: getattr(b, name)[place] for place, i in enumerate(caches)} for name in ("keys", "values")}
    )

    def delta(place: int, i: int) -> Program:
        return [
            [
                llama.norm(config, weights, b, f"{i}.rms_att"),
                w[f"{i}.in"].product(b.projected, b.normed, b.scratch),
                convolve(b.projected, 1, 0, b.inputs[place], v[f"{i}.conv"], NO_BIAS),
            ],
            [
                delta_net(
                    b.heads,
                    b.projected,
                    b.states[place],
                    b.lengths[place],
                    b.delta_keys[place],
                    b.deltas[place],
                    b.decays[place],
                    b.delta_scratch,
                    b.guess,
                    v[f"{i}.rates"],
                    v[f"{i}.delta_norm"],
                    config.norm_eps,
                    d.value_dim,
                    d.n_key_heads,
                    d.in_turns,
                )
            ],
            [w[f"{i}.wo"].product(b.x[0], b.heads, b.scratch, adding=True)],
            *llama.mlp(config, weights, b, i),
        ]

    def layer(i: int) -> Program:
        if i in d.layers:
            return delta(d.layers.index(i), i)
        return llama.layer(config, weights, of_attention, i, b.normed, [llama.norm(config, weights, b, f"{i}.rms_att")])

    layers = [layer(i) for i in range(config.n_layers)]
    return Layers(llama.embed(config, weights, b), layers, llama.classify(config, weights, b))


QWEN35 = Architecture(shapes, parts, vectors, buffers, program, llama.fill, n_states=N_STATES)
