"""Mixture-of-experts block (Shazeer et al. 2017, arXiv:1701.06538), also with a shared expert.

The router's matmul chooses the experts of each token; the experts lie in one matrix. The router keeps the weight format of its
file, so that the choice is not rounded, whatever format the experts get.

A slot is one token's use of one expert. The slots of a pass are sorted by expert, then by token. So an expert's tokens are
neighbors, and a pass reads each expert once: 64 tokens of four layers of Qwen3-30B-A3B's shape in int4 take as long as 13 passes
over one token.

A token's output does not depend on the other tokens of the pass: its own row of the router's matmul chooses its experts, each
slot is the matmul that it would be alone, and slots are summed by rank, the most probable expert first.

Every thread routes for itself, again in each phase: choosing takes less time than the barrier that would share the result, and a
thread may have started late.

Shapes: T tokens of this pass, E experts, k experts per token, D dim, F hidden dim, L layers, S shared hidden dim, R panel rows.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from specdec.kernels import MAX_BATCH_TOKENS, add_bias, add_norm, rms_norm
from specdec.layers.activations import add_slot_bias, clamped_swiglu, gate_tokens
from specdec.layers.block import Block, norm_shapes
from specdec.layers.buffers import pad
from specdec.layers.mlp import MLP, activate, is_gated
from specdec.layers.weights import FusedNames, FusedTensors, Shapes
from specdec.model_config import ExpertsConfig, ModelConfig, require_type
from specdec.quant.packed_matrix import ExpertRouting
from specdec.runtime.code_cache import jitable
from specdec.runtime.elementary import exp, sigmoid
from specdec.runtime.memory import zeros
from specdec.runtime.op_program import Floats1, Floats2, ForwardContext, Ints1, Ints2, Op, Program, kernel
from specdec.runtime.simd import LANES, PANEL_ROWS, Float32, add, extract_lane, fma, load, maximum, reduce_max, splat, store
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


class MoE(Block):
    """Mixture of experts: x += weighted sum of w2 act(w13 rmsnorm(x)) over each token's experts + the shared expert."""

    norm_name = MLP.norm_name
    fused: ClassVar[FusedNames] = {
        "experts_up": FusedTensors(("experts_w1", "experts_w3"), interleaved=True),
        "experts_down": FusedTensors(("experts_w2",)),
        "shared_up": FusedTensors(("shared_w1", "shared_w3"), interleaved=True),
        "shared_down": FusedTensors(("shared_w2",)),
        "experts_b13": FusedTensors(("experts_b1", "experts_b3"), interleaved=True, is_table=True),
        "experts_b2": FusedTensors(("experts_b2",), is_table=True),
    }

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes by name.

        router (E, D); experts_w1, experts_w3 (E, F, D); experts_w2 (E, D, F). Without a gate, there is no experts_w3 and no
        shared_w3.
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
        return norm_shapes(config, cls.norm_name) | tensors | ({"shared_gate": (1, dim)} if e.shared_gate else {})

    def ops(self) -> Program:
        """Return the block's program."""
        config, new, scratch = self.config, self.new, self.b.scratch
        e, (source, before) = get_experts_config(config), self.prepare_input()
        router_ops, expert_ops, sum_ops = self.make_expert_ops(source, source, before, self.b.x[0])
        if e.shared_hidden_dim:
            up, hidden = self.make_rows("shared_up"), new.rows(pad(e.shared_hidden_dim), 1)
            router_ops.append(self.matrix("shared_up").matmul(up, source, scratch, unit=1 + is_gated(config)))
            router_ops.append(activate(config, hidden, up))
            sum_ops.append(self.matrix("shared_down").matmul(self.b.x[0], hidden, scratch, accumulate=True))
            if e.shared_gate:
                gates = new.rows(PANEL_ROWS)
                gate_scratch = self.make_scratch("shared_gate")
                router_ops.append(self.matrix("shared_gate").matmul(gates, source, gate_scratch))
                expert_ops.append(gate_tokens(hidden, gates))
        return [[*before, *router_ops], expert_ops, sum_ops]

    def make_expert_ops(
        self, source: Float32, routed: Float32, before: list[Op], out: Float32
    ) -> tuple[list[Op], list[Op], list[Op]]:
        """Return the ops of the three phases of mixture of experts, as three lists.

        Phases: the router's matmul; routing, then the experts' first matrices; their second matrices, then the weighted sum by
        rank, which is added to out, or replaces it if the experts run parallel to an MLP.

        A pass has T k slots. up (T k, 2 F padded, or F padded without a gate), hidden (1, T k, F padded) and slot_out (T k, D
        padded) hold the slots' rows, scratch and gathered those of one expert in the form that the weight format multiplies.

        Args:
            source: Input of the experts.
            routed: Input of the router.
            before: Ops that compute source.
            out: Output (T, D padded).
        """
        config, b, new, n_threads = self.config, self.b, self.new, self.b.sizes.n_threads
        e, n_parts = get_experts_config(config), 1 + is_gated(config)
        n_slots = MAX_BATCH_TOKENS * e.n_experts_used
        widest = max(pad(config.dim), self.w.scratch_words)
        up = new.scratch(n_slots, n_parts * pad(e.hidden_dim))
        slot_out = new.scratch(n_slots, pad(config.dim))
        hidden = new.scratch(1, n_slots, pad(e.hidden_dim))
        scratch = new.scratch(n_threads, n_slots, self.matrix("experts_down").scratch_words)
        gathered = new.scratch(n_threads, MAX_BATCH_TOKENS, widest)
        routing = self._make_routing_args()
        slots = ExpertRouting(routing.tokens, routing.starts)
        up_op = self.matrix("experts_up").expert_matmul(up, source, b.scratch, gathered, slots, unit=n_parts)
        down_op = self.matrix("experts_down").expert_matmul(
            slot_out, hidden, scratch, gathered, slots, per_token=e.n_experts_used
        )
        router = self.matrix("router").matmul(routing.scores, routed, self.make_scratch("router"))
        router_ops, down_ops, activation = [router], [down_op], activate(config, hidden, up, e.n_experts_used)
        if e.swiglu_limit:
            activation = clamped_swiglu(hidden, up, self.vector("experts_b13"), slots.starts, e.swiglu_limit, e.swiglu_alpha)
            router_ops.append(add_bias(routing.scores, self.vector("router_b"), 1, False))
            down_ops.append(add_slot_bias(slot_out, self.vector("experts_b2"), slots.starts))
        chosen, n_read = (routing.slots, routing.weights, routing.starts), b.experts_read[self.i : self.i + 1]
        sum_op = add_experts(out, slot_out, *chosen, n_read, e.n_experts_used, int(not e.has_parallel_mlp))
        return router_ops, [*before, route(*routing), up_op, activation], [route(*routing), *down_ops, sum_op]

    def _make_routing_args(self) -> "RoutingArgs":
        new, n_threads, e = self.new, self.b.sizes.n_threads, get_experts_config(self.config)
        n_slots, width, scoring = MAX_BATCH_TOKENS * e.n_experts_used, pad(e.n_experts), get_scoring(e)
        bias = self.find_vector("router_bias")
        return RoutingArgs(
            scores=new.rows(width),
            bias=bias if bias.size else zeros(width),
            probs=new.scratch(n_threads, width + pad(e.n_groups)),
            tokens=new.scratch(n_threads, n_slots, dtype=np.int64),
            starts=new.scratch(n_threads, e.n_experts + 1, dtype=np.int64),
            slots=new.scratch(n_threads, n_slots, dtype=np.int64),
            weights=new.scratch(n_threads, n_slots),
            n_experts_used=e.n_experts_used,
            scoring=scoring,
            norm_topk_prob=int(e.norm_topk_prob),
            eps={SIGMOID: e.sum_eps, SPARSEMIXER: e.sparsemixer_threshold}.get(scoring, 0.0),
            scale=e.routed_scaling_factor,
            expert_scales=self.find_vector("expert_scale"),
            n_groups=e.n_groups,
            n_groups_used=e.n_groups_used,
        )


class ParallelMoE(MoE):
    """Experts parallel to an MLP (Gemma 4): x = factor (x + norm(norm(mlp(norm(x))) + norm(experts(norm(x))))).

    Each norm has its own weights, also the norm of the router's input.
    """

    fused: ClassVar[FusedNames] = {**MLP.fused, **MoE.fused}

    @classmethod
    def shapes(cls, config: ModelConfig) -> Shapes:
        """Return the shapes of the tensors of an MLP and experts, by name.

        router_scale (D,): factors of the router's input. expert_scale (E,): factors of the experts' weights.
        """
        e, dim = get_experts_config(config), config.dim
        norms = dict.fromkeys(("rms_experts", "rms_mlp_out", "rms_experts_out"), (dim,))
        scales = {"router_scale": (dim,), "expert_scale": (e.n_experts,)}
        return MLP.shapes(config) | super().shapes(config) | scales | norms

    def ops(self) -> Program:
        """Return the block's program."""
        config, b, new = self.config, self.b, self.new
        dim, eps, width = config.dim, config.norm_eps, pad(config.dim)
        routed, experts_input = new.rows(width, b.sizes.n_threads), new.rows(width, b.sizes.n_threads)
        router_weight = self.vector("router_scale") * np.float32(1 / np.sqrt(np.float32(dim)))
        before = [rms_norm(experts_input, b.x, self.vector("rms_experts"), dim, eps, False, 0)]
        experts = new.rows(width, 1)
        router_ops, expert_ops, sum_ops = self.make_expert_ops(experts_input, routed, before, experts[0])
        up, hidden = self.make_rows("up"), new.rows(pad(config.hidden_dim), 1)
        factor = self.get_layer_scale(not config.per_layer_inputs)
        branch, branch_sum = new.rows(width, 1), new.rows(width, 1)
        return [
            [
                self.norm(),
                self.matrix("up").matmul(up, b.normed, b.scratch, unit=2),
                activate(config, hidden, up),
                rms_norm(routed, b.x, router_weight, dim, eps, False, 0),
                *router_ops,
            ],
            [self.matrix("down").matmul(branch[0], hidden, self.make_scratch("down")), *expert_ops],
            sum_ops,
            [
                add_norm(branch_sum[0], branch, self.vector("rms_mlp_out"), dim, eps, 1.0, False),
                add_norm(branch_sum[0], experts, self.vector("rms_experts_out"), dim, eps, 1.0, True),
            ],
            [add_norm(b.x[0], branch_sum, self.vector("rms_ffn_out"), dim, eps, factor, True)],
        ]


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
        max_score, nan_or_zero = splat(-np.inf), np.float32(0.0)
        for i in range(0, width, LANES):
            score_vector = load(p.scores, row + i)
            if p.scoring == SIGMOID:
                score_vector = add(sigmoid(score_vector), load(p.bias, i))
            store(p.probs, thread * p.probs.shape[1] + i, score_vector)
        for expert in range(n_experts):
            score = p.scores[t, expert]
            if score != score:  # a NaN of an expert that is not chosen makes the token NaN, too
                nan_or_zero = score
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
            weights[at + rank] = share * p.scale + nan_or_zero
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
        p.n_read[0] = 0
        for expert in range(p.starts.shape[1] - 1):
            p.n_read[0] += p.starts[thread, expert + 1] > p.starts[thread, expert]
    first, last = get_chunk_range(branch.shape[1] // PANEL_ROWS, run.chunk, run.n_chunks)
    for t in range(run.n_tokens):
        for i in range(first * PANEL_ROWS, last * PANEL_ROWS, LANES):
            total = splat(0.0)
            for choice in range(t * n_experts_used, (t + 1) * n_experts_used):
                at = slots[thread, choice] * branch.shape[1] + i
                total = fma(load(branch, at), splat(weights[thread, choice]), total)
            store(x, t * x.shape[1] + i, add(load(x, t * x.shape[1] + i), total) if p.accumulate else total)
