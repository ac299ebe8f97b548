"""How many tokens to draft before each forward pass of the target, for one sequence or a batch.

A round that drafts n tokens yields 1 + S_1 + ... + S_n tokens on average, where S_k is the probability that the first k are all
accepted. It costs c(n + 1) + d(n): a pass of the target over n + 1 tokens, and the draft (Leviathan et al. 2023,
arXiv:2211.17192, section 3.3). A longer draft pays while its expected tokens are worth more than its seconds at the rate that
can be had without it. Three things are known about that:

- `CostCurve`: c and d, from interleaved passes when the models are loaded (calibration.py). Only ratios matter.
- `Acceptance`: how often tokens of a given confidence were accepted, in this sequence and in earlier ones (acceptance.py).
- Plain steps: now and then a step has no draft. Its time, next to that of the drafted rounds around it, shows whether these
  really cost what the curve says while other programs run. The clock has no other influence.

The module knows no models.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from specdec.draft.acceptance import DECAY, Acceptance, bucket_of
from specdec.draft.costs import MAX_LOOKAHEAD, MIN_SECONDS, CostCurve
from specdec.kernels import MAX_TOKENS

MAX_GAMMA = MAX_TOKENS - 1
LOOKAHEAD = (1, 2, 4, 8, 16, MAX_LOOKAHEAD)  # how many more tokens are considered together, since c(n) has steps
MAX_BATCH, BATCH_SECONDS = 16, 0.01  # passes that are taken in together, and the time of those that are not
MOVED = 0.1  # by so much, a logarithm has moved

# All of the following in plain steps, that is passes of the target without a draft.
MAX_ROUND = 8.0  # the longest drafted round
PLAIN_SHARE, LATER_SHARE = 0.04, 0.01  # share of drafted rounds' time for plain steps: until there are N_PLAIN, and later
TRIAL_SHARE = 0.01  # share of plain steps' time for drafts that do not seem to pay
FIRST_BUDGET, MAX_BUDGET = 1.5, 12.0
MAX_TRIAL = 2.5  # the price of a trial at the start
N_TRIALS = 2  # that need no budget, at the start
N_PLAIN = 8
N_COMPARISONS = 5  # that are remembered
MAX_OFF = 1.25  # times as much as the curve says; beyond, it is changed
MAX_MISSED = 8  # tokens that a draft has missed, beyond which its time says nothing about the draft
SUDDEN = 1.5  # a change of step times by this factor calls for a comparison at once


class Pass(NamedTuple):
    """A pass of the target: how many sequences and tokens it was over, and what it showed."""

    n_sequences: int
    n_tokens: int
    n_written: int
    seconds: float
    n_read: float  # experts that a layer read
    drafts: list[tuple[int, int, float]]  # of models: tokens, tokens of the sequence that the draft had missed, seconds
    is_trial: bool  # whether a draft was one that did not seem to pay
    between: float  # seconds from the pass before, drafts included; 0: nobody measured them


class CostModel:
    """What the passes of a batch cost now, and when to compare them with plain steps.

    The batch shares one model: all its sequences wait for the same pass. `begin_pass` and `end_pass` frame each pass. What passes
    show is taken in several at a time, since code that runs between two passes runs out of cold caches.

    Args:
        curve: Costs as measured.
        earlier: A batch of the same models, whose comparisons and budget go on.
    """

    def __init__(self, curve: CostCurve, earlier: "CostModel | None" = None) -> None:
        self.curve, self.experts = curve, curve.experts.copy()
        self.pass_ratio = self.draft_ratio = 1.0  # drafted rounds' cost over the curve's, relative to plain steps
        self.version = 0  # another one when the two ratios or the speed-up have moved
        self._published = 1.0, 1.0, 1.0  # what they were then
        self.n_sequences = self.n_tokens = 1  # of this pass: sequences, and tokens so far, one of each sequence among them
        self.is_plain = False  # whether no sequence is to draft in this pass
        self.n_plain = 0  # comparisons made
        self.overhead = 0.0  # seconds between two passes without drafts, for whatever is done there
        self.speed_up = 1.0  # tokens of the last rounds, over what plain steps would have written meanwhile; at least 1
        self._max_tokens = MAX_TOKENS
        self._drafts, self._is_trial = list[tuple[int, int, float]](), False  # of this pass: tokens, missed tokens, seconds
        self._log = list[Pass]()  # passes that are not taken in yet
        self._batch, self._batch_seconds = 1, 0.0  # how many of them to wait for, and their time
        self._comparisons = deque[tuple[float, float]](maxlen=N_COMPARISONS)
        self._drafted = list[tuple[float, float]]()  # ratios of drafted rounds since the last plain step: pass, draft
        self._plain = deque[float](maxlen=3)  # ratios of the last plain steps since then
        self._drafted_level, self._plain_level = 0.0, 0.0  # ratios at the last comparison
        self._budget, self._spacing, self._n_trials = FIRST_BUDGET, 1, 0
        self._round_cost, self._until_plain = 1.0, -1  # of a drafted round, in plain steps; rounds until the next plain step
        self._gained = self._spent = 1.0  # tokens of the last rounds and their cost, both per sequence
        if earlier:
            self.pass_ratio, self.draft_ratio, self.speed_up = earlier.pass_ratio, earlier.draft_ratio, earlier.speed_up
            self._gained, self._spent, self.overhead = earlier.speed_up, 1.0, earlier.overhead
            self._comparisons.extend(earlier._comparisons)
            self._budget, self._n_trials = min(earlier._budget, FIRST_BUDGET), earlier._n_trials
            self._drafted_level, self._plain_level = earlier._drafted_level, earlier._plain_level

    @property
    def plain_cost(self) -> float:
        """Seconds of a pass of this batch without drafts."""
        return self.curve.passes[self.n_sequences] + self.experts.extra[self.n_sequences]

    @property
    def rate(self) -> float:
        """Tokens a second of the whole batch."""
        return self.speed_up * self.n_sequences / (self.plain_cost + self.overhead)

    @property
    def room(self) -> int:
        """How many tokens may yet be drafted for this pass."""
        return self._max_tokens - self.n_tokens

    def pass_cost(self, n_tokens: int) -> float:
        """Return the seconds of a pass over n_tokens."""
        n = min(n_tokens, MAX_TOKENS)
        cost = self.curve.passes[n] + self.experts.extra[n]
        return max(cost * self.pass_ratio, self.plain_cost) if n > self.n_sequences else cost

    def draft_cost(self, n: int, n_missed: int = 0) -> float:
        """Return the seconds of a model that drafts n tokens and first reads n_missed of its sequence."""
        return self.curve.draft_cost(n, n_missed) * self.draft_ratio

    def begin_pass(self, n_sequences: int = 1, max_tokens: int = MAX_TOKENS) -> None:
        """Begin a pass of n_sequences and up to max_tokens."""
        self.n_sequences, self.n_tokens, self._max_tokens = max(n_sequences, 1), n_sequences, max_tokens
        self._drafts, self._is_trial = [], False

    def add_tokens(self, n: int) -> None:
        """Count tokens that a sequence drafted for this pass."""
        self.n_tokens += n

    def add_draft(self, n: int, n_missed: int, seconds: float) -> None:
        """Count the time that a model took to draft n tokens for this pass after reading n_missed of its sequence."""
        self._drafts.append((n, n_missed, seconds))

    def end_pass(self, n_tokens: int, n_written: int, seconds: float, between: float = 0.0) -> None:
        """Take note of a pass over n_tokens, which wrote n_written tokens in so many seconds.

        between: Seconds from the end of the pass before, if it came right before.
        """
        n_read = self.experts.n_read() if self.experts.seconds else 0.0
        self._log.append(Pass(self.n_sequences, n_tokens, n_written, seconds, n_read, self._drafts, self._is_trial, between))
        self._batch_seconds += seconds
        self._until_plain -= 1
        if len(self._log) >= self._batch or self._batch_seconds > BATCH_SECONDS or self.is_plain:
            self._learn()
        elif self._until_plain == 0 and n_tokens > self.n_sequences:
            self.is_plain = True

    def _learn(self) -> None:
        """Take in the passes of the log, and decide whether the next one is a plain step."""
        for each in self._log:
            if each.n_tokens > each.n_sequences:
                self._take_drafted(each)
            else:
                self._take_plain(each)
        self._log.clear()
        self._batch, self._batch_seconds = min(2 * self._batch, MAX_BATCH), 0.0
        self.speed_up = max(self._gained / self._spent, 1.0)
        now = self.pass_ratio, self.draft_ratio, self.speed_up
        if max(abs(math.log(a / b)) for a, b in zip(now, self._published, strict=True)) > MOVED:
            self.version, self._published = self.version + 1, now
        self._until_plain = self._rounds_to_wait()
        has_changed = self._has_changed([max(ratios) for ratios in self._drafted[-3:]], self._drafted_level)
        self.is_plain = bool(self._drafted) and (self._until_plain == 0 or has_changed)

    def _rounds_to_wait(self) -> int:
        """Return how many more drafted rounds it takes to afford a plain step."""
        missing, a_round = self._plain_price - self._budget, self._share * self._round_cost
        return max(self._spacing - len(self._drafted), math.ceil(missing / a_round) if missing > 0 else 0, 0)

    @property
    def _share(self) -> float:
        """Share of drafted rounds' time that goes to plain steps."""
        return PLAIN_SHARE if self.n_plain < N_PLAIN else LATER_SHARE

    def _take_drafted(self, of: Pass) -> None:
        plain = self.curve.passes[of.n_sequences] + self.experts.extra[of.n_sequences]
        expected = self.curve.passes[of.n_tokens] + self.experts.extra_of(of.n_read)
        pass_ratio = draft_ratio = of.seconds / expected
        expected_draft = draft_seconds = 0.0
        most_missed = 0
        for n, n_missed, seconds in of.drafts:
            expected_draft += self.curve.draft_cost(n, n_missed)
            draft_seconds += seconds
            most_missed = max(most_missed, n_missed)
        draft_seconds = max(draft_seconds, of.between - self.overhead * pass_ratio)
        if expected_draft and most_missed <= MAX_MISSED:
            draft_ratio = draft_seconds / expected_draft
        self._drafted.append((pass_ratio, draft_ratio))
        cost = max(expected * self.pass_ratio, plain) + expected_draft * self.draft_ratio + self.overhead
        cost /= plain + self.overhead
        self._gained = DECAY * self._gained + of.n_written / of.n_sequences
        self._spent = DECAY * self._spent + cost
        self._round_cost += 0.1 * (cost - self._round_cost)
        self._budget = min(self._budget + (0.0 if of.is_trial else self._share * cost), MAX_BUDGET)
        self.experts.update(of.n_tokens, of.n_read)

    def _take_plain(self, of: Pass) -> None:
        if self.is_plain:
            self._budget -= self._plain_price
            self._spacing += 1
        else:
            self._gained, self._spent = DECAY * self._gained + 1.0, DECAY * self._spent + 1.0
        self._budget = min(self._budget + TRIAL_SHARE, MAX_BUDGET)
        plain = self.curve.passes[of.n_sequences] + self.experts.extra[of.n_sequences]
        ratio = max(of.seconds / (plain + self.curve.eviction * bool(self._drafted)), MIN_SECONDS)
        self._plain.append(ratio)
        if of.between:
            self._note_overhead(of.between / ratio)
        if self._drafted:
            self._compare(ratio)

    def _note_overhead(self, seconds: float) -> None:
        """Move the overhead, in the curve's seconds, towards what was seen; now and then other work stands between two passes."""
        self.overhead += 0.1 * (min(max(seconds, 0.0), 2 * self.overhead + self.curve.passes[1]) - self.overhead)

    def _compare(self, plain: float) -> None:
        """Compare a plain step with the median of the drafted rounds since the last one."""
        passes, drafts = (median(ratios) for ratios in zip(*self._drafted, strict=True))
        self._comparisons.append((passes / plain, drafts / plain))
        before = self.pass_ratio, self.draft_ratio
        self.pass_ratio, self.draft_ratio = (_agreed(ratios) for ratios in zip(*self._comparisons, strict=True))
        if max(abs(math.log(a / b)) for a, b in zip(before, (self.pass_ratio, self.draft_ratio), strict=True)) > math.log(
            MAX_OFF
        ):
            self._batch = 1  # it matters what comes next
        self._drafted_level, self._plain_level = max(passes, drafts), plain
        self._drafted.clear()
        self._plain.clear()
        self.n_plain += 1

    @property
    def _plain_price(self) -> float:
        """What a plain step loses, in plain steps."""
        return 1.0 - 1.0 / self.speed_up

    @staticmethod
    def _has_changed(ratios: Sequence[float], level: float) -> bool:
        """Return whether steps have become slower or faster than at the last comparison, all at once."""
        last = [*ratios][-3:]
        return level > 0.0 and len(last) == 3 and (min(last) > SUDDEN * level or max(last) < level / SUDDEN)

    def corrected_curve(self) -> CostCurve:
        """Return the curve, changed where plain steps have shown that it is wrong."""
        is_off = any(abs(math.log(ratio)) > math.log(MAX_OFF) for ratio in (self.pass_ratio, self.draft_ratio))
        return self.curve.scaled(self.pass_ratio, self.draft_ratio) if is_off and self.n_plain >= N_PLAIN else self.curve

    def try_draft(self, seconds: float, share: float = TRIAL_SHARE) -> bool:
        """Return whether to spend so many seconds on a draft that does not seem to pay; if so, count them as spent.

        share: Of all time that such drafts may take.
        """
        price = seconds / self.plain_cost * TRIAL_SHARE / share
        is_free = price <= MAX_TRIAL and (self._n_trials < N_TRIALS or self._has_changed(self._plain, self._plain_level))
        if self._is_trial or (not is_free and price > self._budget - FIRST_BUDGET):
            return False
        self._budget -= price * (self._n_trials >= N_TRIALS)
        self._n_trials += 1
        self._is_trial = True
        self._plain.clear()
        return True


def _agreed(ratios: Sequence[float]) -> float:
    """Return the median of the ratios and of 1; of two in the middle the one nearer to 1, so that one ratio proves nothing."""
    ordered = sorted([1.0, *ratios])
    middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(middle, key=lambda ratio: abs(math.log(max(ratio, MIN_SECONDS))))


class DraftLengthPolicy:
    """The draft length of one sequence: as many tokens as pay, and none where none do.

    Args:
        costs: Costs of the batch that the sequence is in.
        acceptance: What is known of its draft.
        is_free: Whether proposing costs nothing, as from n-grams.
        is_alone: Whether the batch is this sequence, so that a draft is a pass of its own.
    """

    def __init__(self, costs: CostModel, acceptance: Acceptance, is_free: bool, is_alone: bool = True) -> None:
        self.costs, self.acceptance = costs, acceptance
        self.max_tokens = 0  # of this round's draft
        self._is_free, self._is_alone = is_free, is_alone
        self._buckets = list[int]()
        self._survival, self._is_trial = 1.0, False
        self._rates, self._thresholds = acceptance.rates, dict[tuple[int, int], float]()
        self._n_sequences = 1  # of the batch for which thresholds and rates are known
        self._rounds = list[tuple[list[int], int]]()  # that acceptance has not taken in: buckets of judged tokens, accepted ones
        self._version, self._n_missed, self._trial_share = -1, 0, TRIAL_SHARE
        self._batch, self._batch_seconds = 1, 0.0
        self._longest = 0  # draft once enough tokens were accepted
        # Of proposals that are looked up: whether this round does, seconds that it takes, and tokens that it brings
        self._searches, self._search_seconds, self._search_gain = False, 0.0, 1.0

    def start(self, room: int) -> bool:
        """Begin a round in which up to `room` tokens fit; return whether to draft."""
        costs = self.costs
        if self._is_alone:
            costs.begin_pass()
        is_due = len(self._rounds) >= self._batch or self._batch_seconds > BATCH_SECONDS
        if is_due or self._version != costs.version or self._n_sequences != costs.n_sequences:
            self._learn()
        self._buckets = []
        self._survival, self._is_trial, self._searches = 1.0, False, False
        self.max_tokens = room = min(room, costs.room, self._longest)
        if costs.is_plain or room < 1:
            self.max_tokens = 0
            return False
        if self._is_free:
            pays = self._search_seconds * costs.rate <= max(self._search_gain, 0.0)
            self._searches = pays or costs.try_draft(self._search_seconds)
            return self._searches
        if self._threshold(0) <= 1.0:
            return True
        self.max_tokens = 1
        catch_up = costs.draft_cost(1, self._n_missed) - costs.draft_cost(1)
        self._is_trial = costs.try_draft(self._cost(1) - self._cost(0) + catch_up, self._trial_share)
        return self._is_trial

    def should_continue(self, confidence: float) -> bool:
        """Take in a drafted token; return whether to draft another.

        Args:
            confidence: >= 0, and the higher the more likely the token is accepted: a margin in nats, or odds.
        """
        bucket = bucket_of(confidence)
        self._buckets.append(bucket)
        self._survival *= self._rates[bucket]
        n = len(self._buckets)
        return n < self.max_tokens and (self._survival > self._threshold(n) or self._is_trial)

    def choose(self, confidences: Sequence[float]) -> int:
        """Return how many of the tokens of such confidences to propose, for a drafter that has them at no cost."""
        costs, rates = self.costs, self._rates
        rate, base = costs.rate, costs.pass_cost(costs.n_tokens)
        self._buckets = [bucket_of(confidence) for confidence in confidences[: self.max_tokens]]
        best = gain = 0.0
        n_best, survival = 0, 1.0
        for n, bucket in enumerate(self._buckets, 1):
            survival *= rates[bucket]
            gain += survival
            worth = gain - rate * (costs.pass_cost(costs.n_tokens + n) - base)
            if worth > best:
                best, n_best = worth, n
        if self._buckets and not n_best:
            n_best = int(costs.try_draft(costs.pass_cost(costs.n_tokens + 1) - base))
        del self._buckets[n_best:]
        return n_best

    def update(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """Learn from a round whose pass and draft took so many seconds."""
        costs = self.costs
        self._batch_seconds += pass_seconds
        if self._searches:
            before = self._search_seconds or draft_seconds
            self._search_seconds = before + 0.1 * (min(draft_seconds, 2 * before) - before)  # longer only if the core was lost
            gain = n_accepted - costs.rate * (costs.pass_cost(costs.n_sequences + n_drafted) - costs.plain_cost)
            self._search_gain += 0.1 * (gain - self._search_gain)
        if n_drafted:
            self._rounds.append((self._buckets[: min(n_drafted, n_accepted + 1)], n_accepted))
            if not self._is_free:
                costs.add_draft(n_drafted, self._n_missed, draft_seconds)
        self._n_missed = 0 if n_drafted else self._n_missed + 1
        if self._is_alone:
            costs.end_pass(1 + n_drafted, 1 + n_accepted, pass_seconds)

    def _cost(self, n: int) -> float:
        """Return the seconds of this pass with n tokens of this sequence."""
        costs = self.costs
        return costs.pass_cost(costs.n_tokens + n) + (0.0 if self._is_free else costs.draft_cost(n))

    def _learn(self) -> None:
        """Take in what became of the last drafts, and see anew what pays."""
        if self._rounds:
            self.acceptance.update(self._rounds)
            self._rounds.clear()
        self._batch, self._batch_seconds = min(2 * self._batch, MAX_BATCH), 0.0
        self._rates, self._version, self._n_sequences = self.acceptance.rates, self.costs.version, self.costs.n_sequences
        # where comparisons alone speak against drafting, other programs may have spoilt them
        self._trial_share = PLAIN_SHARE if self.costs.curve.pays(self.acceptance.mean) else TRIAL_SHARE
        self._thresholds.clear()
        # a round risks little until some tokens were accepted
        limit = self._cost(0) + min(1.0 + self.acceptance.n_accepted, MAX_ROUND) * self.costs.plain_cost
        low, high = 1, max(self.costs.room, 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._cost(middle) <= limit else (low, middle - 1)
        self._longest = low

    def _threshold(self, n: int) -> float:
        """Return the probability that n tokens are accepted above which another one pays."""
        key = self.costs.n_tokens, n
        if key not in self._thresholds:
            self._thresholds[key] = self._new_threshold(n)
        return self._thresholds[key]

    def _new_threshold(self, n: int) -> float:
        rate, base, least = self.acceptance.mean, self._cost(n), math.inf
        gain, power, at = 0.0, 1.0, 0
        for more in LOOKAHEAD:
            if self.costs.n_tokens + n + more > MAX_TOKENS:
                break
            while at < more:
                at, power = at + 1, power * rate
                gain += power
            least = min(least, (self._cost(n + more) - base) / gain)
        return self.costs.rate * least


class FixedLength:
    """A fixed draft length, with the interface of `DraftLengthPolicy`."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma
        self.max_tokens = self._left = 0

    def start(self, room: int) -> bool:
        """Begin a round in which up to `room` tokens fit; return whether to draft."""
        self.max_tokens = self._left = min(self._gamma, room)
        return self._left > 0

    def should_continue(self, confidence: float) -> bool:
        """Return whether to draft another token."""
        self._left -= 1
        return self._left > 0

    def choose(self, confidences: Sequence[float]) -> int:
        """Return how many of the tokens to propose: all."""
        return len(confidences)

    def update(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """Learn nothing."""
