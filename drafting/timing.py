"""What passes of models take on this machine: timed in turns, the least of several. Knows no tokenizers."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from ..machine.tiles import TILE_TOKENS
from ..sampling import TARGET_NOISE, Sampler, Sampling
from ..text.vocabulary import Vocabulary
from ..transformer import Transformer
from .estimates import LEAST, NO_EXPERTS, Costs, Experts
from .heads import Head

# Passes over so many tokens are timed in turns, for about so long: of a slow target over the first two, and twice unless once
# takes SLOW seconds, with what else is needed. Where a second tile begins, a pass costs a step more.
COSTS_TOKENS, COSTS_SECONDS, SLOW = (TILE_TOKENS, 1, TILE_TOKENS + 1, 2, 4, 2 * TILE_TOKENS, 32), 0.03, 0.1
# Which passes are timed: over so many tokens of the target, or one of these: over equal ones; a draft's, behind others and itself
ALIKE, FIRST, NEXT = -1, -2, -3
LEAST_APART = 0.25  # times the experts of a token, by which two passes have to differ to tell what experts take
SPREAD = 7919  # a prime, by which ids lie apart
# Of the choice of threads: tokens a trial; the first number unless so much slower
TRIAL_TOKENS, TRIAL_SECONDS, TRIAL_MARGIN = 4, 0.05, 1.25


def costs_of(target: Transformer, draft: Transformer | None, vocabulary: Vocabulary) -> Costs:
    """What passes over some tokens take, and a token of the draft, with their draws: the least of several, in turns."""
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    probs, read = sampler.new_probs(), dict[int, float]()  # of experts, by a layer

    def seconds(name: int, model: Transformer, tokens: list[int]) -> float:
        of = model.target if isinstance(model, Head) else model
        with model.lock, of.lock:
            if isinstance(model, Head):  # behind which a head drafts: another text may have had its turn
                of.forward([0], 0)
                if len(tokens) > model.n_positions or not model.drafts_for([0, 0]):  # a proposal is empty, and takes nothing
                    return 0.0
            begin = time.perf_counter()
            for logits in model.forward(tokens, len(tokens) if model is target else 1):
                sampler.draw(probs, logits, TARGET_NOISE, len(tokens))
            taken = time.perf_counter() - begin
            read[name] = model.experts_read[0]
            return taken

    apart = [i * SPREAD % vocabulary.n_common for i in range(max(COSTS_TOKENS))]  # as many experts as a text's tokens choose
    passes: dict[int, tuple[Transformer, list[int]]] = {n: (target, apart[:n]) for n in COSTS_TOKENS if n <= target.n_positions}
    needed: dict[int, tuple[Transformer, list[int]]] = {n: passes.pop(n) for n in COSTS_TOKENS[:2] if n in passes}
    if target.config.experts and TILE_TOKENS in needed:
        needed[ALIKE] = target, apart[:1] * TILE_TOKENS
    if draft:
        # as in a step, it comes behind a pass of few tokens, which has put it out of the cache; its second finds it there; a
        # head's first is by what that pass has computed, its second a guess
        n_first, n_next = (2, 3) if isinstance(draft, Head) else (1, 1)
        needed |= {FIRST: (draft, apart[:n_first]), NEXT: (draft, apart[:n_next])}
    least = _least(needed | passes, max(4, len(needed)), seconds)
    token, first = least.pop(NEXT, 0.0), least.pop(FIRST, 0.0)
    experts = _experts(target, least, read)
    base = {n: max(taken - experts.more_of(read[n]), LEAST) for n, taken in least.items() if n != ALIKE}
    return Costs(base, token, max(0.0, first - token), experts)


def _least(
    jobs: Mapping[int, tuple[Transformer, list[int]]], n_needed: int, seconds: Callable[[int, Transformer, list[int]], float]
) -> dict[int, float]:
    """The least that each took of those that time was left for, the first ones' at least."""
    least: dict[int, float] = {}
    begin = time.perf_counter()
    for cycle in itertools.count(1):
        for i, (name, job) in enumerate(jobs.items()):
            if i < n_needed or time.perf_counter() < begin + COSTS_SECONDS:
                least[name] = min(least.get(name, math.inf), seconds(name, *job))
        if time.perf_counter() > begin + (COSTS_SECONDS if cycle > 1 else SLOW):
            break
    return least


def _experts(target: Transformer, least: Mapping[int, float], read: Mapping[int, float]) -> Experts:
    """What experts add to passes, by two over as many tokens that choose more and fewer."""
    if ALIKE not in least or not target.config.experts:
        return NO_EXPERTS
    n, n_chosen = target.config.experts.n, target.config.experts.n_chosen
    times, fewer = read[TILE_TOKENS] / n_chosen, read[ALIKE] / n_chosen
    each = (least[TILE_TOKENS] - least[ALIKE]) / (times - fewer) if times > fewer + LEAST_APART else 0.0
    experts = Experts(n, n_chosen, min(max(each, 0.0), least[TILE_TOKENS] / times), 0.0, lambda: target.experts_read[0])
    experts.repeats = experts.repeats_of(TILE_TOKENS, read[TILE_TOKENS])
    return experts.beside


def choose_threads(use: Callable[[int], None], choices: Sequence[int], trial: Callable[[int], float]) -> dict[int, float]:
    """The first of those numbers of threads, or another that is clearly faster; each is tried in turn until the trials have taken
    TRIAL_SECONDS. What each took, as so many times what the first did.

    use: makes all models run on so many; trial: tells what so many tokens take.
    """
    first, seconds = choices[0], dict.fromkeys(choices, 0.0)
    use(1)
    trial(1)  # one thread runs code of its own, which may be yet to be compiled, or loaded
    while sum(seconds.values()) < TRIAL_SECONDS:
        for n in seconds:
            use(n)
            seconds[n] += trial(TRIAL_TOKENS)
    best = min(seconds, key=seconds.__getitem__)
    use(best if TRIAL_MARGIN * seconds[best] < seconds[first] else first)
    return {n: taken / seconds[first] for n, taken in seconds.items()}
