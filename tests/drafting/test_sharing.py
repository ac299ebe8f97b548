"""How long proposals get in passes that texts share, played with costs and acceptance that are known: whatever was measured."""

import random
from functools import cache

import numpy as np
import pytest

from specdec.drafting.estimates import MARGIN_RATES, ODDS_RATES, Acceptance, Costs, Experts
from specdec.drafting.sharing import SharedLength, Sharing
from specdec.kernels import MAX_TOKENS
from tests.drafting.test_planning import seconds_of

MACHINES = {"large": {1: 1.0, 8: 1.1, 16: 1.6, 64: 4.0}, "small": {1: 1.0, 4: 1.0, 8: 1.4, 16: 2.4, 64: 8.0}}
POINTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)
PASSES, LEARNING = 300, 50


def sharing_of(machine, n_texts, draft, wrong):
    """wrong: factors of what was measured: of passes over one token of each text, of others, of a draft's token."""
    of_few, of_more, of_draft = wrong
    passes = {n: seconds_of(MACHINES[machine], n) * (of_few if n <= n_texts else of_more) for n in POINTS}
    return Sharing(Costs(passes, draft * of_draft), Acceptance(MARGIN_RATES if draft else ODDS_RATES))


@cache
def play(machine, n_texts, right, draft, wrong=(1.0, 1.0, 1.0), fixed=None, begin=0, seed=0):
    """Tokens a second of all texts from a pass on; draft: seconds of its token, which is right so often; fixed: how many."""
    rng, passes, odds = random.Random(seed), MACHINES[machine], right / (1 - right)
    sharing = sharing_of(machine, n_texts, draft, wrong)
    plans = [SharedLength(sharing, not draft) for _ in range(n_texts)]
    tokens, seconds = 0, 0.0
    for i in range(PASSES):
        sharing.begin_pass(n_texts, MAX_TOKENS)
        steps = []
        for plan in plans:
            n = 0
            if fixed is not None:
                n = fixed
            elif plan.begins(30):
                if draft:
                    n = 1
                    while plan.goes_on(odds):
                        n += 1
                else:
                    n = plan.takes([odds] * 12)
            sharing.n_tokens += n
            stands = [rng.random() < right for _ in range(n)]
            steps.append((plan, n, [*stands, False].index(False), n * draft * rng.lognormvariate(0, 0.05)))
        n_tokens = n_texts + sum(n for _, n, _, _ in steps)
        taken = seconds_of(passes, n_tokens) * rng.lognormvariate(0, 0.05)
        sharing.saw(n_tokens, taken)
        if fixed is None:
            for plan, n, n_accepted, drafting in steps:
                plan.saw(n, n_accepted, taken, drafting)
        written = n_texts + sum(n_accepted for _, _, n_accepted, _ in steps)
        sharing.brought(n_tokens, written, taken)
        if i >= begin:
            tokens, seconds = tokens + written, seconds + taken + sum(drafting for *_, drafting in steps)
    return tokens / seconds


WRONG = {
    "nothing": (1.0, 1.0, 1.0),
    "all measured beside a busy loop": (2.5, 2.5, 2.5),
    "plain passes three times too dear": (3.0, 1.0, 1.0),
    "plain passes three times too cheap": (1 / 3, 1.0, 1.0),
    "others three times too dear": (1.0, 3.0, 1.0),
    "others three times too cheap": (1.0, 1 / 3, 1.0),
    "the draft three times too dear": (1.0, 1.0, 3.0),
    "the draft three times too cheap": (1.0, 1.0, 1 / 3),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("n_texts", [2, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_wrong_costs_are_found_out_within_fifty_passes(machine, n_texts, wrong):
    """Of a draft that is right four times in five, by the best fixed length; of one that is hardly ever, by none."""
    fixed = max(play(machine, n_texts, 0.8, 0.05, fixed=n, begin=LEARNING) for n in range(6))
    found = [play(machine, n_texts, 0.8, 0.05, WRONG[wrong], begin=LEARNING, seed=seed) for seed in range(3)]
    assert np.mean(found) > 0.88 * fixed
    useless = [play(machine, n_texts, 0.05, 0.05, WRONG[wrong], seed=seed) for seed in range(3)]
    assert np.mean(useless) > 0.93 * play(machine, n_texts, 0.05, 0.05, fixed=0)


def test_a_machine_that_becomes_slow_or_quick_makes_no_proposal_longer_or_shorter():
    """But for a token, as texts gain by proposals."""
    sharing = sharing_of("large", 4, 0.0, WRONG["nothing"])

    def length():
        sharing.begin_pass(4, MAX_TOKENS)
        plan = SharedLength(sharing, True)
        return plan.takes([4.0] * 20) if plan.begins(30) else 0

    before = length()
    for factor in (3.0, 1.0):
        for n_tokens in (16, 4, 16, 16, 12, 4, 4, 16) * 3:
            sharing.begin_pass(4, MAX_TOKENS)
            seconds = factor * seconds_of(MACHINES["large"], n_tokens)
            sharing.saw(n_tokens, seconds)
            sharing.brought(n_tokens, 4 + (n_tokens - 4) // 4, seconds)
        assert before > 4 and abs(length() - before) <= 1


def test_texts_that_choose_other_experts_get_shorter_proposals():
    """What passes showed, not how many tokens they had."""
    lengths = []
    for n_read in (8.0, 40.0):
        costs = Costs({1: 1.0, 64: 1.5}, 0.0, 0.0, Experts(64, 8, 0.5, 0.5, lambda n_read=n_read: n_read))
        sharing = Sharing(costs, Acceptance(ODDS_RATES))
        for _ in range(30):
            sharing.begin_pass(4, MAX_TOKENS)
            sharing.saw(12, 1.0 + 0.5 * 11 / 63 + 0.5 * (n_read / 8 - 1))
        sharing.begin_pass(4, MAX_TOKENS)
        plan = SharedLength(sharing, True)
        lengths.append(plan.takes([4.0] * 20) if plan.begins(30) else 0)
    assert lengths[0] > lengths[1] + 1
