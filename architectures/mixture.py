"""Llama's layers with a mixture of experts in the place of the MLP: Mixtral (Jiang et al. 2024, arXiv:2401.04088), Qwen3-MoE
(Yang et al. 2025, arXiv:2505.09388). A router's product chooses those of the experts that a token goes through; they lie in one
matrix.

The router stays what its file has: what chooses is not rounded, whatever the experts become.
"""

import numpy as np

from ..kernels import MAX_TOKENS, swiglu
from ..machine.memory import zeros
from ..machine.programs import Program
from ..machine.tiles import STRIP_ROWS
from ..machine.vectors import round_up
from ..weights.matrix import Choice
from . import llama
from .blocks import move_path
from .config import Config, ExpertsConfig
from .experts import OF_ALL, OF_CHOSEN, add_experts, route
from .plan import Architecture, Buffer, Buffers, Layers, Part, Room, Vector, Weights

DENSE = ("w1", "w2", "w3")  # of an MLP


def experts_of(config: Config) -> ExpertsConfig:
    assert config.experts
    return config.experts


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Llama's; of a layer i with experts "i.router" (E, D), "i.experts_w1", "i.experts_w3" (E, F, D) and "i.experts_w2"
    (E, D, F), of one without "i.w1" and so on."""
    e, tensors = experts_of(config), llama.shapes(config)
    dense = {name: tensors.pop(name)[1:] for name in DENSE}
    for i in range(config.n_layers):
        if i in e.dense_layers:
            tensors |= {f"{i}.{name}": shape for name, shape in dense.items()}
        else:
            tensors |= {f"{i}.router": (e.n, config.dim), f"{i}.experts_w2": (e.n, config.dim, e.hidden_dim)}
            tensors |= {f"{i}.experts_{name}": (e.n, e.hidden_dim, config.dim) for name in ("w1", "w3")}
    return tensors


def parts(config: Config) -> dict[str, Part]:
    """Llama's; of experts all first matrices, each with its own third strip by strip, and all second ones, below each other."""
    e, dim, matrices = experts_of(config), config.dim, llama.parts(config)
    for i in range(config.n_layers):
        up, down = matrices.pop(f"{i}.up"), matrices.pop(f"{i}.down")
        if i in e.dense_layers:
            matrices[f"{i}.up"] = up._replace(tensors=((f"{i}.w1", None), (f"{i}.w3", None)))
            matrices[f"{i}.down"] = down._replace(tensors=((f"{i}.w2", None),))
            continue
        pairs = tuple((f"{i}.experts_{name}", expert) for expert in range(e.n) for name in ("w1", "w3"))
        matrices[f"{i}.router"] = Part(((f"{i}.router", None),), (e.n,), dim)
        matrices[f"{i}.experts_up"] = Part(pairs, (e.hidden_dim,) * len(pairs), dim, turns=2)
        second = tuple((f"{i}.experts_w2", expert) for expert in range(e.n))
        matrices[f"{i}.experts_down"] = Part(second, (dim,) * e.n, e.hidden_dim)
    return matrices


def vectors(config: Config) -> dict[str, Vector]:
    return llama.vectors(config)


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Llama's, and what `experts` says: a slot is one token's use of one expert, of which a pass has T k.

    router (T, E padded); odds (threads, E padded); slot_tokens, slot_places (threads, T k), starts (threads, E + 1),
    slot_weights (threads, T k): see `Routing`. slot_up (T k, 2 F padded), slot_hidden (1, T k, F padded), slot_out (T k, D
    padded); slot_scratch (threads, T k, words), gathered (threads, T, words or D padded).
    """
    e, ours, threads = experts_of(config), llama.buffers(config, weights, room), room.n_threads
    n_slots, width, hidden = MAX_TOKENS * e.n_chosen, round_up(e.n, STRIP_ROWS), round_up(e.hidden_dim, STRIP_ROWS)
    words = max(matrix.scratch_words for name, matrix in weights.matrices.items() if name.endswith(".experts_down"))
    widest = max(ours["scratch"].shape[2], ours["normed"].shape[2])
    return ours | {
        "router": Buffer((MAX_TOKENS, width)),
        "odds": Buffer((threads, width)),
        "slot_tokens": Buffer((threads, n_slots), np.int64),
        "slot_places": Buffer((threads, n_slots), np.int64),
        "slot_weights": Buffer((threads, n_slots)),
        "starts": Buffer((threads, e.n + 1), np.int64),
        "slot_up": Buffer((n_slots, 2 * hidden)),
        "slot_hidden": Buffer((1, n_slots, hidden)),
        "slot_out": Buffer((n_slots, round_up(config.dim, STRIP_ROWS))),
        "slot_scratch": Buffer((threads, n_slots, words)),
        "gathered": Buffer((threads, MAX_TOKENS, widest)),
    }


def mixing_experts(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += the weighted sum over a token's experts of w2 swiglu(w13 rmsnorm(x)): by rank, the likeliest first."""
    e, w, choice = experts_of(config), weights.matrices, Choice(b.slot_tokens, b.starts)
    way, no_bias = OF_CHOSEN if e.is_normed else OF_ALL, zeros(b.router.shape[1])
    routed = b.slot_tokens, b.starts, b.slot_places, b.slot_weights, e.n_chosen, way, False, 0.0, 1.0
    up, down = w[f"{i}.experts_up"], w[f"{i}.experts_down"]
    return [
        [llama.norm(config, weights, b, f"{i}.rms_ffn"), w[f"{i}.router"].product(b.router, b.normed, b.scratch)],
        [
            route(b.router, no_bias, b.odds, *routed),
            up.experts(b.slot_up, b.normed, b.scratch, b.gathered, choice, unit=2),
            swiglu(b.slot_hidden, b.slot_up, e.n_chosen),
        ],
        [
            down.experts(b.slot_out, b.slot_hidden, b.slot_scratch, b.gathered, choice, per_token=e.n_chosen),
            add_experts(b.x[0], b.slot_out, b.slot_places, b.slot_weights, e.n_chosen),
        ],
    ]


def program(config: Config, weights: Weights, b: Buffers) -> Layers:
    """Llama's, but for the MLPs of layers that have experts."""

    def layer(i: int) -> Program:
        norm = llama.norm(config, weights, b, f"{i}.rms_att")
        is_dense = i in experts_of(config).dense_layers
        second = llama.mlp(config, weights, b, i) if is_dense else mixing_experts(config, weights, b, i)
        return [*llama.mixing(config, weights, b, i, b.normed, [norm]), *second]

    return Layers(llama.embed(config, weights, b), [layer(i) for i in range(config.n_layers)], llama.classify(config, weights, b))


MIXTURE = Architecture(shapes, parts, vectors, buffers, program, llama.fill, move=move_path)
