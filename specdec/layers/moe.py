"""Mixture-of-experts block (Shazeer et al. 2017, arXiv:1701.06538), also with a shared expert.

The router's matmul chooses the experts of each token; the experts lie in one matrix. The router keeps the weight format of its
file, so that the choice is not rounded, whatever format the experts get.

A slot is one token's use of one expert. The slots of a pass are sorted by expert, then by token. So an expert's tokens are
neighbors, and a pass reads each expert once.

A token's output does not depend on the other tokens of the pass: its own row of the router's matmul chooses its experts, each
slot is the matmul that it would be alone, and slots are summed by rank, the most probable expert first.

Every thread routes for itself, again in each phase: choosing takes less time than the barrier that would share the result, and a
thread may have started late.

Shapes: T tokens of this pass, E experts, k experts per token, D dim, F hidden dim, L layers, S shared hidden dim, R panel rows.
"""

from typing import NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, add_bias, rms_norm
from specdec.layers.activations import add_parallel_branches, add_slot_bias, clamped_swiglu, gate_tokens
from specdec.layers.architecture import Buffers, BufferSizes, BufferSpec, FusedTensors, Shapes, Weights
from specdec.layers.block import NO_BIAS, Block, get_layer_scale, norm, norm_shapes, prepare_input
from specdec.layers.mlp import MLP, NORM, activate, is_gated
from specdec.model_config import ExpertsConfig, ModelConfig, require_type
from specdec.quant.packed_matrix import ExpertRouting
from specdec.runtime.code_cache import jitable
from specdec.runtime.elementary import exp, sigmoid
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Floats1, Floats2, ForwardContext, Ints1, Ints2, Op, Program, kernel
from specdec.runtime.simd import LANES, Float32, add, extract_lane, fma, load, maximum, reduce_max, round_up, splat, store
from specdec.runtime.work_stealing import get_chunk_range

# How scores become weights: softmax of the chosen, also with a bias for the choice, softmax of all, sigmoid, SparseMixer
SOFTMAX_OF_CHOSEN, BIASED_SOFTMAX, SOFTMAX_OF_ALL, SIGMOID, SPARSEMIXER = range(5)


def get_experts_config(config: ModelConfig) -> ExpertsConfig:
    """Return config.experts, which must be set."""
    return require_type(config.experts, ExpertsConfig)


def get_scoring(e: ExpertsConfig) -> int:
    """Return how scores become weights, one of the constants above."""
    if e.sparsemixer_threshold:
        return SPARSEMIXER
    if e.is_sigmoid:
        return SIGMOID
    if e.has_selection_bias:
        return BIASED_SOFTMAX
    return SOFTMAX_OF_CHOSEN if e.norm_topk_prob else SOFTMAX_OF_ALL


def shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a mixture-of-experts block's tensors in one layer, by name.

    router (E, D); experts_w1, experts_w3 (E, F, D); experts_w2 (E, D, F). Without a gate, there is no experts_w3 or shared_w3.
    router_bias (E,): added to the scores that choose experts.
    router_b (E,), experts_b1, experts_b3 (E, F), experts_b2 (E, D): biases of the matmuls.
    shared_w1, shared_w3 (S, D), shared_w2 (D, S), shared_gate (1, D): matrices of the shared expert.
    """
    e, dim = get_experts_config(config), config.dim
    tensors: Shapes = {"router": (e.n_experts, dim), "experts_w2": (e.n_experts, dim, e.hidden_dim)}
    first = (1, 3)[: 1 + is_gated(config)]
    tensors |= {f"experts_w{n}": (e.n_experts, e.hidden_dim, dim) for n in first}
    if e.has_selection_bias:
        tensors["router_bias"] = (e.n_experts,)
    if e.shared_hidden_dim:
        tensors |= {f"shared_w{n}": (e.shared_hidden_dim, dim) for n in first} | {"shared_w2": (dim, e.shared_hidden_dim)}
    if e.swiglu_limit:
        tensors |= {"router_b": (e.n_experts,), "experts_b2": (e.n_experts, dim)}
        tensors |= dict.fromkeys(("experts_b1", "experts_b3"), (e.n_experts, e.hidden_dim))
    return norm_shapes(config, NORM) | tensors | ({"shared_gate": (1, dim)} if e.shared_gate else {})


def make_scratch(weights: Weights, sizes: BufferSizes, matrix: str) -> BufferSpec:
    """Return the spec of the scratch for matmuls with the matrices whose names end in `matrix`.

    The scratch holds each token's activations in the form that the weight format multiplies. The chunks of a thread share it, so
    each matmul of a phase needs its own.
    """
    words = max((m.scratch_words for name, m in weights.matrices.items() if name.endswith(matrix)), default=1)
    return BufferSpec((sizes.n_threads, MAX_BATCH_TOKENS, words), scope="token")


def buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of a mixture-of-experts block's buffers, by name; a pass has T k slots (see `route`).

    router (T, E padded).
    router_probs (threads, E padded and groups padded), slot_tokens, token_slots, slot_weights (threads, T k), starts (threads,
    E + 1): see `RoutingArgs`.
    experts_read (L,): number of experts that the last pass has read in each layer.
    slot_up (T k, 2 F padded, or F padded without a gate), slot_hidden (1, T k, F padded), slot_out (T k, D padded).
    slot_scratch (threads, T k, words), gathered (threads, T, words or D padded).
    shared_up (T, 2 S padded, or S padded), shared_hidden (1, T, S padded), shared_gates (T, R): of the shared expert.
    gate_scratch, router_scratch: like scratch.
    """
    e, n_threads = get_experts_config(config), sizes.n_threads
    n_slots, width, hidden = (
        MAX_BATCH_TOKENS * e.n_experts_used,
        round_up(e.n_experts, PANEL_ROWS),
        round_up(e.hidden_dim, PANEL_ROWS),
    )
    n_parts = 1 + is_gated(config)
    widest = max(round_up(config.dim, PANEL_ROWS), *(matrix.scratch_words for matrix in weights.matrices.values()))

    shared = {
        "shared_up": BufferSpec((MAX_BATCH_TOKENS, n_parts * round_up(e.shared_hidden_dim, PANEL_ROWS)), scope="token"),
        "shared_hidden": BufferSpec((1, MAX_BATCH_TOKENS, round_up(e.shared_hidden_dim, PANEL_ROWS)), scope="token"),
        "shared_gates": BufferSpec((MAX_BATCH_TOKENS, PANEL_ROWS), scope="token"),
        "gate_scratch": make_scratch(weights, sizes, ".shared_gate"),
    }
    return (shared if e.shared_hidden_dim else {}) | {
        "router": BufferSpec((MAX_BATCH_TOKENS, width)),
        "router_scratch": make_scratch(weights, sizes, ".router"),
        "router_probs": BufferSpec((n_threads, width + round_up(e.n_groups, PANEL_ROWS))),
        "slot_tokens": BufferSpec((n_threads, n_slots), np.int64),
        "token_slots": BufferSpec((n_threads, n_slots), np.int64),
        "slot_weights": BufferSpec((n_threads, n_slots)),
        "starts": BufferSpec((n_threads, e.n_experts + 1), np.int64),
        "experts_read": BufferSpec((config.n_layers,), np.int64),
        "slot_up": BufferSpec((n_slots, n_parts * hidden)),
        "slot_hidden": BufferSpec((1, n_slots, hidden)),
        "slot_out": BufferSpec((n_slots, round_up(config.dim, PANEL_ROWS))),
        "slot_scratch": BufferSpec((n_threads, n_slots, make_scratch(weights, sizes, ".experts_down").shape[-1])),
        "gathered": BufferSpec((n_threads, MAX_BATCH_TOKENS, widest)),
    }


def make_expert_ops(
    config: ModelConfig, weights: Weights, b: Buffers, i: int, source: Float32, before: list[Op]
) -> tuple[list[Op], list[Op], list[Op]]:
    """Return the ops of the three phases of mixture of experts, as three lists.

    Phases: the router's matmul; routing, then the experts' first matrices; their second matrices, then the weighted sum by rank.

    Args:
        config: Config of the layer.
        weights: Packed weights.
        b: Buffers of the layer.
        i: Index of the layer.
        source: Buffer with the input of the experts.
        before: Ops that compute source.
    """
    e, w, v, routed = get_experts_config(config), weights.matrices, weights.vectors, ExpertRouting(b.slot_tokens, b.starts)
    scoring = get_scoring(e)
    options = (
        e.n_experts_used,
        scoring,
        int(e.norm_topk_prob),
        {SIGMOID: e.sum_eps, SPARSEMIXER: e.sparsemixer_threshold}.get(scoring, 0.0),
        e.routed_scaling_factor,
        v.get(f"{i}.expert_scale", NO_BIAS),
        e.n_groups,
        e.n_groups_used,
    )
    bias, slots = v.get(f"{i}.router_bias", zeros(b.router.shape[1])), (b.slot_tokens, b.starts, b.token_slots, b.slot_weights)
    routing = route(b.router, bias, b.router_probs, *slots, *options)
    router_ops = [w[f"{i}.router"].matmul(b.router, b.routed if e.has_parallel_mlp else source, b.router_scratch)]
    down_ops = [
        w[f"{i}.experts_down"].expert_matmul(
            b.slot_out, b.slot_hidden, b.slot_scratch, b.gathered, routed, per_token=e.n_experts_used
        )
    ]
    activation = activate(config, b.slot_hidden, b.slot_up, e.n_experts_used)
    if e.swiglu_limit:
        activation = clamped_swiglu(b.slot_hidden, b.slot_up, v[f"{i}.experts_b13"], b.starts, e.swiglu_limit, e.swiglu_alpha)
        router_ops.append(add_bias(b.router, v[f"{i}.router_b"], 1))
        down_ops.append(add_slot_bias(b.slot_out, v[f"{i}.experts_b2"], b.starts))
    out, n_read = b.experts_output[0] if e.has_parallel_mlp else b.x[0], b.experts_read[i : i + 1]
    sum_op = add_experts(
        out, b.slot_out, b.token_slots, b.slot_weights, b.starts, n_read, e.n_experts_used, int(not e.has_parallel_mlp)
    )
    up_op = w[f"{i}.experts_up"].expert_matmul(b.slot_up, source, b.scratch, b.gathered, routed, unit=1 + is_gated(config))
    return router_ops, [*before, routing, up_op, activation], [routing, *down_ops, sum_op]


def program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the program of x += weighted sum of w2 act(w13 rmsnorm(x)) over each token's experts + the shared expert."""
    e, w, (source, before) = get_experts_config(config), weights.matrices, prepare_input(config, weights, b, f"{i}.{NORM}")
    router_ops, expert_ops, sum_ops = make_expert_ops(config, weights, b, i, source, before)
    if e.shared_hidden_dim:
        router_ops.append(w[f"{i}.shared_up"].matmul(b.shared_up, source, b.scratch, unit=1 + is_gated(config)))
        router_ops.append(activate(config, b.shared_hidden, b.shared_up))
        sum_ops.append(w[f"{i}.shared_down"].matmul(b.x[0], b.shared_hidden, b.scratch, accumulate=True))
    if e.shared_gate:
        router_ops.append(w[f"{i}.shared_gate"].matmul(b.shared_gates, source, b.gate_scratch))
        expert_ops.append(gate_tokens(b.shared_hidden, b.shared_gates))
    return [[*before, *router_ops], expert_ops, sum_ops]


FUSED = {
    "experts_up": FusedTensors(("experts_w1", "experts_w3"), interleaved=True), "experts_down": FusedTensors(("experts_w2",)),
    "shared_up": FusedTensors(("shared_w1", "shared_w3"), interleaved=True), "shared_down": FusedTensors(("shared_w2",)),
    "experts_b13": FusedTensors(("experts_b1", "experts_b3"), interleaved=True, is_table=True),
    "experts_b2": FusedTensors(("experts_b2",), is_table=True),
}  # fmt: skip
MOE = Block(shapes, FUSED, program, buffers)


# Experts parallel to an MLP (Gemma 4): both outputs are normed, added and normed again

PARALLEL_NORMS = (
    "rms_experts",
    "rms_mlp_out",
    "rms_experts_out",
)  # of the experts' input, the MLP's output and the experts' output


def parallel_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the tensors of an MLP and experts in parallel, by name.

    router_scale (D,): factors of the router's input. expert_scale (E,): factors of the experts' weights.
    """
    e, dim = get_experts_config(config), config.dim
    scales = {"router_scale": (dim,), "expert_scale": (e.n_experts,)} | dict.fromkeys(PARALLEL_NORMS, (dim,))
    return MLP.shapes(config) | shapes(config) | scales


def parallel_buffers(config: ModelConfig, weights: Weights, sizes: BufferSizes) -> dict[str, BufferSpec]:
    """Return the specs of the buffers of an MLP and experts in parallel, by name, including `buffers`.

    routed, experts_input (threads, T, D padded): input of the router and of the experts.
    experts_output (1, T, D padded): weighted sum of the experts.
    branch_sum (threads, T, D padded): sum of MLP and experts.
    mlp_scratch: like scratch.
    """
    n_threads, padded = sizes.n_threads, round_up(config.dim, PANEL_ROWS)
    spec = BufferSpec((n_threads, MAX_BATCH_TOKENS, padded), scope="token")
    return buffers(config, weights, sizes) | {
        "routed": spec,
        "experts_input": spec,
        "branch_sum": spec,
        "experts_output": BufferSpec((1, MAX_BATCH_TOKENS, padded), scope="token"),
        "mlp_scratch": make_scratch(weights, sizes, ".down"),
    }


def parallel_program(config: ModelConfig, weights: Weights, b: Buffers, i: int) -> Program:
    """Return the program of an MLP and experts in parallel: x = factor (x + norm(norm(mlp(norm(x))) + norm(experts(norm(x))))).

    Each norm has its own weights, also the norm of the router's input.
    """
    w, v, dim, eps = weights.matrices, weights.vectors, config.dim, config.norm_eps
    router_weight = v[f"{i}.router_scale"] * np.float32(1 / np.sqrt(np.float32(dim)))
    before = [rms_norm(b.experts_input, b.x, v[f"{i}.rms_experts"], dim, eps, False, 0)]
    router_ops, expert_ops, sum_ops = make_expert_ops(config, weights, b, i, b.experts_input, before)
    norms = (v[f"{i}.{name}"] for name in ("rms_mlp_out", "rms_experts_out", "rms_ffn_out"))
    factor = get_layer_scale(config, weights, i, is_last=not config.per_layer_inputs)
    return [
        [
            norm(config, weights, b, f"{i}.{NORM}"),
            w[f"{i}.up"].matmul(b.up, b.normed, b.scratch, unit=2),
            activate(config, b.hidden, b.up),
            rms_norm(b.routed, b.x, router_weight, dim, eps, False, 0),
            *router_ops,
        ],
        [w[f"{i}.down"].matmul(b.branch[0], b.hidden, b.mlp_scratch), *expert_ops],
        sum_ops,
        [add_parallel_branches(b.x[0], b.branch, b.experts_output, b.branch_sum, *norms, dim, eps, factor)],
    ]


PARALLEL_MOE = Block(parallel_shapes, {**MLP.fused, **FUSED}, parallel_program, parallel_buffers)


# Kernels


class RoutingArgs(NamedTuple):
    """Arguments of the kernel `route`, which chooses the experts of each token.

    Attributes:
        scores: Output of the router's matmul (T, E padded).
        bias: (E padded), numbers added to the scores that choose experts, but not to weights.
        probs: Scratch (threads, E padded and groups padded).
        tokens: Output (threads, T k): token of each slot.
        starts: Output (threads, E + 1): first slot of each expert.
        slots: Output (threads, T k): slot of token t's expert of rank r, at t k + r.
        weights: Output (threads, T k): weight of the expert of rank r for token t, at t k + r.
        n_experts_used: Number of experts per token, k.
        scoring: The result of `get_scoring`.
        norm_topk_prob: Divide sigmoids by their sum + eps.
        scale: Factor of all weights.
        expert_scales: Factor of each expert (E padded), or empty.
        n_groups, n_groups_used: Groups of experts, and those that a token uses; see `ExpertsConfig`.
    """

    scores: Floats2
    bias: Floats1
    probs: Floats2
    tokens: Ints2
    starts: Ints2
    slots: Ints2
    weights: Floats2
    n_experts_used: int
    scoring: int
    norm_topk_prob: int
    eps: float
    scale: float
    expert_scales: Floats1
    n_groups: int
    n_groups_used: int


@jitable
def select_experts(probs, row, n_experts, chosen, at, n_experts_used):
    """Write the n_experts_used experts with the largest probs[row] to chosen[row], from `at` on, the largest first.

    Of experts with equal probabilities, the one with the lower index comes first. No expert is chosen twice, even with NaNs: a
    NaN is never larger.
    """
    for rank in range(n_experts_used):
        best = -1
        for expert in range(n_experts):
            if best < 0 or probs[row, expert] > probs[row, best]:
                is_free = True
                for i in range(at, at + rank):
                    is_free = is_free and chosen[row, i] != expert
                best = expert if is_free else best
        chosen[row, at + rank] = best


@jitable
def mask_groups(probs, row, at, n_experts, p):
    """Set probs[row] to -inf for the experts outside of the best p.n_groups_used groups.

    The groups' scores are written to the columns from `at` on. A group's score is the sum of its two largest numbers for sigmoids
    (DeepSeek-V3: arXiv:2412.19437), else its largest number (DeepSeek-V2: arXiv:2405.04434, section 2.2.2). Of equal groups, the
    one with the lower index comes first.
    """
    size = n_experts // p.n_groups
    for group in range(p.n_groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            prob = probs[row, expert]
            if prob > first:
                first, second = prob, first
            elif prob > second:
                second = prob
        probs[row, at + group] = first + second if p.scoring == SIGMOID else first
    for group in range(p.n_groups):
        rank = 0
        for other in range(p.n_groups):
            score, own = probs[row, at + other], probs[row, at + group]
            rank += score > own or (score == own and other < group)
        if rank >= p.n_groups_used:
            for expert in range(group * size, (group + 1) * size):
                probs[row, expert] = -np.inf


@jitable
def add_bias_to_softmax(probs, row, minus_max, n_experts, bias):
    """Replace the scores probs[row] by their softmax plus the bias; minus_max is the largest score times -1."""
    for i in range(0, bias.size, LANES):
        at = row * probs.shape[1] + i
        store(probs, at, exp(add(load(probs, at), minus_max)))
    total = np.float32(0.0)
    for expert in range(n_experts):
        total += probs[row, expert]
    for expert in range(n_experts):
        probs[row, expert] = probs[row, expert] / total + bias[expert]


@jitable
def get_sparse_share(scores, row, n_experts, chosen, first, at, threshold):
    """Return SparseMixer's weight of the expert chosen[at]: its share in a softmax of scores[row] (PhiMoE, arXiv:2409.12136).

    The softmax leaves out the experts chosen before it, chosen[first : at]. With s the score of chosen[at], it also leaves out
    each expert of score s' for which (s - s') / max(|s'|, s) exceeds the threshold.
    """
    best, total = scores[row, chosen[at]], np.float32(0.0)
    for expert in range(n_experts):
        score, is_free = scores[row, expert], True
        for i in range(first, at):
            is_free = is_free and chosen[i] != expert
        if is_free and best - score <= threshold * max(abs(score), best):
            total += extract_lane(exp(splat(score - best)), 0)
    return np.float32(1.0) / total


@kernel
def route(run: ForwardContext, thread: int, p: RoutingArgs) -> None:
    """Choose the experts of each token from the router's scores; write their weights and slots to the outputs of `RoutingArgs`.

    A thread does this once per phase, for itself.
    """
    if run.is_first_chunk == 0:
        return
    n_experts, n_experts_used, width = p.starts.shape[1] - 1, p.n_experts_used, p.scores.shape[1]
    weights, chosen = p.weights[thread], p.slots  # hold experts until `assign_slots`
    for t in range(run.n_tokens):
        row, at = t * width, t * n_experts_used
        # scores that choose experts
        max_score, nan_sum = splat(-np.inf), np.float32(0.0)
        for i in range(0, width, LANES):
            score_vector = load(p.scores, row + i)
            if p.scoring == SIGMOID:
                score_vector = add(sigmoid(score_vector), load(p.bias, i))
            store(p.probs, thread * p.probs.shape[1] + i, score_vector)
        for expert in range(n_experts):
            score = p.scores[t, expert]
            nan_sum += (
                np.float32(0.0) if score == score else score
            )  # a NaN of an expert that is not chosen makes the token NaN, too
            max_score = maximum(splat(score), max_score)
        minus_max = splat(-reduce_max(max_score))
        if p.scoring == BIASED_SOFTMAX:
            add_bias_to_softmax(p.probs, thread, minus_max, n_experts, p.bias)
        if p.n_groups > 1:
            mask_groups(p.probs, thread, width, n_experts, p)
        select_experts(p.probs, thread, n_experts, chosen, at, n_experts_used)
        # weights of the chosen experts
        for i in range(0, width, LANES):
            score = load(p.scores, row + i)
            store(p.probs, thread * p.probs.shape[1] + i, sigmoid(score) if p.scoring == SIGMOID else exp(add(score, minus_max)))
        total = np.float32(0.0)
        for i in range(n_experts if p.scoring == SOFTMAX_OF_ALL else n_experts_used):
            total += p.probs[thread, i if p.scoring == SOFTMAX_OF_ALL else chosen[thread, at + i]]
        divisor = np.float32(1.0) if p.scoring == SIGMOID and p.norm_topk_prob == 0 else total + p.eps
        for rank in range(n_experts_used):
            expert = chosen[thread, at + rank]
            share = p.probs[thread, expert] / divisor
            if p.scoring == SPARSEMIXER:
                share = get_sparse_share(p.scores, t, n_experts, chosen[thread], at, at + rank, p.eps)
            weights[at + rank] = share * p.scale + nan_sum
            if p.expert_scales.size > 0:
                weights[at + rank] *= p.expert_scales[expert]
    assign_slots(p, thread, run.n_tokens * n_experts_used)


class ExpertSumArgs(NamedTuple):
    """Arguments of the kernel `add_experts`; slots, weights and starts are outputs of `route` (see `RoutingArgs`).

    Attributes:
        x: Output (T, D padded).
        branch: Output of the experts (slots, D padded).
        n_read: Output (1,): number of experts that the pass has read.
        accumulate: Add to x; else overwrite it.
    """

    x: Floats2
    branch: Floats2
    slots: Ints2
    weights: Floats2
    starts: Ints2
    n_read: Ints1
    n_experts_used: int
    accumulate: int


@jitable
def count_used_experts(starts):
    """Return the number of experts that at least one token uses, given the first slot of each expert."""
    n = 0
    for expert in range(starts.size - 1):
        n += starts[expert + 1] > starts[expert]
    return n


@jitable
def assign_slots(p, thread, n):
    """Sort the first n choices of experts in slots[thread] by expert, and replace each by its slot, its place in this order.

    Fills starts[thread], the first slot of each expert, and tokens[thread], the token of each slot.
    """
    starts, slots, tokens = p.starts[thread], p.slots[thread], p.tokens[thread]
    n_experts = starts.size - 1
    starts[:] = 0
    for i in range(n):
        starts[slots[i] + 1] += 1
    for expert in range(n_experts):
        starts[expert + 1] += starts[expert]
    for i in range(n):  # each start moves to the start of the next expert
        slot = starts[slots[i]]
        starts[slots[i]] += 1
        tokens[slot], slots[i] = i // p.n_experts_used, slot
    for expert in range(n_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@kernel
def add_experts(run: ForwardContext, thread: int, p: ExpertSumArgs) -> None:
    """Compute x[t] (+)= the sum of weight * branch[slot] over the token's experts, by rank, in this chunk's columns.

    The first chunk also writes the number of experts that the pass has read to n_read.
    """
    x, branch, slots, weights, n_experts_used = p.x, p.branch, p.slots, p.weights, p.n_experts_used
    if run.chunk == 0:
        p.n_read[0] = count_used_experts(p.starts[thread])
    first, last = get_chunk_range(branch.shape[1] // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            total = splat(0.0)
            for choice in range(t * n_experts_used, (t + 1) * n_experts_used):
                at = slots[thread, choice] * branch.shape[1] + i
                total = fma(load(branch, at), splat(weights[thread, choice]), total)
            store(x, t * x.shape[1] + i, add(load(x, t * x.shape[1] + i), total) if p.accumulate else total)
