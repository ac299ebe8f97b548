"""How long a proposal gets: what pays, by measured costs and by what has stood so far. Knows no models.

A round of n proposals yields 1 + sum_{k <= n} S_k tokens, S_k the chance that the first k stand, and takes c(n + 1) + n d
seconds, c(T) a pass of the target over T tokens and d a token of the draft (Leviathan et al. 2023, arXiv:2211.17192, section
3.3). With R the best rate that can be had, m tokens more are worth their while if they are expected to bring more than R times
their seconds: the optimal stopping of a renewal process. S_k is the product of the acceptance that proposals of such confidence
have had.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from ..kernels import MAX_TOKENS
from ..machine.vectors import Float64

MAX_GAMMA = MAX_TOKENS - 1
BUCKETS = 12  # of confidence: below 1/8, 1/4, 1/2, 1, 2, ...
# Acceptance before anything was seen: of all, and by the buckets of a model's margins, as two pairs of models had it; a hopeless
# draft loses two passes by it, not ten. Of odds it is what they say.
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
MARGIN_RATES = (0.45, 0.45, 0.5, 0.6, 0.75, 0.9, *[0.95] * 6)
ODDS_RATES = tuple(1 / (1 + 2 ** (3.5 - bucket)) for bucket in range(BUCKETS))
MEMORY = 0.98  # what an observation weighs after the next one
# How many tokens more are considered at once, since c has steps; behind each number of them, how many there are then
AHEAD = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
PROPOSALS = np.arange(MAX_GAMMA + 1)
AFTER = np.minimum(PROPOSALS[:, None] + AHEAD, MAX_GAMMA)
TRIAL_SHARE = 0.01  # of the time goes into drafts that do not seem to pay, to look again
TRIAL_TOKENS, TRIAL_ROUNDS = 2, 2  # of such a draft, and the rounds that a text begins with it
DEAR = 2.5  # tokens of the target alone: a trial that seems so dear is not even tried
MOVED = 0.1  # by so much, costs are other costs
MOST_REST = 64  # rounds without a look
CATCH_UP = 0.1  # of a draft token's time, that a token takes in a prompt's way, before one was seen
FIRST_LOOK = 32  # the first round that is made without a draft, to see c(1); then the 64th, the 128th, ...
LOOK = 3  # such rounds where it is in question whether drafts pay
FAR, DRIFT = 1.5, 1.1  # times as much is far off; and so much that it has to be looked at
SHARE_OF_NEW = 0.1  # of a level is what was seen last
LEAST = 1e-9  # that a clock tells, and times as much as expected
MANY = 8  # steps
RECENT = 0.6  # what a round's seconds weigh after the next one, where rounds are settled anew
# Tokens of the target alone that drafting may lose: before it has gained any, at the begin of a later text, and of what it has
# gained; the share of that a round may lose
FIRST_CREDIT, LEAST_CREDIT, MOST_CREDIT, RISK = 3.0, 1.0, 12.0, 0.5


class FixedLength:
    """Always gamma tokens; costs are kept up where there are any."""

    def __init__(self, gamma: int, costs: "Costs | None" = None) -> None:
        self._gamma, self._costs = gamma, costs
        self.most = self._left = 0
        if costs:
            costs.begin_text()

    def begins(self, most: int) -> bool:
        self.most = self._left = min(self._gamma, most)
        return self._left > 0

    def goes_on(self, confidence: float) -> bool:
        self._left -= 1
        return self._left > 0

    def takes(self, confidences: list[float]) -> int:
        return len(confidences)

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if self._costs:
            seconds = pass_seconds + draft_seconds
            believed = self._costs.believed(n_drafted, seconds)
            self._costs.saw(n_drafted, pass_seconds, draft_seconds)
            self._costs.brought(n_accepted + 1, seconds, believed)


class Level:
    """A running mean of what is measured in noise. What is far off moves it little, several in a row that agree move it there.

    Noise makes a pass slow, hardly ever quick: of slow ones it takes three, of quick ones two.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self.n = 0  # how many were seen
        self.is_doubted = False  # whether the last one was far off
        self._last = self._before = value

    def saw(self, new: float, share: float = SHARE_OF_NEW) -> None:
        new = max(new, LEAST)
        old, last, before = self.value, self._last, self._before
        most, least = FAR * old, old / FAR
        self.n, self._last, self._before, self.is_doubted = self.n + 1, new, last, not least <= new <= most
        if min(new, last, before) > most and max(new, last, before) < FAR * min(new, last, before):
            self.value, self.is_doubted = min(new, last, before), False
        elif new < least and last < least:
            self.value, self.is_doubted = max(new, last), False
        else:
            self.value = old + max(share, 1 / (self.n + 1)) * (min(max(new, least), most) - old)


class Costs:
    """Seconds of a target's pass over T tokens, measured at some T, and of a draft: of its start and of each token.

    What was measured at the start is a first guess: all are kept up with what steps take. A pass over one token has a level of
    its own, those over more share one. The machine's speed changes for all at once, so that either moves the other until that
    is seen itself; then it is known whether it was the machine or the curve.

    credit: tokens of the target alone that drafting may still lose, see `AutoLength`.
    """

    def __init__(self, passes: Mapping[int, float], draft: float, start: float = 0.0) -> None:
        measured = sorted(passes)
        curve = np.interp(np.arange(MAX_TOKENS + 1), measured, [passes[n] for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # arithmetic alone
        self._curve: list[float] = curve.tolist()  # Python's numbers: a step of a small model has no microsecond to lose
        self._token, self._scale = Level(self._curve[1]), Level(1.0)
        self._scale_then = 1.0  # when a pass over one token was last seen
        self._n_plain, self._n_more = MAX_TOKENS, 0  # such passes since the last one over more, and the other way round
        self._one = self._curve[1]
        self._before = 1.0, self._one  # the scale and a pass over one token, when one over more was seen
        self._is_asked, self._is_behind_draft = False, draft > 0.0
        self.start, self.draft = start, draft
        self.catch_up = CATCH_UP
        self._draft_ratio = 1.0  # of the last draft's seconds to those that were expected
        self._first_draft = 0.0  # a draft of one token as it was measured, in tokens of the target alone
        self._sums = [0.0] * 5  # of the last drafts: how many, their n, n^2, seconds, n seconds
        self._needed: list[float] = []
        self._needed_of: list[float] = []
        self.credit = FIRST_CREDIT
        self.unread: list[float] = []  # seconds of steps without a draft that nobody has looked at yet: see `read`
        self.begin_text()

    def begin_text(self) -> None:
        """Count anew what the target alone would have taken; and half believe what has become dear, beside the target's token."""
        self.read()
        measured = self._one / self._curve[1]
        if self._scale.value > measured:
            self._scale.value = self._scale_then = (self._scale.value * measured) ** 0.5
            self._before = self._scale.value, self._one
        if self._sums[0] and self.start + self.draft > (first := self._first_draft * self._one):
            share = (first / (self.start + self.draft)) ** 0.5
            self.start, self.draft = share * self.start, share * self.draft
            self._sums[3:] = [share * seconds for seconds in self._sums[3:]]
        self._n_alone, self._alone = 0, 0.0
        self._took = self._believed = 0.0  # seconds of steps, with and without those beyond belief

    def read(self) -> None:
        """Take in what is unread, of many at once their mean less stalls: beside a small target one at a time would be dear."""
        unread, self.unread = self.unread, []
        if len(unread) > MANY:
            token, first, unread = self._token, unread[:-MANY], unread[-MANY:]
            most = FAR * sorted(first)[len(first) // 2]
            mean = max(sum([min(seconds, most) for seconds in first]) / len(first), LEAST)
            self._n_plain = min(self._n_plain + len(first), MAX_TOKENS)
            token.value = self._one = mean
            self._follow()
            self.brought(len(first), sum(first), len(first) * mean)
        for seconds in unread:
            self.saw(0, seconds, 0.0)
            self.brought(1, seconds, self.believed(0, seconds))

    @property
    def plain_seconds(self) -> float:
        """What a token of the last text would have taken the target alone, by what was known with each step.

        Stalls, which steps of any kind have, included.
        """
        self.read()
        return self._alone / self._n_alone * (self._took / self._believed) if self._n_alone else self.of(1)

    def brought(self, n_tokens: int, seconds: float, believed: float) -> None:
        """A step's tokens and seconds, and those of it that are believed to be no stall."""
        self._n_alone += n_tokens
        self._alone += n_tokens * self._one
        self._took += seconds
        self._believed += believed

    def believed(self, n_drafted: int, seconds: float, n_missed: int = 0) -> float:
        """A step's seconds, as far as they can be believed."""
        return max(min(seconds, 2 * (self.of(n_drafted + 1) + self.of_draft(n_drafted, n_missed))), LEAST)

    def of(self, n: int) -> float:
        """Seconds of a pass over n tokens."""
        return self._curve[n] * self._scale.value if n > 1 else self._one

    def of_draft(self, n: int, n_missed: int = 0) -> float:
        """Seconds of a draft of n tokens that has not run so many tokens of the text yet."""
        return self.start + (n + n_missed * self.catch_up) * self.draft if n else 0.0

    @property
    def passes(self) -> Float64:
        """Seconds of passes over 0 to MAX_TOKENS tokens; more tokens never take less, whatever the noise has it."""
        curve = np.array(self._curve) * self._scale.value
        curve[:2] = self._one
        rising: Float64 = (np.maximum.accumulate(curve) + np.minimum.accumulate(curve[::-1])[::-1]) / 2
        return rising

    @property
    def is_new(self) -> bool:
        """Whether no step without a draft was seen yet."""
        return not self._token.n

    @property
    def is_doubtful(self) -> bool:
        """Whether it takes such a step to know what a token of the target alone costs."""
        return self._is_asked or self._token.is_doubted or not 1 / DRIFT < self._scale.value / self._scale_then < DRIFT

    def look(self) -> None:
        """Ask for such a step."""
        self._is_asked = True

    def needed_survivals(self, rate: float) -> list[float]:
        """What the chance that the first k proposals stand has to exceed for more of them to pay, for k = 0 to MAX_GAMMA.

        Each token behind them stands at `rate`. Computed anew where that or the costs' ratios have moved: it takes as long as a
        small model's token.
        """
        token = self.of(1)
        now = [rate, (self.start + 2 * self.draft) / token, self.of(4) / token, self.of(8) / token]
        if not self._needed or any(abs(new - old) > MOVED * old for new, old in zip(now, self._needed_of, strict=True)):
            self._needed, self._needed_of = _needed_survivals(self, rate), now
        return self._needed

    def saw(self, n_drafted: int, pass_seconds: float, draft_seconds: float, n_missed: int = 0) -> None:
        """A step's seconds; n_missed: tokens of the text that the draft ran first."""
        token, scale = self._token, self._scale
        if not n_drafted and self._is_behind_draft:  # which has put the target's weights out of the cache
            self._is_behind_draft = False
            return
        if not n_drafted:
            self._is_asked = False
            if abs(pass_seconds - self._one) < abs(pass_seconds - token.value):  # it was the machine that moved, not the curve
                token.value = self._one
            token.saw(pass_seconds, min(SHARE_OF_NEW * (1 + self._n_more / 2), 0.5))
            self._n_plain, self._n_more = min(self._n_plain + 1, MAX_TOKENS), 0
            self._one = token.value
            self._follow()
            return
        n = n_drafted + 1
        ratio = pass_seconds / self.of(n)
        scale.saw(pass_seconds / self._curve[n])
        self._one = token.value * scale.value / self._scale_then
        self._curve[n] *= min(max(ratio, 0.5), 2.0) ** 0.02
        self._n_plain, self._n_more, self._is_behind_draft = 0, self._n_more + 1, self.draft > 0.0
        self._before = scale.value, self._one
        if self.draft:
            self._saw_draft(n_drafted, n_missed, draft_seconds)

    def _follow(self) -> None:
        """Passes over more tokens are taken to move with those over one, the more the longer they were not seen; none is less."""
        scale, one = self._before
        share = self._n_plain / MAX_TOKENS
        self._scale.value = self._scale_then = max(scale * (self._one / one) ** share, self._one / self._curve[2])

    def _saw_draft(self, n: int, n_missed: int, seconds: float) -> None:
        """A line through the last drafts, start + n draft: the first token finds the draft's weights out of the cache."""
        if n_missed:
            catch_up = (seconds - self.of_draft(n)) / (n_missed * self.draft)
            self.catch_up += 0.5 * (min(max(catch_up, 0.0), 1.0) - self.catch_up)
            return
        expected = self.of_draft(n)
        last, self._draft_ratio = self._draft_ratio, max(seconds / expected, LEAST)
        moved = min(max(_agreed(last, self._draft_ratio), 0.1), 10.0)
        one, n1, n2, s, ns = self._sums
        if not one:
            self._first_draft = (self.start + self.draft) / self._one
        if moved != 1.0:
            expected, self._draft_ratio = expected * moved, self._draft_ratio / moved
            s, ns, self.draft = s * moved, ns * moved, self.draft * moved
        seconds = min(max(seconds, 0.5 * expected), 2 * expected)
        one, n1, n2 = MEMORY * one + 1.0, MEMORY * n1 + n, MEMORY * n2 + n * n
        s, ns = MEMORY * s + seconds, MEMORY * ns + n * seconds
        self._sums = [one, n1, n2, s, ns]
        spread = one * n2 - n1 * n1
        if spread > 0.1 * one * one:  # else all are of one length, and what is dear about them cannot be told
            self.draft = min(max((one * ns - n1 * s) / spread, 0.05 * s / n1), s / n1)
        self.start = max(0.0, (s - self.draft * n1) / one)
        if not self.start:
            self.draft = s / n1


class Acceptance:
    """How often proposals stood, by their confidence, the latest weighing most. prior: by bucket, before any was seen."""

    def __init__(self, prior: Sequence[float] = MARGIN_RATES) -> None:
        self.rates = [*prior]
        self._stood = [PRIOR_WEIGHT * rate for rate in (*prior, PRIOR_RATE)]  # the last one counts all
        self._seen = [PRIOR_WEIGHT] * (BUCKETS + 1)

    @property
    def rate(self) -> float:
        """Of all confidences."""
        return self._stood[-1] / self._seen[-1]

    def saw(self, bucket: int, stood: bool) -> None:
        """A proposal that the target judged."""
        for i in (bucket, BUCKETS):
            self._stood[i] = MEMORY * self._stood[i] + stood
            self._seen[i] = MEMORY * self._seen[i] + 1.0
        self.rates[bucket] = self._stood[bucket] / self._seen[bucket]


def _agreed(last: float, new: float) -> float:
    """What two ratios in a row are off by at least, 1 where they are not, or not by as much: stalls differ."""
    if FAR < last < FAR * new and FAR < new < FAR * last:
        return min(last, new)
    return max(last, new) if last < 1 / FAR and new < 1 / FAR else 1.0


def bucket_of(confidence: float) -> int:
    """The bucket of a confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), BUCKETS - 1)


class AutoLength:
    """As many tokens as pay. costs and acceptance outlive a text; costs.draft is 0 where proposing costs nothing.

    What is expected is believed as far as steps bear it out: a round's tokens less those that its seconds would have brought
    without a draft are its gain, and where gains have used up the credit no more is drafted than plain steps earn anew. So a
    text loses little, whatever is wrong about the costs.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        self.costs, self.acceptance = costs, acceptance
        self.most = self._round = 0
        self._tokens = self._spent = 1.0  # tokens of the last rounds, and those that a target alone had had
        self._survival, self._budget = 1.0, 0.0
        self._buckets: list[int] = []
        self._needed: list[float] = []  # what survival k tokens need to have, for another to be worth it
        self._since_draft = 0  # tokens that the draft has not run yet
        self._is_trial, self._n_trials = False, 0
        self.affordable, self._credit = 0, 0.0  # tokens that may be lost at once, and the credit below which those are fewer
        self._rest = self._rested = 0  # rounds until drafts are looked at again, and since
        self._recent = 0.0  # seconds of the last rounds with a draft
        self._excess, self._beyond = 0.0, 1.0  # of the last one, seconds beyond belief, and times as many as are believed
        costs.credit = min(max(costs.credit, LEAST_CREDIT), FIRST_CREDIT)
        costs.begin_text()

    def begins(self, most: int) -> bool:
        if self._rest:  # a small target's token takes no longer than a look at what pays
            return False
        costs = self.costs
        self._buckets = []
        self._survival, self._is_trial = 1.0, False
        self._wake_up()
        self._round += 1
        if self._round >= FIRST_LOOK and self._round & (self._round - 1) == 0:
            costs.look()
        if most < 1 or costs.is_doubtful or (costs.is_new and self._round <= 2):
            return False
        if costs.credit <= 0.0:
            self._rest = min(MOST_REST, LOOK + int(-costs.credit / TRIAL_SHARE))
            return False
        self.most = min(most, MAX_GAMMA)
        if costs.draft == 0.0:
            return True
        if self._since_draft or self._round < 16 or self._round % 8 == 0 or costs.credit < self._credit:
            self._needed = costs.needed_survivals(self.acceptance.rate)
            self._risk_anew()
        if self._needed[0] <= 1.0 and self.affordable:
            self.most = min(self.most, self.affordable)
            return True
        self._is_trial = self._may_try()
        return self._is_trial

    def _risk_anew(self) -> None:
        """How many tokens may be lost at once."""
        costs = self.costs
        self._credit = 0.75 * costs.credit
        left = (1 + RISK * costs.credit) * costs.of(1)
        self.affordable = bisect_right(
            range(1, MAX_GAMMA + 1), left, key=lambda n: costs.of(n + 1) + costs.of_draft(n, self._since_draft)
        )

    def _may_try(self) -> bool:
        """Whether a draft that does not seem to pay is tried again; where not, how long nobody asks."""
        costs, token = self.costs, self.costs.of(1)
        n = min(self.most, TRIAL_TOKENS)
        price = self._price(n)
        if price > DEAR / 2:
            n, price = 1, self._price(1)
        self.most = n
        if self._is_tried(price):
            return True
        saved = TRIAL_SHARE - costs.catch_up * costs.draft / token  # by a round without a draft
        self._rest = min(MOST_REST, 1 + int((price - min(self._budget, costs.credit)) / saved)) if saved > 0 else MOST_REST
        return False

    def _price(self, n: int) -> float:
        """Tokens of the target alone that proposing n tokens takes beyond the pass that comes anyway."""
        costs = self.costs
        return (costs.of_draft(n, self._since_draft) + costs.of(1 + n)) / costs.of(1) - 1.0

    def _is_tried(self, price: float) -> bool:
        """Whether that may be spent on a look."""
        credit = self.costs.credit
        if self._n_trials < TRIAL_ROUNDS and price < min(DEAR, credit):
            self._n_trials += 1  # it has just run the prompt: a trial costs least
            return True
        return price < min(self._budget, credit)

    def _wake_up(self) -> None:
        """Make up for the rounds that nobody looked at."""
        if self._rested:
            before = self.costs.of(1)
            self.costs.read()
            self._settle(before)
            self._earn(self._rested)
            self._recent, self._rested = 0.0, 0

    def _earn(self, n_rounds: int) -> None:
        """By rounds without a draft."""
        earned = TRIAL_SHARE * n_rounds
        self._budget += earned
        if self.costs.credit < FIRST_CREDIT:
            self.costs.credit += earned
        self._since_draft += n_rounds

    def goes_on(self, confidence: float) -> bool:
        bucket = bucket_of(confidence)
        self._buckets.append(bucket)
        self._survival *= self.acceptance.rates[bucket]
        n = len(self._buckets)
        return n < self.most and (self._is_trial or self._survival > self._needed[n])

    @property
    def rate(self) -> float:
        """Tokens a second, of the last rounds, or of the target alone where that is quicker."""
        return max(self._tokens / self._spent, 1.0) / self.costs.of(1)

    def takes(self, confidences: list[float]) -> int:
        rate, of = self.rate, self.costs.of
        self._buckets = [bucket_of(confidence) for confidence in confidences]
        token, best, n_best, survival, gain = of(1), 0.0, 0, 1.0, 0.0
        most = token * RISK * self.costs.credit
        for n, bucket in enumerate(self._buckets, 1):
            more = of(n + 1) - token
            if more > most:
                break
            survival *= self.acceptance.rates[bucket]
            gain += survival
            worth = gain - rate * more
            if worth > best:
                best, n_best = worth, n
        if not n_best and confidences and self._is_tried(of(2) / token - 1.0):
            n_best = 1
        del self._buckets[n_best:]
        return n_best

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if self._rest:
            self._rest, self._rested = self._rest - 1, self._rested + 1
            self.costs.unread.append(pass_seconds)
            return
        if n_drafted:
            self._saw_round(n_drafted, n_accepted, pass_seconds + draft_seconds)
            self._saw_costs(n_drafted, pass_seconds, draft_seconds)
            self._budget, self._since_draft = 0.0, 0
        else:
            self._saw_costs(0, pass_seconds, 0.0)
            self.costs.brought(1, pass_seconds, self.costs.believed(0, pass_seconds))
            self._count(1, pass_seconds)
            self._earn(1)
            self._recent *= RECENT
            self.costs.credit -= min(draft_seconds / self.costs.of(1), 1.0)  # what finding no proposal took

    def _saw_round(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """What a round with a draft brought."""
        costs = self.costs
        believed = costs.believed(n_drafted, seconds, self._since_draft)
        costs.brought(n_accepted + 1, seconds, believed)
        beyond, excess = seconds / believed, min(seconds, 2 * believed) - believed
        seconds = believed
        if excess and self._excess and 1 / FAR < beyond / self._beyond < FAR:  # twice in a row by as much is no stall
            seconds += excess + self._excess
        self._beyond, self._excess = beyond, excess
        costs.credit = min(costs.credit + n_accepted + 1 - seconds / costs.of(1), MOST_CREDIT)
        self._recent = RECENT * self._recent + seconds
        self._count(n_accepted + 1, seconds)
        for i, bucket in enumerate(self._buckets[: n_accepted + 1]):
            self.acceptance.saw(bucket, i < n_accepted)

    def _count(self, n_tokens: int, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + n_tokens
        self._spent = MEMORY * self._spent + seconds / self.costs.of(1)

    def _saw_costs(self, n_drafted: int, pass_seconds: float, draft_seconds: float) -> None:
        costs, before = self.costs, self.costs.of(1)
        costs.saw(n_drafted, pass_seconds, draft_seconds, self._since_draft)
        self._settle(before)

    def _settle(self, before: float) -> None:
        """The last rounds' gains anew where a token of the target alone turns out to cost something else."""
        costs = self.costs
        costs.credit = min(costs.credit + self._recent * (1 / before - 1 / costs.of(1)), MOST_CREDIT)


def _needed_survivals(costs: Costs, rate: float) -> list[float]:
    """See `Costs.needed_survivals`."""
    gains: Float64 = np.cumsum(rate ** PROPOSALS[1:])  # of 1, 2, ... tokens
    passes = costs.passes[1:]
    seconds = passes + PROPOSALS * costs.draft
    seconds[1:] += costs.start
    best = max(1.0 / seconds[0], np.max((1.0 + gains) / seconds[1:]))
    more = seconds[AFTER] - seconds[:, None]
    needed = best * np.maximum(more, 0.0) / gains[np.maximum(AFTER - PROPOSALS[:, None], 1) - 1]
    needed[-1] = np.inf
    result: list[float] = needed.min(axis=1).tolist()
    return result
