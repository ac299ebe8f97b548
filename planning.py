"""How long a proposal gets: what pays, by measured costs and by what has stood so far. Knows no models.

A round of n proposals yields 1 + sum_{k <= n} S_k tokens, S_k the chance that the first k stand, and takes c(n + 1) + n d
seconds, c(T) a pass of the target over T tokens and d a token of the draft (Leviathan et al. 2023, arXiv:2211.17192, section
3.3). With R the best rate that can be had, m tokens more are worth their while if they are expected to bring more than R times
their seconds: the optimal stopping of a renewal process. S_k is the product of the acceptance that proposals of such confidence
have had.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .kernels import MAX_TOKENS
from .machine.vectors import Float64

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
DEAR = 2.0  # times the target's token: a draft that seems so dear is not even tried
MOVED = 0.1  # by so much, costs are other costs
MOST_REST = 64  # rounds without a look
CATCH_UP = 10  # tokens that a draft runs in a prompt's way in the time of one
PLAIN_ROUND = 64  # the first one that is made without a draft, to see c(1); then the 128th, the 256th, ...


class Plan(Protocol):
    """Whoever decides how long proposals get: asked before each and after each of its tokens, told what became of it.

    most: how many tokens the proposal that has begun may get.
    """

    most: int

    def begins(self, most: int) -> bool:
        """Whether to draft for the next step; a proposal may have up to `most` tokens."""

    def goes_on(self, confidence: float) -> bool:
        """Whether another token is wanted behind one of that confidence, which is >= 0 and rises with the odds that it stands."""

    def takes(self, confidences: list[float]) -> int:
        """How many of tokens of such confidences to propose, of a drafter that has them at no cost; in the place of `goes_on`."""

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        """How the step went."""


class FixedLength:
    """Always gamma tokens; costs are kept up where there are any."""

    def __init__(self, gamma: int, costs: "Costs | None" = None) -> None:
        self._gamma, self._costs = gamma, costs
        self.most = self._left = 0

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
            self._costs.saw(n_drafted, pass_seconds, draft_seconds)


class Costs:
    """Seconds of a target's pass over T tokens, measured at some T, and of a draft: of its start and of each token.

    All are kept up with what steps take.

    The machine's speed changes for all T at once more than for one, so an observation moves all of them, its own a little more.
    """

    def __init__(self, passes: Mapping[int, float], draft: float, start: float = 0.0) -> None:
        measured = sorted(passes)
        curve = np.interp(np.arange(MAX_TOKENS + 1), measured, [passes[n] for n in measured])
        beyond = np.arange(measured[-1] + 1, MAX_TOKENS + 1)
        curve[beyond] *= beyond / measured[-1]  # arithmetic alone
        self._curve: list[float] = curve.tolist()  # Python's numbers: a step of a small model has no microsecond to lose
        self._scale = 1.0
        self.start, self.draft = start, draft
        self._sums = [0.0] * 5  # of the last drafts: how many, their n, n^2, seconds, n seconds
        self._needed: list[float] = []
        self._needed_of: list[float] = []

    def of(self, n: int) -> float:
        """Seconds of a pass over n tokens."""
        return self._curve[n] * self._scale

    @property
    def passes(self) -> Float64:
        """Seconds of passes over 0 to MAX_TOKENS tokens; more tokens never take less, whatever the noise has it."""
        curve = np.array(self._curve)
        rising: Float64 = (np.maximum.accumulate(curve) + np.minimum.accumulate(curve[::-1])[::-1]) * (self._scale / 2)
        return rising

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

    def saw(self, n_drafted: int, pass_seconds: float, draft_seconds: float) -> None:
        """A step's seconds; one that somebody interrupted moves them no further than a slow one."""
        ratio = min(max(pass_seconds / self.of(n_drafted + 1), 0.5), 2.0)
        self._scale *= ratio**0.1
        self._curve[n_drafted + 1] *= ratio**0.02
        if n_drafted and self.draft:
            expected = self.start + n_drafted * self.draft
            self._saw_draft(float(n_drafted), min(max(draft_seconds, 0.5 * expected), 2 * expected))

    def _saw_draft(self, n: float, seconds: float) -> None:
        """A line through the last drafts, start + n draft: the first token finds the draft's weights out of the cache."""
        self._sums = [MEMORY * old + new for old, new in zip(self._sums, (1.0, n, n * n, seconds, n * seconds), strict=True)]
        one, n1, n2, s, ns = self._sums
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


def bucket_of(confidence: float) -> int:
    """The bucket of a confidence >= 0, by its power of two."""
    return min(int(8.0 * min(confidence, 1e6)).bit_length(), BUCKETS - 1)


class AutoLength:
    """As many tokens as pay. costs and acceptance outlive a text; costs.draft is 0 where proposing costs nothing."""

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        self.costs, self.acceptance = costs, acceptance
        self.most = self._round = 0
        self._tokens, self._seconds = 1.0, costs.of(1)  # of the last rounds
        self._survival, self._budget = 1.0, 0.0
        self._buckets: list[int] = []
        self._needed: list[float] = []  # what survival k tokens need to have, for another to be worth it
        self._since_draft = 0  # tokens that the draft has not run yet
        self._is_trial = False
        self._rest, self._rested, self._rested_seconds = 0, 0, 0.0  # rounds until drafts are looked at again, and since

    def begins(self, most: int) -> bool:
        if self._rest:  # a small target's token takes no longer than a look at what pays
            return False
        self._buckets = []
        self.most, self._survival = min(most, MAX_GAMMA), 1.0
        self._is_trial = False
        if self.costs.draft == 0.0:
            return most > 0
        self._round += 1
        self._wake_up()
        if self._since_draft or self._round < 16 or self._round % 16 == 0:
            self._needed = self.costs.needed_survivals(self.acceptance.rate)
        if most < 1 or (self._round >= PLAIN_ROUND and self._round & (self._round - 1) == 0):
            return False
        if self._needed[0] <= 1.0:
            return True
        self._is_trial = self._may_try()
        return self._is_trial

    def _may_try(self) -> bool:
        """Whether a draft that does not seem to pay is tried again; where not, how long nobody asks."""
        costs, token = self.costs, self.costs.of(1)
        if self._round <= TRIAL_ROUNDS and costs.draft < DEAR * token:  # it has just run the prompt: a trial costs least
            return True
        price = (TRIAL_TOKENS + self._since_draft / CATCH_UP) * costs.draft + costs.start + costs.of(1 + TRIAL_TOKENS) - token
        if self._budget > price > 0:
            return True
        saved = TRIAL_SHARE * token - costs.draft / CATCH_UP  # by a round without a draft
        self._rest = min(MOST_REST, 1 + int((price - self._budget) / saved)) if saved > 0 else MOST_REST
        return False

    def _wake_up(self) -> None:
        """Make up for the rounds that nobody looked at."""
        if self._rested:
            self.costs.saw(0, self._rested_seconds / self._rested, 0.0)
            self._budget += TRIAL_SHARE * self._rested_seconds
            self._since_draft += self._rested
            self._rested, self._rested_seconds = 0, 0.0

    def goes_on(self, confidence: float) -> bool:
        bucket = bucket_of(confidence)
        self._buckets.append(bucket)
        self._survival *= self.acceptance.rates[bucket]
        n = len(self._buckets)
        return n < self.most and (n < TRIAL_TOKENS if self._is_trial else self._survival > self._needed[n])

    def takes(self, confidences: list[float]) -> int:
        rate, of = self._tokens / self._seconds, self.costs.of
        self._buckets = [bucket_of(confidence) for confidence in confidences]
        best, n_best, survival, gain = 0.0, 0, 1.0, 0.0
        for n, bucket in enumerate(self._buckets, 1):
            survival *= self.acceptance.rates[bucket]
            gain += survival
            worth = gain - rate * (of(n + 1) - of(1))
            if worth > best:
                best, n_best = worth, n
        del self._buckets[n_best:]
        return n_best

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        if self._rest:
            self._rest, self._rested, self._rested_seconds = self._rest - 1, self._rested + 1, self._rested_seconds + pass_seconds
            return
        self._tokens = MEMORY * self._tokens + n_accepted + 1
        self._seconds = MEMORY * self._seconds + pass_seconds + draft_seconds
        for i, bucket in enumerate(self._buckets[: n_accepted + 1]):
            self.acceptance.saw(bucket, i < n_accepted)
        if self._since_draft == 0 or not n_drafted:  # catching up is no draft token's price
            self.costs.saw(n_drafted, pass_seconds, draft_seconds)
        self._budget = 0.0 if n_drafted else self._budget + TRIAL_SHARE * pass_seconds
        self._since_draft = 0 if n_drafted else self._since_draft + 1


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
