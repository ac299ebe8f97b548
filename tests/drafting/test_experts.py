"""How long proposals get where passes cost by the experts that their tokens choose, played with routing that is known."""

import random

import numpy as np
import pytest

from specdec.drafting.estimates import MARGIN_RATES, ODDS_RATES, Acceptance, Costs, Experts
from specdec.drafting.planning import AutoLength, FixedLength

# Of a mixture: experts, those that a token chooses, and their share of the bytes that a token reads
MIXTURES = {"qwen3": (128, 8, 0.6), "qwen3.5": (256, 8, 0.34), "lfm2": (32, 4, 0.62)}
TOKEN = 0.02  # seconds of a pass over one token
ANOTHER = 0.02  # of that a token more takes in arithmetic
TOKENS = 300
GAMMAS = (1, 2, 3, 4, 6, 8)


class Machine:
    """Passes of a mixture whose tokens choose an expert of one before with the chance `repeats`, else any one."""

    def __init__(self, mixture, repeats, seed=0):
        self.n, self.k, self.share = MIXTURES[mixture]
        self.repeats, self.rng, self.n_read = repeats, random.Random(seed), 0.0

    def seconds(self, n):
        chosen = {*range(self.k)}
        for _ in range(n - 1):
            before, token = [*chosen], set()
            while len(token) < self.k:
                token.add(self.rng.choice(before) if self.rng.random() < self.repeats else self.rng.randrange(self.n))
            chosen |= token
        self.n_read = len(chosen)
        times = self.n_read / self.k
        return TOKEN * (1 - self.share + self.share * times + ANOTHER * (n - 1)) * self.rng.lognormvariate(0, 0.03)

    def costs(self, draft=0.0, wrong=1.0):
        """As they are measured, but for a factor of what a token alone takes."""
        each = TOKEN * self.share
        passes = {n: TOKEN * (1 + ANOTHER * (n - 1)) * (wrong if n == 1 else 1.0) for n in (1, 8, 64)}
        return Costs(passes, draft, 0.0, Experts(self.n, self.k, each, 0.0, lambda: self.n_read))


def write(plan, machine, right, draft=0.0, is_free=True, repeats=None):
    """Tokens a second of a text whose proposals are right so often; repeats: of its routing, by token."""
    rng, tokens, seconds = random.Random(1), 0, 0.0
    odds = right / (1 - right)
    while tokens < TOKENS:
        machine.repeats = machine.repeats if repeats is None else repeats(tokens)
        n = 0
        if plan.begins(TOKENS - tokens):
            if is_free:
                n = plan.takes([odds] * min(16, plan.most))
            else:
                n = 1
                while plan.goes_on(odds):
                    n += 1
        n_accepted = 0
        while n_accepted < n and rng.random() < right:
            n_accepted += 1
        taken = machine.seconds(n + 1)
        plan.saw(n, n_accepted, taken, n * draft)
        tokens, seconds = tokens + n_accepted + 1, seconds + taken + n * draft
    return tokens / seconds


def auto(machine, draft=0.0, wrong=1.0):
    return AutoLength(machine.costs(draft, wrong), Acceptance(MARGIN_RATES if draft else ODDS_RATES))


class Always(FixedLength):
    """Of tokens that come at no cost, too."""

    def takes(self, confidences):
        return min(self.most, len(confidences))


# How often tokens choose an expert that the pass reads anyway: Cohere (2026) tells of 4 tokens that read 2.5 times one's
ROUTINGS = {"random": 0.0, "as texts do": 0.35, "the same again": 0.95, "changing": lambda n: 0.95 if n // 60 % 2 else 0.0}


def speed(new, mixture, routing, right, draft):
    """Of several texts."""
    repeats = ROUTINGS[routing]
    found = []
    for seed in range(4):
        machine = Machine(mixture, 0.0 if callable(repeats) else repeats, seed)
        found.append(write(new(machine), machine, right, draft, not draft, repeats if callable(repeats) else None))
    return 1 / np.mean(1 / np.array(found))


@pytest.mark.parametrize("draft", [0.0, 0.08 * TOKEN])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_automatic_is_near_the_best_fixed_length_and_never_below_no_draft(mixture, routing, draft):
    for right in (0.3, 0.8):
        alone = speed(lambda machine: Always(0), mixture, routing, right, draft)
        best = max(speed(lambda machine, n=n: Always(n), mixture, routing, right, draft) for n in GAMMAS)
        found = speed(lambda machine: auto(machine, draft), mixture, routing, right, draft)
        assert found > 0.97 * alone
        assert found > 0.92 * max(alone, best)  # of 300 tokens, with what is learned first


def test_a_draft_that_is_mostly_right_pays_even_where_routing_is_random():
    for mixture, least in (("qwen3.5", 1.35), ("qwen3", 1.1)):
        alone = speed(lambda machine: Always(0), mixture, "random", 0.8, 0.0)
        assert speed(auto, mixture, "random", 0.8, 0.0) > least * alone


def test_costs_by_tokens_alone_lose_what_experts_tell(monkeypatch):
    """Measured where routing is random, of a text that repeats itself."""
    knowing = speed(auto, "qwen3", "the same again", 0.55, 0.0)
    costs = Machine("qwen3", 0.0).costs()
    curve = {n: costs.of(n) for n in (1, 2, 4, 8, 16, 64)}
    blind = speed(lambda machine: AutoLength(Costs(curve, 0.0), Acceptance(ODDS_RATES)), "qwen3", "the same again", 0.55, 0.0)
    assert knowing > 1.1 * blind


def test_how_much_tokens_repeat_is_told_by_how_many_experts_they_choose():
    for n, k in ((128, 8), (32, 4), (8, 8)):
        for repeats in (0.0, 0.3, 0.9, 1.0):
            experts = Experts(n, k, 1.0, repeats, lambda: 0.0)
            for n_tokens in (2, 5, 16):
                n_read = k * (1 + experts.more[n_tokens])
                assert k <= n_read <= n + 1e-9
                if n > k:
                    assert experts.repeats_of(n_tokens, n_read) == pytest.approx(repeats, abs=1e-6)
    independent = Experts(128, 8, 1.0, 0.0, lambda: 0.0)
    assert 1 + independent.more[4] == pytest.approx(16 * (1 - (1 - 1 / 16) ** 4))


def test_what_an_expert_costs_follows_the_clock():
    """It was measured at half of what it takes."""
    machine = Machine("lfm2", 0.3)
    costs = machine.costs()
    costs.experts.seconds /= 2
    for i in range(600):
        n = (1, 2, 4, 8)[i % 4]
        costs.saw(n - 1, machine.seconds(n), 0.0)
    for n in (2, 4, 8):
        seconds = np.mean([machine.seconds(n) for _ in range(50)])
        assert costs.of(n) == pytest.approx(seconds, rel=0.1)
