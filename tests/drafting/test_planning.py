"""How long proposals get, played with costs and acceptance that are known: against every fixed length, and against no draft."""

import math
import random

import numpy as np
import pytest

from specdec.drafting.estimates import MAX_GAMMA, ODDS_RATES, Acceptance, Costs, bucket_of
from specdec.drafting.planning import TRIAL_ROUNDS, AutoLength, FixedLength
from specdec.kernels import MAX_TOKENS

# microseconds of a pass over so many tokens, and of a draft's token: stories6M from L3, a large target, a dear draft, an int8
# target in L3, and a draft dearer than its target
MACHINES = {
    "stories6M": ({1: 776, 4: 755, 8: 1105, 16: 1870, 64: 6000}, 27.0),
    "large": ({1: 1000, 8: 1050, 16: 1500, 64: 3000}, 40.0),
    "dear draft": ({1: 1000, 8: 1100, 16: 2000, 64: 7000}, 300.0),
    "int8 in L3": ({1: 150, 2: 170, 4: 210, 8: 320, 16: 650, 64: 2800}, 30.0),
    "swapped": ({1: 100, 8: 200, 64: 1200}, 900.0),
}
# of a pair: the mean of its margins, and how often a token of no margin stands
PAIRS = {"good": (3.0, 0.5), "middling": (1.5, 0.3), "weak": (0.7, 0.2), "hopeless": (1.0, None)}
TEXTS, TOKENS = 20, 200


def seconds_of(passes, n):
    """As the machine has it: between the points, and beyond them in proportion."""
    points = sorted(passes)
    return float(np.interp(n, points, [passes[x] for x in points]))


def play(plan, machine, pair, seed):
    """Tokens a second of a text."""
    passes, draft = MACHINES[machine]
    mean, least = PAIRS[pair]
    rng, seconds, tokens = random.Random(seed), 0.0, 0
    while tokens < TOKENS:
        n, n_accepted, stands = 0, 0, True
        if plan.begins(TOKENS - tokens - 1):
            while True:
                margin = rng.expovariate(1 / mean)
                chance = 0.02 if least is None else 1 - (1 - least) * math.exp(-margin)
                stands = stands and rng.random() < chance
                n, n_accepted = n + 1, n_accepted + stands
                if not plan.goes_on(margin):
                    break
        pass_seconds = seconds_of(passes, n + 1) * rng.lognormvariate(0, 0.05)
        draft_seconds = n * draft * rng.lognormvariate(0, 0.05)
        plan.saw(n, n_accepted, pass_seconds, draft_seconds)
        seconds, tokens = seconds + pass_seconds + draft_seconds, tokens + n_accepted + 1
    return tokens / seconds


def mean_of(new_plan, machine, pair):
    return np.mean([play(new_plan(), machine, pair, seed) for seed in range(TEXTS)])


@pytest.mark.campaign
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("machine", MACHINES)
def test_automatic_is_near_the_best_fixed_length_and_never_far_below_no_draft(machine, pair):
    """From its first token on, 20 texts of 200 tokens; and better still where it has learned before."""
    costs, draft = MACHINES[machine]
    fixed = {gamma: mean_of(lambda gamma=gamma: FixedLength(gamma), machine, pair) for gamma in (0, 1, 2, 3, 4, 5, 6, 8, 12)}
    cold = mean_of(lambda: AutoLength(Costs(costs, draft), Acceptance()), machine, pair)
    known = Costs(costs, draft), Acceptance()
    warm = mean_of(lambda: AutoLength(*known), machine, pair)
    assert cold > 0.92 * max(fixed.values())
    assert warm > 0.97 * max(fixed.values())
    assert cold > 0.98 * fixed[0]


def test_a_draft_that_is_no_use_is_left_out_and_looked_at_again():
    costs, draft = MACHINES["stories6M"]
    plan = AutoLength(Costs(costs, draft), Acceptance())
    play(plan, "stories6M", "hopeless", 1)
    drafted = []
    for _ in range(2000):
        begins = plan.begins(50)
        drafted.append(begins)
        if begins:
            assert plan.goes_on(0.5) and not plan.goes_on(0.5)  # a trial is two tokens long
        plan.saw(2 * begins, 0, costs[1], 2 * draft * begins)
    assert sum(drafted) >= 20
    assert 2 * sum(drafted) * draft < 0.011 * len(drafted) * costs[1]


def test_a_draft_that_becomes_good_is_taken_up_again():
    costs, draft = MACHINES["large"]
    plan = AutoLength(Costs(costs, draft), Acceptance())
    slow = [play(plan, "large", "hopeless", seed) for seed in range(3)][-1]
    fast = [play(plan, "large", "good", seed) for seed in range(10)][-1]
    assert fast > 3 * slow


def test_a_draft_that_looked_too_dear_is_tried_with_the_next_text():
    """Something else had the machine while it was timed."""
    passes, draft = MACHINES["large"]
    costs = Costs(passes, 1.9 * passes[1])
    assert costs.needed_survivals(0.8)[0] > 1
    for seed in range(3):
        play(AutoLength(costs, Acceptance()), "large", "good", seed)
    assert costs.draft < 2 * draft


def test_tokens_that_cost_nothing_are_taken_as_far_as_their_judging_pays():
    """Of passes whose each token costs a tenth of the first."""
    plan = AutoLength(Costs({1: 1.0, 64: 7.3}, 0.0), Acceptance())
    for _ in range(300):  # what is confident stands, what is not does not
        n = plan.takes([20.0, 20.0, 0.3, 20.0]) if plan.begins(20) else 0
        plan.saw(n, min(n, 2), 1.0 + n / 10, 0.0)
    assert plan.begins(20)
    assert plan.takes([20.0] * 7) == 7
    assert sum(plan.takes([0.3] * 7) for _ in range(20)) <= TRIAL_ROUNDS
    assert plan.takes([]) == 0


def test_fixed_is_what_it_says():
    plan = FixedLength(3)
    assert plan.begins(10) and [plan.goes_on(0.0) for _ in range(3)] == [True, True, False]
    assert plan.begins(2) and [plan.goes_on(9.0) for _ in range(2)] == [True, False]
    assert not plan.begins(0)


def test_costs_follow_the_machine():
    costs = Costs({1: 1.0, 8: 2.0}, 0.1)
    assert costs.passes[1] == 1 and costs.passes[8] == 2 and costs.passes[64] == pytest.approx(16)
    for _ in range(60):
        costs.saw(3, 3 * 1.4286, 0.6)  # everything takes three times as long as the interpolation says, three draft tokens 0.6
    assert costs.of(4) == pytest.approx(3 * 1.4286, rel=0.02)
    assert costs.start + 3 * costs.draft == pytest.approx(0.6, rel=0.02)
    assert costs.of(1) > 1.5  # though it was never seen
    assert (np.diff(costs.passes) >= 0).all()  # though 5 to 8 were never seen either
    for n in (1, 5, 2, 6) * 60:
        costs.saw(n, costs.of(n + 1), 0.5 + 0.02 * n)
    assert costs.start == pytest.approx(0.5, rel=0.05)
    assert costs.draft == pytest.approx(0.02, rel=0.25)
    before = np.array(costs.passes)
    costs.saw(0, 1e9, 0.0)  # somebody pressed Ctrl-Z
    assert (np.array(costs.passes) < 1.2 * before).all()


def test_what_survival_has_to_be_rises_with_the_price_and_is_never_less_than_nothing():
    cheap, dear = (Costs({1: 1.0, 64: 4.0}, draft).needed_survivals(0.8) for draft in (0.01, 0.3))
    assert MAX_GAMMA + 1 == MAX_TOKENS
    assert all(0 <= cheap[k] < dear[k] for k in range(MAX_GAMMA))
    assert cheap[MAX_GAMMA] == math.inf  # no room for another
    assert Costs({1: 1.0, 64: 64.0}, 5.0).needed_survivals(0.9)[0] > 1  # none pays


@pytest.mark.parametrize("confidence", [0.0, 0.1, 0.5, 1.0, 7.9, 1e300, math.inf])
def test_every_confidence_has_a_bucket(confidence):
    assert 0 <= bucket_of(confidence) <= bucket_of(2 * confidence + 0.2) < 12


# What may be wrong about a machine: factors of the costs that were measured (a pass over one token, over more, a draft's token),
# factors of the target's and the draft's real ones from the middle of the text on, and how often a token's time has a stall, of
# how many tokens' time.
RIGHT, STEADY, CALM = (1.0, 1.0, 1.0), (1.0, 1.0), (0.0, 0.0)
ODD = {
    "one token measured three times too dear": ((3.0, 1.0, 1.0), STEADY, CALM),
    "one token measured three times too cheap": ((1 / 3, 1.0, 1.0), STEADY, CALM),
    "more tokens measured three times too dear": ((1.0, 3.0, 1.0), STEADY, CALM),
    "more tokens measured three times too cheap": ((1.0, 1 / 3, 1.0), STEADY, CALM),
    "all passes measured three times too dear": ((3.0, 3.0, 1.0), STEADY, CALM),
    "all passes measured three times too cheap": ((1 / 3, 1 / 3, 1.0), STEADY, CALM),
    "the draft measured three times too dear": ((1.0, 1.0, 3.0), STEADY, CALM),
    "the draft measured three times too cheap": ((1.0, 1.0, 1 / 3), STEADY, CALM),
    "the target becomes slow": (RIGHT, (3.0, 1.0), CALM),
    "the target becomes fast": (RIGHT, (1 / 3, 1.0), CALM),
    "the draft becomes slow": (RIGHT, (1.0, 3.0), CALM),
    "the draft becomes fast": (RIGHT, (1.0, 1 / 3), CALM),
    "both become slow": (RIGHT, (3.0, 3.0), CALM),
    "both become fast": (RIGHT, (1 / 3, 1 / 3), CALM),
    "a core that is busy now and then": (RIGHT, STEADY, (0.01, 30.0)),
    "a core that is busy often": (RIGHT, STEADY, (0.1, 5.0)),
    "nothing": (RIGHT, STEADY, CALM),
}
SHAPES = {
    "8 cost 7": {1: 1.0, 8: 7.0},
    "8 cost 10": {1: 1.0, 2: 1.9, 4: 4.2, 8: 10.0, 16: 20.0},
    "8 cost 1.4": {1: 1.0, 4: 1.0, 8: 1.4, 16: 2.4, 64: 8.0},
}
# of a draft model: the mean of its margins and how often a token of no margin stands, or all do; of n-grams, which cost nothing:
# how often there are some, the share that they state and how often they stand
MODELS = {"useless": (1.0, None), "mediocre": (1.5, 0.3), "perfect": (4.0, 1.0)}
NGRAMS = {"useless": (0.7, 0.8, 0.03), "overstated": (0.7, 0.9, 0.4), "perfect": (0.9, 0.95, 1.0)}
DRAFTS = 0.0, 0.03, 0.3, 0.9  # times a token of the target


class OddMachine:
    """A target, whose token takes a second, and what drafts for it."""

    def __init__(self, shape, draft, odd, kind):
        self.passes = [0.0, *(seconds_of(SHAPES[shape], n) * max(1.0, n / max(SHAPES[shape])) for n in range(1, MAX_TOKENS + 1))]
        self.draft, self.kind = draft, kind
        self.measured, self.change, (self.stall_rate, self.stall) = ODD[odd]

    def plan(self):
        one, more, draft = self.measured
        passes = {n: self.passes[n] * (one if n == 1 else more) for n in (1, 2, 4, 8, 9, 16, 32)}
        costs = Costs(passes, draft * self.draft)
        return AutoLength(costs, Acceptance() if self.draft else Acceptance(ODDS_RATES))

    def propose(self, plan, rng):
        """How many tokens, and how many of them stand."""
        tokens, n = list[bool](), 0
        if self.draft:
            mean, least = MODELS[self.kind]
            margin = math.inf
            while not tokens or plan.goes_on(margin):
                margin = rng.expovariate(1 / mean)
                tokens.append(rng.random() < (0.02 if least is None else 1 - (1 - least) * math.exp(-margin)))
            n = len(tokens)
        else:
            found, stated, stands = NGRAMS[self.kind]
            most = min(plan.most, int(math.log(0.2) / math.log(stated))) if rng.random() < found else 0
            n = plan.takes([stated / (1 - stated)] * most) if most else 0
            tokens = [rng.random() < stands for _ in range(n)]
        return n, [*tokens, False].index(False)

    def stalled(self, seconds, rng):
        """As a clock has them."""
        n_stalls = sum(rng.random() < self.stall_rate * seconds / 8 for _ in range(8))
        return seconds + sum(self.stall * rng.expovariate(1.0) for _ in range(n_stalls))

    def play(self, seed):
        """Seconds of a text by the target alone, and drafted, without stalls; what is told of the first; the second with them."""
        rng, plan = random.Random(seed), self.plan()
        alone = seconds = stalled = 0.0
        tokens = n_missed = 0
        while tokens < TOKENS:
            target, draft = self.change if tokens >= TOKENS // 2 else STEADY
            n, n_accepted = self.propose(plan, rng) if plan.begins(TOKENS - tokens - 1) else (0, 0)
            draft_seconds = (n + 0.3 * n_missed) * self.draft * draft if n else 0.0
            pass_seconds = self.passes[n + 1] * target * rng.lognormvariate(0, 0.05)
            n_missed = 0 if n else n_missed + 1
            clock = self.stalled(pass_seconds, rng), self.stalled(draft_seconds, rng)
            plan.saw(n, n_accepted, *clock)
            stalled += sum(clock)
            seconds += pass_seconds + draft_seconds
            alone += (n_accepted + 1) * target * self.passes[1]
            tokens += n_accepted + 1
        return alone, seconds, plan.costs.plain_seconds * tokens, stalled


@pytest.mark.campaign
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_machine_is_slower_than_the_target_alone(shape, odd):
    """From the first text of 200 tokens on, with drafts of every price and quality: 0.95 of it at least."""
    for draft in DRAFTS:
        for kind in MODELS if draft else NGRAMS:
            played = [OddMachine(shape, draft, odd, kind).play(seed) for seed in range(3)]
            alone, seconds, *_ = np.sum(played, axis=0)
            assert alone / seconds > 0.95, (draft, kind)


@pytest.mark.parametrize("odd", ODD)
def test_what_the_target_alone_would_have_taken_is_told_as_it_was(odd):
    """Though few steps were made without a draft."""
    for draft, kind in ((0.0, "overstated"), (0.03, "mediocre"), (0.9, "useless")):
        for seed in range(3):
            alone, seconds, told, stalled = OddMachine("8 cost 1.4", draft, odd, kind).play(seed)
            assert told == pytest.approx(alone * stalled / seconds, rel=0.25), (draft, kind, seed)


def test_a_stall_or_two_do_not_end_drafting():
    """Of a draft with which a text is far faster."""
    for odd in ("a core that is busy now and then", "a core that is busy often"):
        alone, seconds, *_ = np.sum([OddMachine("8 cost 1.4", 0.03, odd, "perfect").play(seed) for seed in range(6)], axis=0)
        assert alone / seconds > 2


@pytest.mark.parametrize("draft", [0.0, 0.1])
def test_what_a_busy_machine_made_look_too_dear_is_tried_again_within_some_texts(draft):
    """Each pass of more than one token took 500 times as long, and each draft."""
    machine = OddMachine("8 cost 1.4", draft, "nothing", "perfect")
    first = machine.plan()
    for n in (0, 2, 0, 1, 1, 1, 1, 0):
        first.costs.saw(n, machine.passes[n + 1] * (500 if n else 1), 500 * n * draft)
    assert first.costs.of(8) > 100
    for seed in range(8):
        machine.plan = lambda: AutoLength(first.costs, first.acceptance)
        alone, seconds, *_ = machine.play(seed)
    assert alone / seconds > 2


def test_a_pass_over_more_tokens_is_never_taken_to_be_cheaper_than_one_over_one():
    """Whatever stalls a target alone had had since one was seen."""
    for seed in range(20):
        rng, costs = random.Random(seed), Costs({1: 1.0, 8: 3.0, 64: 20.0}, 0.1)
        for _ in range(500):
            n = rng.choice((0, 0, 0, 2))
            costs.saw(n, seconds_of({1: 1.0, 8: 3.0}, n + 1) * rng.choice((1, 1, 100)), 0.1 * n)
            assert costs.of(2) >= 0.8 * costs.of(1)
