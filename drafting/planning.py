"""How long a proposal gets: what pays, by measured costs and by what has stood so far. Knows no models.

A round of n proposals yields 1 + sum_{k <= n} S_k tokens, S_k the chance that the first k stand, and takes c(n + 1) + n d
seconds, c(T) a pass of the target over T tokens and d a token of the draft (Leviathan et al. 2023, arXiv:2211.17192, section
3.3). With R the best rate that can be had, m tokens more are worth their while if they are expected to bring more than R times
their seconds: the optimal stopping of a renewal process. S_k is the product of the acceptance that proposals of such confidence
have had.
"""

import math
from bisect import bisect_right
from collections.abc import Callable

from .estimates import FIRST_CREDIT, MAX_GAMMA, MEMORY, Acceptance, Costs, Needed, bucket_of

TRIAL_SHARE = 0.01  # of the time goes into drafts that do not seem to pay, to look again
TRIAL_TOKENS, TRIAL_ROUNDS = 2, 2  # of such a draft, and the rounds that a text begins with it
DEAR = 2.5  # tokens of the target alone: a trial that seems so dear is not even tried
LOOK = 8  # rounds without a draft, behind which one is looked at in so many: that takes too long beside a small target
FIRST_LOOK = 32  # the first round that is made without a draft, to see c(1); then the 64th, the 128th, ...
RECENT = 0.6  # what a round's seconds weigh after the next one, where rounds are settled anew
# Tokens of the target alone that drafting may lose at the begin of a later text, and of what it has gained; the share of that
# a round may lose
LEAST_CREDIT, KNOWN_CREDIT, MOST_CREDIT, RISK = 2.0, 6.0, 12.0, 0.5


class FixedLength:
    """Always gamma tokens; costs are kept up where there are any."""

    def __init__(self, gamma: int, costs: Costs | None = None) -> None:
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
            self._costs.brought(n_accepted + 1, n_drafted, pass_seconds + draft_seconds)
            self._costs.saw(n_drafted, pass_seconds, draft_seconds)


class Chain:
    """A proposal as it grows: how likely it is to stand, by how often tokens of such confidence have."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance, self.most = acceptance, 0
        self._begin()

    def _begin(self) -> None:
        self._buckets: list[int] = []
        self._survival, self._is_trial = 1.0, False

    def _grow(self, confidence: float) -> int:
        """By a token; how many there are."""
        bucket = bucket_of(confidence)
        self._buckets.append(bucket)
        self._survival *= self.acceptance.rates[bucket]
        return len(self._buckets)

    def _take(self, confidences: list[float], rate: float, seconds: Callable[[int], float], may_try: Callable[[], bool]) -> int:
        """As many of the tokens as are the most worth, at that rate, which n more take so many seconds; or one as a trial."""
        best, n_best, gain, rates = 0.0, 0, 0.0, self.acceptance.rates
        self._buckets, survival = [bucket_of(confidence) for confidence in confidences[: self.most]], 1.0
        for n, bucket in enumerate(self._buckets, 1):
            survival *= rates[bucket]
            gain += survival
            worth = gain - rate * seconds(n)
            if worth > best:
                best, n_best = worth, n
        if self._buckets and not n_best and may_try():
            n_best = 1
        del self._buckets[n_best:]
        return n_best

    def _judged(self, n_drafted: int, n_accepted: int) -> None:
        for i, bucket in enumerate(self._buckets[: min(n_drafted, n_accepted + 1)]):
            self.acceptance.saw(bucket, i < n_accepted)


class AutoLength(Chain):
    """As many tokens as pay. costs and acceptance outlive a text; costs.draft is 0 where proposing costs nothing.

    What is expected is believed as far as steps bear it out: a round's tokens less those that its seconds would have brought
    without a draft are its gain, and where gains have used up the credit no more is drafted than plain steps earn anew. So a
    text loses little, whatever is wrong about the costs.
    """

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        super().__init__(acceptance)
        self.costs, self._round = costs, 0
        self._tokens = self._spent = 1.0  # tokens of the last rounds, and those that a target alone had had
        self._budget = 0.0
        self._needed: Needed  # what survival k tokens need to have, for another to be worth it
        self._since_draft = 0  # tokens that the draft has not run yet
        self._n_trials = 0
        self.affordable, self._credit = 0, 0.0  # tokens that may be lost at once, and the credit below which those are fewer
        self._recent = 0.0  # seconds of the last rounds with a draft
        costs.credit = min(max(costs.credit, LEAST_CREDIT), KNOWN_CREDIT)
        costs.begin_text()

    def begins(self, most: int) -> bool:
        costs = self.costs
        self._begin()
        self._round += 1
        if self._round >= FIRST_LOOK and self._round & (self._round - 1) == 0:
            costs.is_asked = True
        self.most = min(most, MAX_GAMMA)
        if self.most < 1 or costs.is_doubtful or (costs.is_new and self._round <= 2) or costs.credit <= 0.0:
            return False
        if costs.draft == 0.0:
            return True
        if self._since_draft > LOOK and self._round % LOOK:
            return False
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
        """Whether a draft that does not seem to pay is tried again."""
        n = min(self.most, TRIAL_TOKENS)
        price = self._price(n)
        if price > DEAR / 2:
            n, price = 1, self._price(1)
        self.most = n
        return self._is_tried(price)

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

    def goes_on(self, confidence: float) -> bool:
        n = self._grow(confidence)
        return n < self.most and (self._is_trial or self._survival > self._needed[n])

    @property
    def rate(self) -> float:
        """Tokens a second, of the last rounds, or of the target alone where that is quicker."""
        return max(self._tokens / self._spent, 1.0) / self.costs.of(1)

    def takes(self, confidences: list[float]) -> int:
        of, token = self.costs.of, self.costs.of(1)
        most = token * RISK * self.costs.credit

        def seconds(n: int) -> float:
            more = of(n + 1) - token
            return more if more <= most else math.inf

        return self._take(confidences, self.rate, seconds, lambda: self._is_tried(of(2) / token - 1.0))

    def saw(self, n_drafted: int, n_accepted: int, pass_seconds: float, draft_seconds: float) -> None:
        costs, n_tokens = self.costs, n_accepted + 1
        if n_drafted:
            believed = costs.brought(n_tokens, n_drafted, pass_seconds + draft_seconds, self._since_draft)
            costs.credit = min(costs.credit + n_tokens - believed / costs.of(1), MOST_CREDIT)
            self._recent = RECENT * self._recent + believed
            self._count(n_tokens, believed)
            self._judged(n_drafted, n_accepted)
        before = costs.of(1)
        costs.saw(n_drafted, pass_seconds, draft_seconds, self._since_draft)
        # the last rounds' gains anew where a token of the target alone turns out to cost something else
        costs.credit = min(costs.credit + self._recent * (1 / before - 1 / costs.of(1)), MOST_CREDIT)
        if n_drafted:
            self._budget, self._since_draft = 0.0, 0
            return
        costs.brought(1, 0, pass_seconds)
        self._count(1, pass_seconds)
        self._budget, self._since_draft = self._budget + TRIAL_SHARE, self._since_draft + 1
        costs.credit += TRIAL_SHARE if costs.credit < FIRST_CREDIT else 0.0
        self._recent *= RECENT
        costs.credit -= min(draft_seconds / costs.of(1), 1.0)  # what finding no proposal took

    def _count(self, n_tokens: int, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + n_tokens
        self._spent = MEMORY * self._spent + seconds / self.costs.of(1)
