"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): a router chooses which MLPs a token goes through. Operations.

Shapes: T tokens of this pass, E experts, k of them for a token. A slot is one token's use of one expert: the slots of a pass lie
expert by expert, in each by ascending token. So an expert's tokens are neighbours, and a pass reads each expert once.

A token's text depends on nothing else in the pass: which experts it goes through is told by its own row of the router's product,
each of its slots is the product that it would be alone, and they are added up by rank, the likeliest first.

Every thread routes for itself, in each phase anew: choosing takes less than the barrier that would hand it on, and a thread may
have come late.
"""

from typing import NamedTuple

import numpy as np

from specdec.runtime.code_cache import inner
from specdec.runtime.elementary import exp, sigmoid
from specdec.runtime.program import Floats1, Floats2, Ints1, Ints2, Pass, operation
from specdec.runtime.simd import LANES, add, fma, load, maximum, reduce_max, splat, store
from specdec.runtime.tile import STRIP_ROWS
from specdec.runtime.work_stealing import share

OF_CHOSEN, OF_ALL, SIGMOID = range(3)  # what makes weights of a token's scores: softmax of the chosen ones, or of all; sigmoids


class Routing(NamedTuple):
    """What `route` takes.

    scores (T, E padded): the router's product; bias (E padded): is added to what chooses, and to no weight. way: one of those
    above; is_normed: whether sigmoids are divided by their sum + eps; scale: of all weights; factors (E padded): of each expert's
    own, or nothing. odds (threads, E padded): room.
    It fills for each thread: tokens (threads, T k), whose slot each is; starts (threads, E + 1), where an expert's slots begin;
    places and weights (threads, T k): of token t's choice of rank r, at t k + r, its slot and what it counts.
    """

    scores: Floats2
    bias: Floats1
    odds: Floats2
    tokens: Ints2
    starts: Ints2
    places: Ints2
    weights: Floats2
    n_chosen: int
    way: int
    is_normed: int
    eps: float
    scale: float
    factors: Floats1


@inner
def choose(odds, row, n_experts, chosen, at, n_chosen):
    """The n_chosen largest of odds[row], in chosen from `at` on: the largest first, of equals the lower one first.

    None is there twice, whatever they are: a NaN is no larger than anything.
    """
    for rank in range(n_chosen):
        best = -1
        for expert in range(n_experts):
            if best < 0 or odds[row, expert] > odds[row, best]:
                is_free = True
                for i in range(at, at + rank):
                    is_free = is_free and chosen[row, i] != expert
                best = expert if is_free else best
        chosen[row, at + rank] = best


@operation
def route(run: Pass, thread: int, p: Routing) -> None:
    """Which experts each token goes through, what each counts, and in which slots they lie; see `Routing`."""
    if run.begins == 0:
        return
    n_experts, n_chosen, width = p.starts.shape[1] - 1, p.n_chosen, p.scores.shape[1]
    weights, chosen = p.weights[thread], p.places  # of experts, until they are slots
    for t in range(run.n_tokens):
        row, at = t * width, t * n_chosen
        top, flaw = splat(-np.inf), np.float32(0.0)
        for i in range(0, width, LANES):
            odds = load(p.scores, row + i)
            if p.way == SIGMOID:
                odds = add(sigmoid(odds), load(p.bias, i))
            store(p.odds, thread * width + i, odds)
        for expert in range(n_experts):
            score = p.scores[t, expert]
            flaw += np.float32(0.0) if score == score else score  # a NaN that is not chosen spoils the token, too
            top = maximum(splat(score), top)
        choose(p.odds, thread, n_experts, chosen, at, n_chosen)
        minus_top = splat(-reduce_max(top))
        for i in range(0, width, LANES):
            score = load(p.scores, row + i)
            store(p.odds, thread * width + i, sigmoid(score) if p.way == SIGMOID else exp(add(score, minus_top)))
        total = np.float32(0.0)
        for i in range(n_experts if p.way == OF_ALL else n_chosen):
            total += p.odds[thread, i if p.way == OF_ALL else chosen[thread, at + i]]
        divisor = np.float32(1.0) if p.way == SIGMOID and p.is_normed == 0 else total + p.eps
        for rank in range(n_chosen):
            expert = chosen[thread, at + rank]
            weights[at + rank] = p.odds[thread, expert] / divisor * p.scale + flaw
            if p.factors.size > 0:
                weights[at + rank] *= p.factors[expert]
    place_slots(p, thread, run.n_tokens * n_chosen)


class Sum(NamedTuple):
    """What `add_experts` takes: x (T, D padded), branch (slots, D padded) and `Routing`'s tables; adding: whether x is added
    to, or filled. n_read (1,): becomes how many experts the pass has read.
    """

    x: Floats2
    branch: Floats2
    places: Ints2
    weights: Floats2
    starts: Ints2
    n_read: Ints1
    n_chosen: int
    adding: int


@inner
def n_with_tokens(starts):
    """How many experts have a slot."""
    n = 0
    for expert in range(starts.size - 1):
        n += starts[expert + 1] > starts[expert]
    return n


@inner
def place_slots(p, thread, n):
    """The n choices of places[thread] become slots, expert by expert."""
    starts, places, tokens = p.starts[thread], p.places[thread], p.tokens[thread]
    n_experts = starts.size - 1
    starts[:] = 0
    for i in range(n):
        starts[places[i] + 1] += 1
    for expert in range(n_experts):
        starts[expert + 1] += starts[expert]
    for i in range(n):  # each start moves on to the next one's
        slot = starts[places[i]]
        starts[places[i]] += 1
        tokens[slot], places[i] = i // p.n_chosen, slot
    for expert in range(n_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@operation
def add_experts(run: Pass, thread: int, p: Sum) -> None:
    """x[t] (+)= the sum of weight * branch[slot] over the token's choices, by rank: this part's strips of the product before."""
    x, branch, places, weights, n_chosen = p.x, p.branch, p.places, p.weights, p.n_chosen
    if run.part == 0:
        p.n_read[0] = n_with_tokens(p.starts[thread])
    first, last = share(branch.shape[1] // STRIP_ROWS, run.part, run.n_parts)
    for t in range(run.n_tokens):
        for i in range(first * STRIP_ROWS, last * STRIP_ROWS, LANES):
            total = splat(0.0)
            for choice in range(t * n_chosen, (t + 1) * n_chosen):
                at = places[thread, choice] * branch.shape[1] + i
                total = fma(load(branch, at), splat(weights[thread, choice]), total)
            store(x, t * x.shape[1] + i, add(load(x, t * x.shape[1] + i), total) if p.adding else total)
