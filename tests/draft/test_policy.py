"""Draft lengths, played with costs and acceptance that are known: against every fixed length, against no draft, and in noise."""

import math
import random
from functools import cache

import numpy as np
import pytest

from specdec.draft.acceptance import MARGIN_RATES, N_BUCKETS, ODDS_RATES, Acceptance, bucket_of
from specdec.draft.costs import CostCurve, ExpertCosts
from specdec.draft.policy import MAX_GAMMA, MAX_OFF, N_PLAIN, CostModel, DraftLengthPolicy, FixedLength
from specdec.engine.decoding import Statistics, Step
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
# of a pair: the mean of its margins, and how often a token of no margin is accepted
PAIRS = {"good": (3.0, 0.5), "middling": (1.5, 0.3), "weak": (0.7, 0.2), "hopeless": (1.0, None)}
SEQUENCES, TOKENS = 20, 200


def seconds_of(passes, n):
    """Return the seconds of a pass over n tokens: between the points, and beyond them in proportion."""
    points = sorted(passes)
    return float(np.interp(n, points, [passes[x] for x in points]))


def policy_for(passes, draft, acceptance=None):
    acceptance = acceptance or Acceptance(MARGIN_RATES if draft else ODDS_RATES)
    return DraftLengthPolicy(CostModel(CostCurve(passes, draft)), acceptance, is_free=not draft)


def play(policy, machine, pair, seed, stall=lambda rng, seconds: seconds, n_tokens=TOKENS):
    """Play a sequence; return its tokens a second, and its statistics."""
    passes, draft = MACHINES[machine]
    mean, least = PAIRS[pair]
    rng, seconds, tokens, statistics = random.Random(seed), 0.0, 0, Statistics()
    while tokens < n_tokens:
        n, n_accepted, accepted = 0, 0, True
        if policy.start(n_tokens - tokens - 1):
            while True:
                margin = rng.expovariate(1 / mean)
                chance = 0.02 if least is None else 1 - (1 - least) * math.exp(-margin)
                accepted = accepted and rng.random() < chance
                n, n_accepted = n + 1, n_accepted + accepted
                if not policy.should_continue(margin):
                    break
        pass_seconds = stall(rng, seconds_of(passes, n + 1) * rng.lognormvariate(0, 0.05))
        draft_seconds = stall(rng, n * draft * rng.lognormvariate(0, 0.05))
        policy.update(n, n_accepted, pass_seconds, draft_seconds)
        written = [0] * (n_accepted + 1)
        statistics.add(Step(written, [0] * n, n_accepted, pass_seconds + draft_seconds, draft_seconds, n_nodes=n))
        seconds, tokens = seconds + pass_seconds + draft_seconds, tokens + n_accepted + 1
    return tokens / seconds, statistics


def mean_of(new_policy, machine, pair):
    return np.mean([play(new_policy(), machine, pair, seed)[0] for seed in range(SEQUENCES)])


@pytest.mark.campaign
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("machine", MACHINES)
def test_automatic_is_near_the_best_fixed_length_and_never_far_below_no_draft(machine, pair):
    """With plain steps for insurance, from the first token on, and with what earlier sequences have shown."""
    passes, draft = MACHINES[machine]
    fixed = {gamma: mean_of(lambda gamma=gamma: FixedLength(gamma), machine, pair) for gamma in (0, 1, 2, 3, 4, 5, 6, 8, 12)}
    cold = mean_of(lambda: policy_for(passes, draft), machine, pair)
    pool = Acceptance()
    warm = mean_of(lambda: policy_for(passes, draft, pool.of_sequence()), machine, pair)
    assert cold > 0.92 * max(fixed.values())
    assert warm > 0.94 * max(fixed.values())
    assert min(cold, warm) > 0.97 * fixed[0]


def test_a_draft_that_is_no_use_is_left_out_and_looked_at_again():
    passes, draft = MACHINES["stories6M"]
    policy = policy_for(passes, draft)
    play(policy, "stories6M", "hopeless", 1)
    drafted = []
    for _ in range(2000):
        drafts = policy.start(50)
        drafted.append(drafts)
        if drafts:
            assert not policy.should_continue(0.5)  # a trial is a token long
        policy.update(drafts, 0, seconds_of(passes, 1 + drafts), draft * drafts)
    assert sum(drafted) >= 20
    assert sum(drafted) * draft < 0.011 * len(drafted) * passes[1]


def test_a_draft_that_becomes_good_is_taken_up_again():
    pool = Acceptance()
    slow = [play(policy_for(*MACHINES["large"], pool.of_sequence()), "large", "hopeless", seed)[0] for seed in range(3)][-1]
    fast = [play(policy_for(*MACHINES["large"], pool.of_sequence()), "large", "good", seed)[0] for seed in range(10)][-1]
    assert fast > 3 * slow


def test_tokens_that_cost_nothing_are_taken_as_far_as_verifying_them_pays():
    """Of passes whose each token costs a tenth of the first."""
    policy = policy_for({1: 1.0, 64: 7.3}, 0.0)
    for _ in range(300):  # what is confident is accepted, what is not is not
        n = policy.choose([20.0, 20.0, 0.3, 20.0]) if policy.start(20) else 0
        policy.update(n, min(n, 2), 1.0 + n / 10, 0.0)
    while not policy.start(20):
        policy.update(0, 0, 1.0, 0.0)
    assert policy.choose([20.0] * 7) == 7
    assert sum(policy.choose([0.3] * 7) for _ in range(20)) <= 2
    assert policy.choose([]) == 0


def test_fixed_is_what_it_says():
    policy = FixedLength(3)
    assert policy.start(10) and [policy.should_continue(0.0) for _ in range(3)] == [True, True, False]
    assert policy.start(2) and [policy.should_continue(9.0) for _ in range(2)] == [True, False]
    assert not policy.start(0)


def test_a_pass_over_fewer_tokens_costs_no_more_than_one_over_more():
    """Noise adds time, so what was measured as less is right."""
    curve = CostCurve({1: 3.0, 2: 1.0, 8: 2.0, 9: 1.9, 16: 4.0})
    assert curve.passes[1] == 1.0 and curve.passes[8] == pytest.approx(1.9)
    assert (np.diff(curve.passes[1:]) >= 0).all()
    assert curve.passes[64] == pytest.approx(16.0)


def test_costs_of_two_measurements_are_the_lesser_ones():
    merged = CostCurve({1: 1.0, 8: 5.0}, 0.5, 0.1).merge(CostCurve({1: 2.0, 8: 3.0}, 0.2, 0.3))
    assert merged.passes[1] == 1.0 and merged.passes[8] == 3.0
    assert (merged.draft_token, merged.draft_start) == (0.2, 0.1)


@pytest.mark.parametrize("confidence", [0.0, 0.1, 0.5, 1.0, 7.9, 1e300, math.inf])
def test_every_confidence_has_a_bucket(confidence):
    assert 0 <= bucket_of(confidence) <= bucket_of(2 * confidence + 0.2) < N_BUCKETS
    assert MAX_GAMMA + 1 == MAX_TOKENS


def test_a_bucket_that_was_never_seen_follows_the_others():
    """A draft that is wrong wherever it was seen is not trusted where it was not."""
    acceptance = Acceptance()
    acceptance.update([([2] * 30, 0)])
    assert acceptance.rates[2] < 0.05 and acceptance.rates[8] < 0.2
    child = acceptance.of_sequence()
    child.update([([2] * 30, 30)])
    assert child.rates[2] > 0.6
    assert acceptance.mean > 0.3  # the pool has seen both


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
# of a draft model: the mean of its margins and how often a token of no margin is accepted, or all are; of n-grams, which cost
# nothing: how often there are some, the chance that they state and how often they are accepted
MODELS = {"useless": (1.0, None), "mediocre": (1.5, 0.3), "perfect": (4.0, 1.0)}
NGRAMS = {"useless": (0.7, 0.8, 0.03), "overstated": (0.7, 0.9, 0.4), "perfect": (0.9, 0.95, 1.0)}
DRAFTS = 0.0, 0.03, 0.3, 0.9  # times a token of the target


class OddMachine:
    """A target, whose token takes a second, and what drafts for it."""

    def __init__(self, shape, draft, odd, kind):
        self.passes = [0.0, *(seconds_of(SHAPES[shape], n) * max(1.0, n / max(SHAPES[shape])) for n in range(1, MAX_TOKENS + 1))]
        self.draft, self.kind = draft, kind
        self.measured, self.change, (self.stall_rate, self.stall) = ODD[odd]

    def policy(self):
        one, more, draft = self.measured
        passes = {n: self.passes[n] * (one if n == 1 else more) for n in (1, 2, 4, 8, 9, 16, 32)}
        return policy_for(passes, draft * self.draft)

    def propose(self, policy, rng):
        """Return how many tokens are proposed, and how many of them are right."""
        tokens, n = list[bool](), 0
        if self.draft:
            mean, least = MODELS[self.kind]
            margin = math.inf
            while not tokens or policy.should_continue(margin):
                margin = rng.expovariate(1 / mean)
                tokens.append(rng.random() < (0.02 if least is None else 1 - (1 - least) * math.exp(-margin)))
            n = len(tokens)
        else:
            found, stated, right = NGRAMS[self.kind]
            most = min(policy.max_tokens, int(math.log(0.2) / math.log(stated))) if rng.random() < found else 0
            n = policy.choose([stated / (1 - stated)] * most) if most else 0
            tokens = [rng.random() < right for _ in range(n)]
        return n, [*tokens, False].index(False)

    def stalled(self, seconds, rng):
        n_stalls = sum(rng.random() < self.stall_rate * seconds / 8 for _ in range(8))
        return seconds + sum(self.stall * rng.expovariate(1.0) for _ in range(n_stalls))

    def play(self, seed):
        """Return the speed of a sequence over the target alone, without stalls."""
        rng, policy = random.Random(seed), self.policy()
        alone = seconds = 0.0
        tokens = n_missed = 0
        while tokens < TOKENS:
            target, draft = self.change if tokens >= TOKENS // 2 else STEADY
            n, n_accepted = self.propose(policy, rng) if policy.start(TOKENS - tokens - 1) else (0, 0)
            draft_seconds = (n + 0.3 * n_missed) * self.draft * draft if n else 0.0
            pass_seconds = self.passes[n + 1] * target * rng.lognormvariate(0, 0.05)
            n_missed = 0 if n else n_missed + 1
            policy.update(n, n_accepted, self.stalled(pass_seconds, rng), self.stalled(draft_seconds, rng))
            seconds += pass_seconds + draft_seconds
            alone += (n_accepted + 1) * target * self.passes[1]
            tokens += n_accepted + 1
        return alone / seconds


@pytest.mark.campaign
def test_no_machine_is_much_slower_than_the_target_alone():
    """From the first sequence of 200 tokens on, whatever is wrong, with drafts of every price and quality: 612 cases."""
    speeds = {}
    for shape in SHAPES:
        for odd in ODD:
            for draft in DRAFTS:
                for kind in MODELS if draft else NGRAMS:
                    machine = OddMachine(shape, draft, odd, kind)
                    speeds[shape, odd, draft, kind] = 3 / sum(1 / machine.play(seed) for seed in range(3))
    assert min(speeds.values()) > 0.8  # a draft of 0.9 tokens that becomes three times as slow in the middle
    assert sum(speed < 0.95 for speed in speeds.values()) <= 14
    assert math.exp(np.mean(np.log([*speeds.values()]))) > 1.15


def test_stalls_do_not_end_drafting():
    """Of a draft with which a sequence is far faster."""
    for odd in ("a core that is busy now and then", "a core that is busy often"):
        speeds = [OddMachine("8 cost 1.4", 0.03, odd, "perfect").play(seed) for seed in range(6)]
        assert min(speeds) > 2


@pytest.mark.parametrize("draft", [0.0, 0.1])
def test_a_draft_that_a_busy_machine_made_look_too_dear_is_tried_again(draft):
    """Each pass of more than one token took 500 times as long, and each draft."""
    machine = OddMachine("8 cost 1.4", draft, "nothing", "perfect")
    busy = policy_for({n: machine.passes[n] * (500 if n > 1 else 1) for n in (1, 2, 4, 8, 16)}, 500 * draft)
    pool = busy.acceptance
    measured_again = busy.costs.curve.merge(CostCurve({n: machine.passes[n] for n in (1, 2, 4, 8, 16)}, draft))
    machine.policy = lambda: DraftLengthPolicy(CostModel(measured_again), pool.of_sequence(), not draft)
    assert machine.play(1) > 2


# Busy machines: a time slice of 4 to 10 ms is lost now and then, from passes of a millisecond


def busy(rng, microseconds):
    lost = microseconds
    while rng.random() < 1 - math.exp(-microseconds / 12_000):
        lost += rng.uniform(4_000, 10_000)
        microseconds /= 2
    return lost


@pytest.mark.parametrize("pair", ["good", "middling"])
@pytest.mark.parametrize("machine", ["stories6M", "large"])
def test_drafting_goes_on_beside_other_programs(machine, pair):
    passes, draft = MACHINES[machine]
    pool, fixed, found = Acceptance(), [], []
    for seed in range(12):
        fixed.append(1 / play(FixedLength(4), machine, pair, seed, busy)[0])
        found.append(1 / play(policy_for(passes, draft, pool.of_sequence()), machine, pair, seed, busy)[0])
    assert sum(fixed) / sum(found) > 0.9


@pytest.mark.parametrize("stall", [lambda rng, seconds: seconds, busy], ids=["idle", "busy"])
@pytest.mark.parametrize("machine", ["stories6M", "large", "dear draft"])
def test_a_speed_up_is_told_as_it_is_or_not_at_all(machine, stall):
    passes, draft = MACHINES[machine]
    n_told = 0
    for seed in range(12):
        speed, statistics = play(policy_for(passes, draft), machine, "middling", seed, stall, 800)
        if statistics.speed_up:
            n_told += 1
            alone = 1 / seconds_of(passes, 1)
            assert statistics.speed_up == pytest.approx(speed / alone, rel=0.15 if stall is not busy else 0.3)
    assert n_told > 0 or stall is busy


def test_a_speed_up_that_few_steps_or_stalls_tell_is_not_told():
    def told(plain, drafted):
        statistics = Statistics()
        for seconds in plain:
            statistics.add(Step([5], [], 0, seconds, 0.0))
        for seconds in random.Random(1).sample(drafted, len(drafted)):
            statistics.add(Step([5, 6, 7], [5, 6, 9], 2, seconds, 0.3 * seconds, n_nodes=3))
        return statistics.speed_up

    assert told([1.0] * 8, [1.5] * 30) == pytest.approx(98 / (8 + 45))
    assert told([1.0] * 7, [1.5] * 30) is None
    assert told([1.0] * 40, []) is None
    assert told([1.0] * 7 + [9.0], [1.5] * 30) is None
    assert told([1.0] * 8, [1.5] * 25 + [9.0] * 5) is None
    assert told([9.0] * 8, [0.1] * 30) == pytest.approx(98 / 38)  # no pass is faster than one over one token


def test_what_comparisons_show_changes_the_curve_for_later_texts():
    machine = OddMachine("8 cost 1.4", 0.1, "more tokens measured three times too dear", "mediocre")
    policy = machine.policy()
    machine.policy = lambda: policy
    for seed in range(12):
        machine.play(seed)
    assert policy.costs.n_plain >= N_PLAIN
    curve = policy.costs.corrected_curve()
    assert curve.passes[8] / curve.passes[1] < policy.costs.curve.passes[8] / policy.costs.curve.passes[1] / MAX_OFF


# Batches

BATCH_MACHINES = {"large": {1: 1.0, 8: 1.1, 16: 1.6, 64: 4.0}, "small": {1: 1.0, 4: 1.0, 8: 1.4, 16: 2.4, 64: 8.0}}
POINTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)
PASSES, LEARNING = 300, 50


def batch(machine, n_sequences, draft, wrong):
    """Return costs and policies. wrong: factors of what was measured: of plain passes, of others, of a draft's token."""
    of_few, of_more, of_draft = wrong
    passes = {n: seconds_of(BATCH_MACHINES[machine], n) * (of_few if n <= n_sequences else of_more) for n in POINTS}
    costs = CostModel(CostCurve(passes, draft * of_draft))
    pool = Acceptance(MARGIN_RATES if draft else ODDS_RATES)
    return costs, [DraftLengthPolicy(costs, pool.of_sequence(), not draft, is_alone=False) for _ in range(n_sequences)]


@cache
def play_batch(machine, n_sequences, right, draft, wrong=(1.0, 1.0, 1.0), fixed=None, begin=0, seed=0):
    """Return tokens a second of all sequences from a pass on; draft: seconds of its token, which is right so often."""
    rng, passes, odds = random.Random(seed), BATCH_MACHINES[machine], right / (1 - right)
    costs, policies = batch(machine, n_sequences, draft, wrong)
    tokens, seconds = 0, 0.0
    for i in range(PASSES):
        costs.begin_pass(n_sequences)
        steps = []
        for policy in policies:
            n = 0
            if fixed is not None:
                n = fixed
            elif policy.start(30):
                if draft:
                    n = 1
                    while policy.should_continue(odds):
                        n += 1
                else:
                    n = policy.choose([odds] * 12)
            costs.add_tokens(n)
            accepted = [rng.random() < right for _ in range(n)]
            steps.append((policy, n, [*accepted, False].index(False), n * draft * rng.lognormvariate(0, 0.05)))
        n_tokens = n_sequences + sum(n for _, n, _, _ in steps)
        taken = seconds_of(passes, n_tokens) * rng.lognormvariate(0, 0.05)
        written = n_sequences + sum(n_accepted for _, _, n_accepted, _ in steps)
        if fixed is None:
            for policy, n, n_accepted, drafting in steps:
                policy.update(n, n_accepted, taken, drafting)
            costs.end_pass(n_tokens, written, taken)
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
@pytest.mark.parametrize("n_sequences", [2, 4])
@pytest.mark.parametrize("machine", BATCH_MACHINES)
def test_wrong_costs_of_batches_are_found_out_within_fifty_passes(machine, n_sequences, wrong):
    """Of a draft that is right four times in five, by the best fixed length; of one that is hardly ever, by none."""
    fixed = max(play_batch(machine, n_sequences, 0.8, 0.05, fixed=n, begin=LEARNING) for n in range(6))
    found = [play_batch(machine, n_sequences, 0.8, 0.05, WRONG[wrong], begin=LEARNING, seed=seed) for seed in range(3)]
    assert np.mean(found) > 0.88 * fixed
    useless = [play_batch(machine, n_sequences, 0.05, 0.05, WRONG[wrong], seed=seed) for seed in range(3)]
    assert np.mean(useless) > 0.93 * play_batch(machine, n_sequences, 0.05, 0.05, fixed=0)


@pytest.mark.parametrize("draft", [0.0, 0.15])
def test_drafts_shrink_as_sequences_come(draft):
    """Every sequence waits for a pass, so a token more has to pay for all of them."""
    lengths = []
    for n_sequences in (1, 2, 4, 8, 16):
        costs = CostModel(CostCurve({1: 1.0, 8: 1.14, 64: 2.26}, draft))
        costs.begin_pass(n_sequences)
        acceptance = Acceptance([0.9] * N_BUCKETS, n_accepted=8.0)
        policy, n = DraftLengthPolicy(costs, acceptance, not draft, is_alone=False), 0
        if policy.start(60) and draft:
            n = 1
            while policy.should_continue(4.0):
                n += 1
        elif not draft:
            n = policy.choose([4.0] * 60)
        lengths.append(n)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 2 * lengths[3]
    costs.begin_pass(64)
    assert not policy.start(60)


# Mixtures of experts: the number of experts, those that a token chooses, and their share of the bytes that a token reads
MIXTURES = {"qwen3": (128, 8, 0.6), "qwen3.5": (256, 8, 0.34), "lfm2": (32, 4, 0.62)}
TOKEN = 0.02  # seconds of a pass over one token
ANOTHER = 0.02  # of that a token more takes in arithmetic
GAMMAS = (1, 2, 3, 4, 6, 8)
# How often tokens choose an expert that the pass reads anyway: Cohere (2026) found that 4 tokens read 2.5 times one's
ROUTINGS = {"random": 0.0, "as texts do": 0.35, "the same again": 0.95, "changing": lambda n: 0.95 if n // 60 % 2 else 0.0}


class MixtureMachine:
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

    def curve(self, draft=0.0):
        passes = {n: TOKEN * (1 + ANOTHER * (n - 1)) for n in (1, 8, 64)}
        return CostCurve(passes, draft, 0.0, ExpertCosts(self.n, self.k, TOKEN * self.share, 0.0, lambda: self.n_read))


def write(policy, machine, right, draft, repeats=None):
    """Return tokens a second of a sequence whose drafts are right so often; repeats: of its routing, by token."""
    rng, tokens, seconds = random.Random(1), 0, 0.0
    odds = right / (1 - right)
    while tokens < 300:
        machine.repeats = machine.repeats if repeats is None else repeats(tokens)
        n = 0
        if policy.start(300 - tokens):
            if draft:
                n = 1
                while policy.should_continue(odds):
                    n += 1
            else:
                n = min(policy.choose([odds] * 16), policy.max_tokens)
        n_accepted = 0
        while n_accepted < n and rng.random() < right:
            n_accepted += 1
        taken = machine.seconds(n + 1)
        policy.update(n, n_accepted, taken, n * draft)
        tokens, seconds = tokens + n_accepted + 1, seconds + taken + n * draft
    return tokens / seconds


def auto(machine, draft=0.0):
    return DraftLengthPolicy(CostModel(machine.curve(draft)), Acceptance(MARGIN_RATES if draft else ODDS_RATES), not draft)


def speed(new, mixture, routing, right, draft):
    repeats = ROUTINGS[routing]
    found = []
    for seed in range(4):
        machine = MixtureMachine(mixture, 0.0 if callable(repeats) else repeats, seed)
        found.append(write(new(machine), machine, right, draft, repeats if callable(repeats) else None))
    return 1 / np.mean(1 / np.array(found))


@pytest.mark.parametrize("draft", [0.0, 0.08 * TOKEN])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_are_near_the_best_fixed_length_and_not_below_no_draft(mixture, routing, draft):
    for right in (0.3, 0.8):
        alone = speed(lambda machine: FixedLength(0), mixture, routing, right, draft)
        best = max(speed(lambda machine, n=n: FixedLength(n), mixture, routing, right, draft) for n in GAMMAS)
        found = speed(lambda machine: auto(machine, draft), mixture, routing, right, draft)
        assert found > 0.95 * alone
        assert found > 0.9 * max(alone, best)  # of 300 tokens, with what is learned first


def test_a_draft_that_is_mostly_right_pays_even_where_routing_is_random():
    for mixture, least in (("qwen3.5", 1.35), ("qwen3", 1.1)):
        alone = speed(lambda machine: FixedLength(0), mixture, "random", 0.8, 0.0)
        assert speed(auto, mixture, "random", 0.8, 0.0) > least * alone


def test_how_much_tokens_repeat_follows_from_how_many_experts_they_choose():
    for n, k in ((128, 8), (32, 4), (8, 8)):
        for repeats in (0.0, 0.3, 0.9, 1.0):
            experts = ExpertCosts(n, k, 1.0, repeats, lambda: 0.0)
            for n_tokens in (2, 5, 16):
                n_read = k * (1 + experts.extra[n_tokens])
                assert k <= n_read <= n + 1e-9
                if n > k:
                    assert experts.repeats_of(n_tokens, n_read) == pytest.approx(repeats, abs=1e-6)
    independent = ExpertCosts(128, 8, 1.0, 0.0, lambda: 0.0)
    assert 1 + independent.extra[4] == pytest.approx(16 * (1 - (1 - 1 / 16) ** 4))


def test_sequences_that_choose_other_experts_get_shorter_drafts():
    lengths = []
    for n_read in (8.0, 40.0):
        costs = CostModel(CostCurve({1: 1.0, 64: 1.5}, 0.0, 0.0, ExpertCosts(64, 8, 0.5, 0.5, lambda n_read=n_read: n_read)))
        for _ in range(30):
            costs.begin_pass(4)
            costs.end_pass(12, 8, 1.0 + 0.5 * 11 / 63 + 0.5 * (n_read / 8 - 1))
        policy = DraftLengthPolicy(costs, Acceptance(ODDS_RATES, n_accepted=8.0), True, is_alone=False)
        costs.begin_pass(4)
        while not policy.start(30):
            costs.end_pass(4, 4, 1.0)
            costs.begin_pass(4)
        lengths.append(policy.choose([4.0] * 20))
    assert lengths[0] > lengths[1]
