"""Kernels of mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538), where a router chooses the MLPs of each token.

Shapes: T tokens of this pass, E experts, k experts per token, D dim. A slot is one token's use of one expert. The slots of a pass
are sorted by expert, then by token. So an expert's tokens are neighbors, and a pass reads each expert once.

A token's output does not depend on the other tokens of the pass: its own row of the router's matmul chooses its experts, each
slot is the matmul that it would be alone, and slots are summed by rank, the most probable expert first.

Every thread routes for itself, again in each phase: choosing takes less time than the barrier that would share the result, and a
thread may have started late.
"""

from typing import NamedTuple

import numpy as np

from specdec.runtime.code_cache import jitable
from specdec.runtime.elementary import exp, sigmoid
from specdec.runtime.matmul_tile import PANEL_ROWS
from specdec.runtime.op_program import Floats1, Floats2, ForwardContext, Ints1, Ints2, kernel
from specdec.runtime.simd import LANES, add, fma, load, maximum, reduce_max, splat, store
from specdec.runtime.work_stealing import get_chunk_range

# How scores become weights: softmax of the chosen experts, softmax of all, sigmoid
SOFTMAX_OF_CHOSEN, SOFTMAX_OF_ALL, SIGMOID = range(3)


class RoutingArgs(NamedTuple):
    """Arguments of the kernel `route`, which chooses the experts of each token.

    Attributes:
        scores: Output of the router's matmul (T, E padded).
        bias: (E padded), numbers added to the scores that choose experts, but not to weights.
        probs: Scratch (threads, E padded).
        tokens: Output (threads, T k): token of each slot.
        starts: Output (threads, E + 1): first slot of each expert.
        slots: Output (threads, T k): slot of token t's expert of rank r, at t k + r.
        weights: Output (threads, T k): weight of the expert of rank r for token t, at t k + r.
        n_experts_used: Number of experts per token, k.
        scoring: SOFTMAX_OF_CHOSEN, SOFTMAX_OF_ALL or SIGMOID.
        norm_topk_prob: Divide sigmoids by their sum + eps.
        scale: Factor of all weights.
        expert_scales: Factor of each expert (E padded), or empty.
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
            store(p.probs, thread * width + i, score_vector)
        for expert in range(n_experts):
            score = p.scores[t, expert]
            nan_sum += (
                np.float32(0.0) if score == score else score
            )  # a NaN of an expert that is not chosen makes the token NaN, too
            max_score = maximum(splat(score), max_score)
        select_experts(p.probs, thread, n_experts, chosen, at, n_experts_used)
        # weights of the chosen experts
        minus_max = splat(-reduce_max(max_score))
        for i in range(0, width, LANES):
            score = load(p.scores, row + i)
            store(p.probs, thread * width + i, sigmoid(score) if p.scoring == SIGMOID else exp(add(score, minus_max)))
        total = np.float32(0.0)
        for i in range(n_experts if p.scoring == SOFTMAX_OF_ALL else n_experts_used):
            total += p.probs[thread, i if p.scoring == SOFTMAX_OF_ALL else chosen[thread, at + i]]
        divisor = np.float32(1.0) if p.scoring == SIGMOID and p.norm_topk_prob == 0 else total + p.eps
        for rank in range(n_experts_used):
            expert = chosen[thread, at + rank]
            weights[at + rank] = p.probs[thread, expert] / divisor * p.scale + nan_sum
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
