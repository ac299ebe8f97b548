"""What passes of models take on this machine: timed in turns, the least of several. Knows no tokenizers."""

import itertools
import math
import time
from collections.abc import Callable, Sequence

from ..machine.tiles import TILE_TOKENS
from ..sampling import TARGET_NOISE, Sampler, Sampling
from ..text.vocabulary import Vocabulary
from ..transformer import Transformer
from .estimates import Costs
from .heads import Head

# Passes over so many tokens are timed in turns, for about so long: of a slow target over the first two, and twice unless once
# takes SLOW seconds. Where a second tile begins, a pass costs a step more.
COSTS_TOKENS, COSTS_SECONDS, SLOW = (TILE_TOKENS, 1, TILE_TOKENS + 1, 2, 4, 2 * TILE_TOKENS, 32), 0.03, 0.1
SPREAD = 7919  # a prime, by which ids lie apart
# Of the choice of threads: tokens a trial; the first number unless so much slower
TRIAL_TOKENS, TRIAL_SECONDS, TRIAL_MARGIN = 4, 0.05, 1.25


def costs_of(target: Transformer, draft: Transformer | None, vocabulary: Vocabulary) -> Costs:
    """What passes over some tokens take, and a token of the draft, with their draws: the least of several, in turns."""
    sampler = Sampler(vocabulary.n_target, Sampling(), vocabulary.n_common)
    probs = sampler.new_probs()
    tokens = [i * SPREAD % vocabulary.n_common for i in range(max(COSTS_TOKENS))]  # as many experts as a text's tokens choose

    def seconds(model: Transformer, n: int) -> float:
        of = model.target if isinstance(model, Head) else model
        with model.lock, of.lock:
            if isinstance(model, Head):  # behind which a head drafts: another text may have had its turn
                of.forward([0], 0)
                if n > model.n_positions or not model.drafts_for([0, 0]):  # a proposal is empty, and takes nothing
                    return 0.0
            begin = time.perf_counter()
            for logits in model.forward(tokens[:n], n if model is target else 1):
                sampler.draw(probs, logits, TARGET_NOISE, n)
            return time.perf_counter() - begin

    jobs = [(target, n) for n in COSTS_TOKENS if n <= target.n_positions]
    # as in a step, a draft comes behind a pass of few tokens, which has put it out of the cache; its second finds it there
    texts = (2, 3) if isinstance(draft, Head) else (1, 1)  # a head's first is by what that pass has computed, its second a guess
    at = min(2, len(jobs))
    jobs[at:at] = [(draft, n) for n in texts] if draft else []
    least = [math.inf] * len(jobs)
    begin = time.perf_counter()
    for cycle in itertools.count(1):
        for i, (model, n) in enumerate(jobs):
            if i < 4 or time.perf_counter() < begin + COSTS_SECONDS:
                least[i] = min(least[i], seconds(model, n))
        if time.perf_counter() > begin + (COSTS_SECONDS if cycle > 1 else SLOW):
            break
    first, token = (least.pop(at), least.pop(at)) if draft else (0.0, 0.0)
    n_tokens = [n for model, n in jobs if model is target]
    passes = {n: taken for n, taken in zip(n_tokens, least, strict=True) if taken < math.inf}
    return Costs(passes, token, max(0.0, first - token))


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
