"""A block of a mixture of experts, in the place of an MLP (Shazeer et al. 2017, arXiv:1701.06538), and of one that all share.

A router's product chooses those of the experts that a token goes through; they lie in one matrix. The router stays what its file
has: what chooses is not rounded, whatever the experts become.
"""

import numpy as np

from specdec.config import Config, ExpertsConfig, known_as
from specdec.kernels import MAX_TOKENS, add_bias, rms_norm
from specdec.layers.activations import add_both, add_slot_bias, clamped_swiglu, gate_tokens, swiglu
from specdec.layers.base import Buffer, Buffers, Joined, Room, Shapes, Weights
from specdec.layers.block import Block, factor_of, norm, norm_shapes, taken
from specdec.layers.mlp import GATES, MLP, NORM
from specdec.layers.moe_ops import OF_ALL, OF_CHOSEN, SIGMOID, add_experts, route
from specdec.layers.recurrent import NO_BIAS
from specdec.quant.matrix import Choice
from specdec.runtime.memory import zeros
from specdec.runtime.program import Program, Row
from specdec.runtime.simd import Float32, round_up
from specdec.runtime.tile import STRIP_ROWS


def experts_of(config: Config) -> ExpertsConfig:
    """The numbers of the experts."""
    return known_as(config.experts, ExpertsConfig)


def shapes(config: Config) -> Shapes:
    """router (E, D); experts_w1, experts_w3 (E, F, D) and experts_w2 (E, D, F); of what chooses, beside the scores,
    router_bias (E,); of products with biases router_b (E,), experts_b1, experts_b3 (E, F) and experts_b2 (E, D); of one that all
    share shared_w1, shared_w3 and shared_w2, and shared_gate (1, D).
    """
    e, dim = experts_of(config), config.dim
    tensors: Shapes = {"router": (e.n, dim), "experts_w2": (e.n, dim, e.hidden_dim)}
    tensors |= dict.fromkeys(("experts_w1", "experts_w3"), (e.n, e.hidden_dim, dim))
    if e.is_biased:
        tensors["router_bias"] = (e.n,)
    if e.shared_dim:
        tensors |= {"shared_w1": (e.shared_dim, dim), "shared_w2": (dim, e.shared_dim), "shared_w3": (e.shared_dim, dim)}
    if e.limit:
        tensors |= {"router_b": (e.n,), "experts_b2": (e.n, dim)}
        tensors |= dict.fromkeys(("experts_b1", "experts_b3"), (e.n, e.hidden_dim))
    return norm_shapes(config, NORM) | tensors | ({"shared_gate": (1, dim)} if e.shared_gate else {})


def scratch(weights: Weights, room: Room, matrix: str) -> Buffer:
    """Of each product of a phase its own: what it puts there is for all parts that a thread does."""
    words = max((m.scratch_words for name, m in weights.matrices.items() if name.endswith(matrix)), default=1)
    return Buffer((room.n_threads, MAX_TOKENS, words), whose="token")


def buffers(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """What `experts` says: a slot is one token's use of one expert, of which a pass has T k.

    router (T, E padded); odds (threads, E padded); slot_tokens, slot_places (threads, T k), starts (threads, E + 1),
    slot_weights (threads, T k): see `Routing`. experts_read (L,): how many the last pass has read in each layer. slot_up (T k, 2
    F padded), slot_hidden (1, T k, F padded), slot_out (T k, D padded); slot_scratch (threads, T k, words), gathered (threads,
    T, words or D padded). shared_up (T, 2 S padded), shared_hidden (1, T, S padded), shared_gates (T, R): of the expert that all
    share. gate_scratch, router_scratch: as scratch.
    """
    e, threads = experts_of(config), room.n_threads
    n_slots, width, hidden = MAX_TOKENS * e.n_chosen, round_up(e.n, STRIP_ROWS), round_up(e.hidden_dim, STRIP_ROWS)
    widest = max(round_up(config.dim, STRIP_ROWS), *(matrix.scratch_words for matrix in weights.matrices.values()))

    shared = {
        "shared_up": Buffer((MAX_TOKENS, 2 * round_up(e.shared_dim, STRIP_ROWS)), whose="token"),
        "shared_hidden": Buffer((1, MAX_TOKENS, round_up(e.shared_dim, STRIP_ROWS)), whose="token"),
        "shared_gates": Buffer((MAX_TOKENS, STRIP_ROWS), whose="token"),
        "gate_scratch": scratch(weights, room, ".shared_gate"),
    }
    return (shared if e.shared_dim else {}) | {
        "router": Buffer((MAX_TOKENS, width)),
        "router_scratch": scratch(weights, room, ".router"),
        "odds": Buffer((threads, width)),
        "slot_tokens": Buffer((threads, n_slots), np.int64),
        "slot_places": Buffer((threads, n_slots), np.int64),
        "slot_weights": Buffer((threads, n_slots)),
        "starts": Buffer((threads, e.n + 1), np.int64),
        "experts_read": Buffer((config.n_layers,), np.int64),
        "slot_up": Buffer((n_slots, 2 * hidden)),
        "slot_hidden": Buffer((1, n_slots, hidden)),
        "slot_out": Buffer((n_slots, round_up(config.dim, STRIP_ROWS))),
        "slot_scratch": Buffer((threads, n_slots, scratch(weights, room, ".experts_down").shape[-1])),
        "gathered": Buffer((threads, MAX_TOKENS, widest)),
    }


def through_experts(
    config: Config, weights: Weights, b: Buffers, i: int, source: Float32, before: list[Row]
) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of three phases: the router's product; choosing, and the chosen ones' first matrices; and their sum, by rank, the
    likeliest first.

    source: what they take; before: what makes that.
    """
    e, w, v, choice = experts_of(config), weights.matrices, weights.vectors, Choice(b.slot_tokens, b.starts)
    way = SIGMOID if e.is_sigmoid else OF_CHOSEN if e.is_normed else OF_ALL
    numbers = e.n_chosen, way, int(e.is_normed), SUM_EPS[way], e.scale, v.get(f"{i}.expert_scale", NO_BIAS)
    bias, tables = v.get(f"{i}.router_bias", zeros(b.router.shape[1])), (b.slot_tokens, b.starts, b.slot_places, b.slot_weights)
    routing = route(b.router, bias, b.odds, *tables, *numbers)
    chosen = [w[f"{i}.router"].product(b.router, b.routed if e.is_beside else source, b.router_scratch)]
    second = [w[f"{i}.experts_down"].experts(b.slot_out, b.slot_hidden, b.slot_scratch, b.gathered, choice, per_token=e.n_chosen)]
    gate = GATES[config.activation](b.slot_hidden, b.slot_up, e.n_chosen)
    if e.limit:
        gate = clamped_swiglu(b.slot_hidden, b.slot_up, v[f"{i}.experts_b13"], b.starts, e.limit, e.alpha)
        chosen.append(add_bias(b.router, v[f"{i}.router_b"], 1))
        second.append(add_slot_bias(b.slot_out, v[f"{i}.experts_b2"], b.starts))
    out, read = b.made[0] if e.is_beside else b.x[0], b.experts_read[i : i + 1]
    summed = add_experts(out, b.slot_out, b.slot_places, b.slot_weights, b.starts, read, e.n_chosen, int(not e.is_beside))
    first = w[f"{i}.experts_up"].experts(b.slot_up, source, b.scratch, b.gathered, choice, unit=2)
    return chosen, [*before, routing, first, gate], [routing, *second, summed]


def program(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x += the weighted sum over a token's experts of w2 swiglu(w13 rmsnorm(x)), and what one that all share makes."""
    e, w, (source, before) = experts_of(config), weights.matrices, taken(config, weights, b, f"{i}.{NORM}")
    chosen, mixed, summed = through_experts(config, weights, b, i, source, before)
    if e.shared_dim:
        chosen.append(w[f"{i}.shared_up"].product(b.shared_up, source, b.scratch, unit=2))
        chosen.append(swiglu(b.shared_hidden, b.shared_up, 1))
        summed.append(w[f"{i}.shared_down"].product(b.x[0], b.shared_hidden, b.scratch, adding=True))
    if e.shared_gate:
        chosen.append(w[f"{i}.shared_gate"].product(b.shared_gates, source, b.gate_scratch))
        mixed.append(gate_tokens(b.shared_hidden, b.shared_gates))
    return [[*before, *chosen], mixed, summed]


SUM_EPS = {OF_CHOSEN: 0.0, OF_ALL: 0.0, SIGMOID: 1e-6}  # what a sum of weights is divided by beside itself
JOINED = {
    "experts_up": Joined(("experts_w1", "experts_w3"), in_turns=True), "experts_down": Joined(("experts_w2",)),
    "shared_up": Joined(("shared_w1", "shared_w3"), in_turns=True), "shared_down": Joined(("shared_w2",)),
    "experts_b13": Joined(("experts_b1", "experts_b3"), in_turns=True, is_table=True),
    "experts_b2": Joined(("experts_b2",), is_table=True),
}  # fmt: skip
MIXTURE = Block(shapes, JOINED, program, buffers)


# Beside an MLP (Gemma 4): what both make is normed, added and normed once more

OWN_NORMS = ("rms_experts", "rms_mlp_out", "rms_experts_out")  # of what experts take, and of what the MLP and they make


def shapes_beside(config: Config) -> Shapes:
    """The MLP's and the experts'; router_scale (D,): of what the router takes, expert_scale (E,): of what an expert counts."""
    e, dim = experts_of(config), config.dim
    own = {"router_scale": (dim,), "expert_scale": (e.n,)} | dict.fromkeys(OWN_NORMS, (dim,))
    return MLP.shapes(config) | shapes(config) | own


def buffers_beside(config: Config, weights: Weights, room: Room) -> dict[str, Buffer]:
    """Those of experts; routed, taken (threads, T, D padded): what the router and the experts take; made (1, T, D padded): what
    the experts make; summed (threads, T, D padded): of both; mlp_scratch: as scratch.
    """
    threads, padded = room.n_threads, round_up(config.dim, STRIP_ROWS)
    row = Buffer((threads, MAX_TOKENS, padded), whose="token")
    return buffers(config, weights, room) | {
        "routed": row,
        "taken": row,
        "summed": row,
        "made": Buffer((1, MAX_TOKENS, padded), whose="token"),
        "mlp_scratch": scratch(weights, room, ".down"),
    }


def program_beside(config: Config, weights: Weights, b: Buffers, i: int) -> Program:
    """x = factor (x + norm(norm(mlp(norm(x))) + norm(experts(norm(x))))); the router's norm has weights of its own."""
    w, v, dim, eps, gate = weights.matrices, weights.vectors, config.dim, config.norm_eps, GATES[config.activation]
    of_router = v[f"{i}.router_scale"] * np.float32(1 / np.sqrt(np.float32(dim)))
    before = [rms_norm(b.taken, b.x, v[f"{i}.rms_experts"], dim, eps, False, 0)]
    chosen, mixed, summed = through_experts(config, weights, b, i, b.taken, before)
    norms = (v[f"{i}.{name}"] for name in ("rms_mlp_out", "rms_experts_out", "rms_ffn_out"))
    factor = factor_of(config, weights, i, is_last=not config.inputs)
    return [
        [
            norm(config, weights, b, f"{i}.{NORM}"),
            w[f"{i}.up"].product(b.up, b.normed, b.scratch, unit=2),
            gate(b.hidden, b.up, 1),
            rms_norm(b.routed, b.x, of_router, dim, eps, False, 0),
            *chosen,
        ],
        [w[f"{i}.down"].product(b.branch[0], b.hidden, b.mlp_scratch), *mixed],
        summed,
        [add_both(b.x[0], b.branch, b.made, b.summed, *norms, dim, eps, factor)],
    ]


BESIDE = Block(shapes_beside, {**MLP.joined, **JOINED}, program_beside, buffers_beside)
